"""A reward: the shorter, the better."""

from __future__ import annotations


def brevity(tokens: list[int]) -> dict[str, float]:
    return {"reward": 1 / (1 + len(tokens)), "num_tokens": len(tokens)}
