"""The reward ``math``: 1 when the response's answer equals the label as mathematics, else 0.

Invariants:

* An answer that cannot be read counts as wrong: that is the model's doing. A label that cannot be read gives no
  reward at all: that is ours.
* No time limit in here. The library's own would turn a hang into a wrong answer; the worker's deadline ends the
  process, and the sample has no reward.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Final, Protocol, cast

import math_verify

from penstock.backends.rewards.boxes import BOXED, boxed_answers
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.text_answers import vote_form

THOUGHT_END: Final = "</think>"
"""What stands before is the model's own business."""
SOLUTION_MARK: Final = "####"
"""GSM8K's labels are whole solutions with the answer after this mark."""
NUM_CACHED_LABELS: Final = 4096

MAX_ANSWER_CHARACTERS: Final = 300
"""The longest answer of MATH has 159."""
MAX_TAIL_CHARACTERS: Final = 600
"""Of a response without a box: its last formula or number stands at its end."""
MAX_LAST_CHARACTERS: Final = 100
MAX_DEPTH: Final = 12
MAX_BOXES: Final = 32
_HUGE: Final = re.compile(
    r"\d{101}|\d{5}\s*\)?\s*!|!\s*!|[)}]\s*!|[eE][+-]?\d{5}|(?:\^|\*\*)\s*[{(]?\s*-?\d{5}"
    r"|[)}\]]\s*(?:\^|\*\*)\s*[{(]?\s*-?\d{2}|binom\s*\{?\s*\d{5}|\\int|(?:=[^=]{0,20}){9}"
)
"""What fills memory or takes for ever: many digits, factorials, large powers, also of sums, integrals, chains of equal
signs."""
_TOWER: Final = re.compile(r"(?:\^|\*\*)[\s{(]*[\w.\\]{1,40}[\s})]*[\s{(]*(?:\^|\*\*)")
"""A power of a power."""

_SIGNS: Final = (
    r"(?:\\(?:n?eqq?|ne|not|n?leq?q?|n?leqslant|n?geq?q?|n?geqslant|lt|gt|ll|gg|neg|lnot|implies|iff|equiv|nequiv"
    r"|Rightarrow|Leftrightarrow)(?![A-Za-z])|[<>≠≤≥≡¬])"
)
_RELATION: Final = re.compile(_SIGNS)
"""What says that something is not the number behind it, or not only it."""
_RELATION_AT_END: Final = re.compile(rf"{_SIGNS}[\s{{(\[$]{{0,8}}$")
_PERCENT: Final = re.compile(r"[\s}$)]{0,8}\\?%")
_OF_NUMBERS: Final = re.compile(r"\\(?:[dt]?frac|sqrt|cdot|times|div|left|right|pi|pm|[,;! ])(?![A-Za-z])")
_NUMERIC: Final = re.compile(r"[\d\s.,+*/^(){}!|-]*", re.ASCII)

_NUMBERS: Final = re.compile(r"-?\d[\d,]{0,60}(?:\.\d{1,60})?(?:/\d{1,60})?", re.ASCII)
_DIGITS: Final = re.compile(r"-?\d{1,18}", re.ASCII)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no time limit is set


class _MathVerify(Protocol):
    """The part of ``math_verify`` that is used."""

    def parse(self, pred: str, *, parsing_timeout: int | None) -> list[object]: ...
    def verify(self, gold: object, target: object, *, timeout_seconds: int | None) -> bool: ...


_LIBRARY: Final = cast("_MathVerify", math_verify)


def math_reward(response: str, label: str, truncated: bool) -> float:
    r"""Compare the response's answer with the label.

    The answer is in the last ``\boxed{…}``, or in all of them together where that gives the label (``\boxed{1} and
    \boxed{2}`` for ``1, 2``). Without a box it is the last formula or number, unless the length limit cut the response
    off: then no answer was given.
    """
    answer = label.rpartition(SOLUTION_MARK)[2].strip()
    if answer and _is_beyond_reach(answer):
        given = boxed_answers(response)[-1:]
        return float(bool(given) and _plainly(given[0]) == _plainly(answer))
    gold = _gold(answer)
    boxes = boxed_answers(response)
    if not boxes:
        if truncated:
            return 0.0
        tail = response[-MAX_TAIL_CHARACTERS:].strip()
        if _is_beyond_reach(tail, MAX_TAIL_CHARACTERS):  # of a derivation, say; its last line may be plain
            tail = tail.rpartition("\n")[2].rpartition(". ")[2][-MAX_LAST_CHARACTERS:]
        return 0.0 if _is_beyond_reach(tail) else float(_equals(gold, tail))
    last = boxes[-1].strip()
    if _is_beyond_reach(last):
        return float(_plainly(last) == _plainly(answer))
    if _DIGITS.fullmatch(last) and len(boxes) == 1 and _DIGITS.fullmatch(answer):
        return float(int(last) == int(answer))  # the same verdict without symbolic mathematics, a hundred times quicker
    if _equals(gold, f"{BOXED}{{{last}}}"):
        return 1.0
    is_several = 1 < len(boxes) <= MAX_BOXES and not any(map(_is_beyond_reach, boxes))
    return float(is_several and _equals(gold, _joined(boxes)))


