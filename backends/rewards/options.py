"""The ``reward:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from penstock.messages.base import Options


class RewardOptions(Options, frozen=True, kw_only=True):
    """How responses are scored."""

    function: str = "math"
    """``math``, ``deepscaler``, ``dapo``, ``gpqa``, ``f1``, ``reasoning_gym``, ``lines``, ``random``, or
    ``file.py:function``. ``boxed_gpqa``, ``boxed_f1`` and ``boxed_reasoning_gym`` see the last box of the response
    alone. The page docs/rewards.md has the rules of each."""
    timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    num_retries: Annotated[int, Meta(ge=0)] = 1
    """How often a call that failed is tried again before the sample counts as failed."""
    num_workers: Annotated[int, Meta(ge=1)] = 1
    """Processes that run reward functions."""
