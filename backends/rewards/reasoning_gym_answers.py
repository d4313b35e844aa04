"""The reward ``reasoning_gym``: the task's own checker, on rows of ``reasoning_gym:NAME:N``.

What stands in the last ``<answer>…</answer>`` of the response is the answer; without such a mark it is the whole
response.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from penstock.backends.data.generated import unmarked
from penstock.backends.rewards.functions import NoRewardError

if TYPE_CHECKING:
    from collections.abc import Callable


def reasoning_gym_reward(response: str, metadata: dict[str, object]) -> float:
    """The checker's score, in ``[0, 1]``."""
    name = metadata.get("reasoning_gym")
    if not isinstance(name, str) or "entry" not in metadata:
        raise NoRewardError("the row is none of reasoning-gym's; the reward needs data.path: reasoning_gym:NAME:N")
    answer = extract_answer(response)
    return float(_checker(name)(response.strip() if answer is None else answer, unmarked(metadata["entry"])))


@cache
def _checker(name: str) -> Callable[[str, object], float]:
    dataset, config = DATASETS[name]
    return cast("Callable[[str, object], float]", dataset(config=config()).score_answer)
