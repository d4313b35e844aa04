"""Episodes: samples that are more than one generation, in front of any engine."""

from penstock.backends.episodes.context import EpisodeContext
from penstock.backends.episodes.opening import open_episodes

__all__ = ["EpisodeContext", "open_episodes"]
