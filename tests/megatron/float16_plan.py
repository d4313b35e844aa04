"""What the ranks of the tests of float16 are told, and tell."""

from __future__ import annotations

from typing import Any, NamedTuple


class Burst(NamedTuple):
    """The gradient between two layers overflows float16."""

    version: int
    """In the step that makes this one."""
    rank: int
    """On this one alone."""
    of_critic: bool = False
    """In a critic of its own, and not in the policy."""


class Trained(NamedTuple):
    """What one rank knows after some commands."""

    figures: list[dict[str, float]]
    """Of each batch."""
    notices: list[str]
    weights: list[dict[str, Any]]
    """This rank's share of those of policy and critic, once it has opened and after each batch."""
    scale: list[float]
    """In the end: it, and the steps since it was changed."""
    saved: list[str]
