"""Reward functions and users' filters: the backends of the Scorer and the Filter."""

from penstock.backends.rewards.hub import open_filter, open_filters, open_rewards

__all__ = ["open_filter", "open_filters", "open_rewards"]
