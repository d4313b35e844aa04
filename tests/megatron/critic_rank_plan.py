"""What the ranks of the tests of a critic on ranks of its own are told, and tell."""

from __future__ import annotations

from typing import Any, NamedTuple


class Told(NamedTuple):
    """What one rank knows after some commands."""

    figures: list[dict[str, float]]
    opened: list[tuple[Any, Any, Any]]
    """Values, advantages and returns of each batch."""
    policy: dict[str, Any]
    """This rank's share of its weights; empty where other ranks have it."""
    critic: dict[str, Any]
    """Likewise."""
    num_held: int
    """Elements of parameters that lie in its memory once it has opened."""
    max_tokens: int
    """Of its micro-batches in the end."""
    saved: list[str]


class Short(NamedTuple):
    """Memory ends in the backward pass of the second layer."""

    rank: int
    max_inputs: int
