"""Episodes: samples that are more than one generation, in front of any engine."""

from penstock.backends.episodes.opening import open_episodes

__all__ = ["open_episodes"]
