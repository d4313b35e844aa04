"""What a run that has made no step yet is doing, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.texts import counted
from penstock.runtime.observability.live_state import PAUSED_TEXT
from penstock.runtime.observability.texts import short_count

if TYPE_CHECKING:
    from penstock.runtime.observability.live_state import LiveState

SLOW_REWARD_S: Final = 3.0
"""From which age of a call on people are told that rewards are what the run waits for."""


def start_phase(state: LiveState) -> str:
    """``loading the model``, ``warm start 43 %``, ``waiting for the first rewards: 12 calls, the oldest for 8 s``."""
    if state.warm_start is not None and state.warm_start < 1:
        return f"warm start {100 * state.warm_start:.0f} %"
    if state.is_loading and state.warm_start is None:
        return "loading the model"
    if state.is_paused:
        return PAUSED_TEXT
    rewards = state.rewards
    num_given = rewards.get("answered", 0.0) - rewards.get("failed", 0.0)
    waits_for_rewards = num_given <= 0 and rewards.get("oldest_s", 0.0) >= SLOW_REWARD_S
    which = "first" if state.version == 0 else "next"
    if waits_for_rewards:
        return f"waiting for the {which} rewards: {_calls(rewards)}{_failed(state)}"
    parts = [
        f"{counted(_running(state), 'request')} running, {short_count(state.figures.tokens_reported)} tokens so far"
    ]
    if num_given > 0:
        parts.append(f"{num_given:.0f} reward calls answered")
    if rewards.get("oldest_s", 0.0) >= SLOW_REWARD_S:
        parts.append(_calls(rewards))
    return f"generating the {which} batch: {', '.join(parts)}{_failed(state)}"


def _running(state: LiveState) -> int:
    return sum(int(engine.running or 0) for engine in state.engines.values())


def _calls(rewards: dict[str, float]) -> str:
    running, waiting = rewards.get("running", 0.0), rewards.get("waiting", 0.0)
    queue = f", {waiting:.0f} waiting" if waiting else ""
    failed = f", {rewards['failed']:.0f} failed" if rewards.get("failed") else ""
    return f"{running:.0f} reward calls running{queue}{failed}, the oldest for {rewards.get('oldest_s', 0.0):.0f} s"


def _failed(state: LiveState) -> str:
    number = state.figures.failures.num_samples
    return f"; {counted(number, 'sample')} failed" if number else ""