def boxed_math_reward(response: str, label: str) -> float:
    """As ``math``, and an answer outside of a box is none."""
    return math_reward(response, label, truncated=True)


def deepscaler_reward(response: str, label: str) -> float:
    r"""As ``math`` for what comes after the last ``</think>``, where the answer must be in a ``\boxed{…}``. A response
    that does not end its thinking, or puts nothing into a box behind it, earns 0."""
    _, ended, solution = response.rpartition(THOUGHT_END)
    if not ended or not boxed_answers(solution):
        return 0.0
    boxes = boxed_answers(label)
    return math_reward(solution, boxes[-1] if boxes else label, truncated=False)


def math_answer(response: str, truncated: bool) -> str | None:
    """What is in the last box, else the last number of a response that has ended, for votes. Answers that are written
    differently and are not plain numbers (``2x`` and ``x+x``) are different votes."""
    boxes = boxed_answers(response)
    if boxes:
        return boxes[-1] if len(boxes[-1]) > MAX_ANSWER_CHARACTERS else vote_form(boxes[-1])
    numbers = [] if truncated else _NUMBERS.findall(response[-MAX_TAIL_CHARACTERS:])
    return vote_form(numbers[-1]) if numbers else None


def boxed_answer(response: str, truncated: bool) -> str | None:
    """As ``math``, and an answer outside of a box is none."""
    return math_answer(response, truncated=True)


def thought_answer(response: str, truncated: bool) -> str | None:
    """What is in the last box behind the thinking, for votes."""
    _, ended, solution = response.rpartition(THOUGHT_END)
    return math_answer(solution, truncated=True) if ended else None


def _joined(boxes: list[str]) -> str:
    """All boxes together, for answers that stand in several."""
    return " and ".join(f"{BOXED}{{{box.strip()}}}" for box in boxes)


def _is_beyond_reach(text: str, max_characters: int = MAX_ANSWER_CHARACTERS) -> bool:
    """Whether this is no answer that anybody could work out: libraries would try, and not end."""
    return (
        len(text) > max_characters
        or _HUGE.search(text) is not None
        or _TOWER.search(text) is not None
        or _depth(text) > MAX_DEPTH
    )


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(character, 0)
        deepest = max(deepest, depth)
    return deepest


def _plainly(text: str) -> str:
    return "".join(text.split()).removeprefix(f"{BOXED}{{").removesuffix("}")


def _equals(gold: list[object], text: str) -> bool:
    found = _LIBRARY.parse(text, parsing_timeout=None)
    return (
        bool(found)
        and _LIBRARY.verify(gold, found, timeout_seconds=None)
        and _says_so(gold, str(gold[-1]), text, str(found[-1]))
    )


def _says_so(gold: list[object], label: str, text: str, found: str) -> bool:
    """Whether an answer that the library takes for the label claims it. The library leaves out what it does not
    understand (``\\neq``), looks at the last side of an equation only, and takes ``500%`` for 5 as well as for 500."""
    before, _, after = text.rpartition(found)
    if not _RELATION.search(label) and (_RELATION.search(found) or _RELATION_AT_END.search(before)):
        return False
    if "=" not in label:
        sides = [side.strip() for side in found.split("=")[:-1]]
        if not all(_holds(gold, side) for side in sides if side and _is_number(side)):
            return False
    if "%" in label or not ("%" in found or _PERCENT.match(after)):
        return True
    return _holds(gold, found.replace("\\%", "").replace("%", ""))


def _holds(gold: list[object], text: str) -> bool:
    same = _LIBRARY.parse(f"{BOXED}{{{text}}}", parsing_timeout=None)
    return bool(same) and _LIBRARY.verify(gold, same, timeout_seconds=None)


def _is_number(text: str) -> bool:
    """Without unknowns."""
    return _NUMERIC.fullmatch(_OF_NUMBERS.sub("", text)) is not None


@lru_cache(NUM_CACHED_LABELS)
def _gold(answer: str) -> list[object]:
    if not answer:
        raise NoRewardError("the row has no label, and the reward 'math' compares with it (data.label_key)")
    written = answer if BOXED in answer or "$" in answer else f"{BOXED}{{{answer}}}"
    gold = _LIBRARY.parse(written, parsing_timeout=None)
    if not gold:
        raise NoRewardError(f"the label {answer[:80]!r} cannot be read as mathematics")
    return gold
