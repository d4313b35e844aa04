"""The reward functions that come with penstock.

``lines`` and ``random`` run in a thread of the Scorer's own process: their work is linear in the length of the
response, so they cannot hang, and a process would cost more than they do. The others get processes that can be killed:
most of them run the code of others on what a model wrote.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Final

from penstock.backends.data.lines import lines_reward
from penstock.backends.rewards.boxes import boxed_answers
from penstock.backends.rewards.functions import NoRewardError
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.backends.rewards.wire import RewardCall

IN_PROCESS: Final = ("lines", "random")
IN_WORKERS: Final = ("math", "deepscaler", "dapo", "gpqa", "f1", "ifbench", "reasoning_gym")
OF_THE_BACKEND: Final = ("length_penalty", "remote", "judge", "code")
"""What has options of its own, and is no function of a response alone."""
BOXED_PREFIX: Final = "boxed_"
BOXED: Final = tuple(f"{BOXED_PREFIX}{name}" for name in ("math", "gpqa", "f1", "ifbench", "reasoning_gym"))
"""What is in the last box alone is the response. (The others look for boxes, or for words around the answer,
themselves.)"""
REASONING_GYM: Final = ("reasoning_gym", f"{BOXED_PREFIX}reasoning_gym")
"""What the extra of that name is needed for."""
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "dapo": ("score", "acc"), **dict.fromkeys(("ifbench", "boxed_ifbench"), ("reward", "followed"))
}  # fmt: skip
"""Of those that return a dictionary: what can be the reward (``reward.key``). The others return a number."""
BUILT_IN: Final = (*IN_PROCESS, *IN_WORKERS, *BOXED, *OF_THE_BACKEND)


def built_in(name: str) -> Callable[..., object]:
    """One of :data:`IN_WORKERS` or :data:`BOXED`; imports what it needs.

    Raises:
        UserFault: there is no such function.
    """
    if name == "boxed_math":
        from penstock.backends.rewards.math_answers import boxed_math_reward

        return boxed_math_reward
    if name in BOXED:
        return _of_box(built_in(name.removeprefix(BOXED_PREFIX)))
    match name:
        case "math" | "deepscaler":
            from penstock.backends.rewards.math_answers import deepscaler_reward, math_reward

            return math_reward if name == "math" else deepscaler_reward
        case "dapo" | "gpqa" | "f1":
            from penstock.backends.rewards.text_answers import dapo_reward, f1_reward, gpqa_reward

            functions: dict[str, Callable[..., object]] = {"dapo": dapo_reward, "gpqa": gpqa_reward, "f1": f1_reward}
            return functions[name]
        case "ifbench":
            from penstock.backends.rewards.instructions import ifbench_reward

            return ifbench_reward
        case "reasoning_gym":
            from penstock.backends.rewards.reasoning_gym_answers import reasoning_gym_reward

            return reasoning_gym_reward
        case _:
            raise UserFault(f"reward function: expected one of {', '.join((*IN_WORKERS, *BOXED))}, got {name!r}")


def _of_box(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)  # which arguments it asks for as well
    def reward(*, response: str, **others: object) -> object:
        boxes = boxed_answers(response)
        return function(response=boxes[-1] if boxes else "", **others)

    return reward


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
