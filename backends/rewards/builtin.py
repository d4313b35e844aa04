"""The reward functions that come with penstock.

``lines`` and ``random`` run in a thread of the Scorer's own process: their work is linear in the length of the
response, so they cannot hang, and a process would cost more than they do. ``math`` and ``reasoning_gym`` run the
code of others on what a model wrote and get processes that can be killed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from penstock.backends.data.lines import lines_reward
from penstock.backends.rewards.functions import NoRewardError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.rewards.wire import RewardCall

IN_PROCESS: Final = ("lines", "random")
IN_WORKERS: Final = ("math", "reasoning_gym")
BUILT_IN: Final = (*IN_PROCESS, *IN_WORKERS)


def built_in(name: str) -> Callable[..., object]:
    """One of :data:`IN_WORKERS`; imports what it needs.

    Raises:
        ValueError: there is no such function.
    """
    if name == "math":
        from penstock.backends.rewards.math_answers import math_reward

        return math_reward
    if name == "reasoning_gym":
        from penstock.backends.rewards.reasoning_gym_answers import reasoning_gym_reward

        return reasoning_gym_reward
    raise ValueError(f"reward function: expected one of {', '.join(IN_WORKERS)}, got {name!r}")


def score_in_process(name: str, call: RewardCall) -> float:
    """Score with one of :data:`IN_PROCESS`.

    Raises:
        NoRewardError: the row has no label to compare with.
    """
    if name == "random":
        return random_reward(call.group_id, call.index)
    if not call.label:
        raise NoRewardError(f"row {call.row} has no label, and the reward 'lines' compares with it (data.label_key)")
    return lines_reward(call.response, call.label, truncated=call.truncated)


def random_reward(group_id: int, index: int) -> float:
    """Uniform in ``[0, 1)``, and the same each time for one sample."""
    digest = hashlib.blake2b(f"{group_id}/{index}".encode(), digest_size=7).digest()
    return (int.from_bytes(digest) >> 3) / 2**53
