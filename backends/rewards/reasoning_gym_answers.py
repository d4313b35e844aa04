"""The reward ``reasoning_gym``: the task's checker, on rows of ``reasoning_gym:NAME:N``.

What stands in the last ``<answer>…</answer>`` of the response is the answer; without such a mark it is the whole
response.

Invariants:

* No answer is run: tasks whose checker in the library would evaluate it have one of ours, and a task whose checker
  evaluates and has none is refused.
* What a checker raises at a model's answer is a wrong answer, where it judges the row's own without raising.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final, cast

from penstock.backends.data.generated import unmarked
from penstock.backends.processes.user_code import told
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.reasoning_gym_checkers import CHECKERS, PREPARED
from penstock.backends.rewards.reasoning_gym_scan import evaluates

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.rewards.reasoning_gym_checkers import Checker, Entry

OPENED: Final = "<answer>"
CLOSED: Final = "</answer>"
MAX_ANSWER_CHARACTERS: Final = 1 << 14
"""No answer of any task has as many. Checkers of the library are not all linear."""
_BEYOND_REACH: Final = re.compile(r"(?<![\w.])[\d_.]{1,40}[eE][+-]?\d[\d_]{3}|\d{4301}")
"""Of numbers: a checker would write them out."""


def reasoning_gym_reward(response: str, metadata: dict[str, object]) -> float:
    """The checker's score, in ``[0, 1]``."""
    name = metadata.get("reasoning_gym")
    if not isinstance(name, str) or "entry" not in metadata:
        raise NoRewardError("the row is none of reasoning-gym's; the reward needs data.path: reasoning_gym:NAME:N")
    entry = cast("Entry", unmarked(metadata["entry"]))
    answer = _answer(response)
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0
    return _checker(name)(answer, entry)


def unsafe_task(name: str) -> str:
    """Why answers of this task cannot be scored; empty: they can. An unknown one is not this function's business."""
    from reasoning_gym.factory import DATASETS

    if name in CHECKERS or name in PREPARED or name not in DATASETS:
        return ""
    found = evaluates(DATASETS[name][0])
    return found and (
        f"answers of reasoning-gym's task {name!r} cannot be scored: its checker would run them as Python ({found}), "
        "and there is none here instead; take another task, or a reward function of yours"
    )


def _answer(response: str) -> str:
    end = response.rfind(CLOSED)
    start = response.rfind(OPENED, 0, end) if end >= 0 else -1
    return response.strip() if start < 0 else response[start + len(OPENED) : end].strip()


@cache
def _checker(name: str) -> Checker:
    if own := CHECKERS.get(name):
        return own
    if why_not := unsafe_task(name):
        raise NoRewardError(why_not)
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise NoRewardError(f"reasoning-gym has no task {name!r}")
    dataset, config = DATASETS[name]
    score = cast("Callable[[str, object], float]", dataset(config=config()).score_answer)
    return _guarded(score, PREPARED.get(name, lambda entry: entry))


def _guarded(score: Callable[[str, object], float], prepared: Callable[[Entry], Entry]) -> Checker:
    def checker(answer: str, entry: Entry) -> float:
        if _BEYOND_REACH.search(answer):
            return 0.0
        try:
            return float(score(answer, prepared(entry)))
        except Exception as error:  # the checkers of a hundred tasks may raise anything
            try:
                score(str(entry["answer"]), prepared(entry))
            except Exception:
                raise NoRewardError(f"the task's checker cannot judge this row: {told(error)}") from error
            return 0.0

    return checker
