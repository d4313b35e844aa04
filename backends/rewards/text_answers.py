r"""Rewards that compare an answer with the label as text, a letter or a number; nothing here runs mathematics.

Invariants:

* Work is linear in the length of response and label: nothing that a model writes makes it slow.
* An answer that is not there or cannot be read is wrong: that is the model's doing. A label that nothing could ever
  equal gives no reward at all: that is ours.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING, Final, cast

import msgspec

from penstock.backends.rewards.boxes import boxed_answers
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.instruction_text import stream_safe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DAPO_TAIL_CHARACTERS: Final = 300
"""An answer that stands earlier is none: it is to be the end of the response."""
DAPO_RIGHT: Final = 1.0
DAPO_WRONG: Final = -1.0

_ARTICLES: Final = frozenset(("a", "an", "the"))
_VERDICTS: Final = frozenset(("yes", "no", "noanswer"))
_ANSWER_LINE: Final = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_LETTER_SAID: Final = re.compile(
    # Bounded, since neighbouring runs of any length would take the power of their number to refuse long blanks.
    r"\b(?i:answer)\s{0,4}(?i:is|:|=)?\s{0,4}:?\s{0,4}(?:\*\*|\$)?\s{0,4}(?i:option|choice)?\s{0,4}"
    r"(?:\(([A-Za-z])\)|\{?([A-Z])\}?(?![A-Za-z'\u2019])|([a-z])(?=\s{0,4}(?:[.)\n]|$)))"
)
_LETTER_ALONE: Final = re.compile(r"^[ \t]{0,8}[*($]{0,4}([A-Z])[*)$.:]{0,4}[ \t]{0,8}$", re.MULTILINE)
_BARE_LETTER: Final = re.compile(r"\(?\s*([A-Za-z])\s*\)?[.:]?")
_CHOICE: Final = re.compile(r"(?i:option|choice)?\s{0,4}[($]?\s{0,4}([A-Za-z])\s{0,4}(?:[).:$].*)?")
_WRAPPED: Final = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")
_FRACTION: Final = re.compile(r"(-?)\\[dt]?frac\s*(?:\{\s*(-?\d{1,60})\s*\}|(\d))\s*(?:\{\s*(\d{1,60})\s*\}|(\d))")
_RATIO: Final = re.compile(r"([+-]?\d{1,60})\s*/\s*(\d{1,60})", re.ASCII)
_DECIMAL: Final = re.compile(r"[+-]?(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})", re.ASCII)
_THOUSANDS: Final = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_UNIT: Final = re.compile(
    r"(?:(?i:square|sq\.?|cubic)?(?:[ckm]?m|k?g|gm|km/h|mph|(?i:units?|meters?|inch(?:es)?|feet|foot|miles?|grams?|pounds?|"
    r"hours?|minutes?|seconds?|days?|dollars?|cents?|degrees?|points?|ways?|integers?|digits?|edges?|meals?|students?|"
    r"multiples?))(?:\^\{?[23]\}?)?|\^\{?\\circ\}?|°|(?:st|[nr]d|\^?\{?th\}?))$"
)
"""Behind a number; other words may change it (``34 thousand``)."""
_ARTICLE: Final = re.compile(r"^an?\s+(?=\d)")
_FORMULA: Final = re.compile(r"([^$]*)\$([^$]+)\$([^$]*)")
_NOT_ONLY_THAT: Final = re.compile(
    r"\d|\b(?:not?|nor|n?either|never|or|than|least|most|between)\b|n['\u2019]t\b", re.IGNORECASE
)
"""Beside a formula: what says that it is not the answer, or not all of it."""


# --- f1 -------------------------------------------------------------------------------------------------------


def f1_reward(response: str, label: str) -> float:
    """Harmonic mean of precision and recall of the response's words among the label's, as SQuAD scores answers
    (Rajpurkar et al., arXiv 1606.05250): small letters, without punctuation and articles, each word as often as it
    stands there.

    A label that is a JSON list of texts has several right answers; the best counts. Where one side is ``yes``, ``no``
    or ``noanswer``, only the same word earns anything.
    """
    return max(_f1(_words(response), _words(answer)) for answer in _several(label, "f1"))


def _f1(given: list[str], wanted: list[str]) -> float:
    if given == wanted:
        return 1.0
    if any(len(words) == 1 and words[0] in _VERDICTS for words in (given, wanted)):
        return 0.0
    common = (Counter(given) & Counter(wanted)).total()
    return 2.0 * common / (len(given) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKC", stream_safe(text.lower()))
    kept = plain.translate({ord(character): None for character in set(plain) if _is_punctuation(character)})
    return [word for word in kept.split() if word not in _ARTICLES]


def _is_punctuation(character: str) -> bool:
    """As SQuAD has it for ASCII, where ``$`` and ``+`` are punctuation too; elsewhere what Unicode calls so."""
    return unicodedata.category(character)[0] == "P" or character in "$+<=>^`|~"


def _several(label: str, name: str) -> Sequence[str]:
    """The right answers."""
    if not label:
        raise NoRewardError(f"the row has no label, and the reward {name!r} compares with it (data.label_key)")
    if label.lstrip().startswith("["):
        try:
            found = msgspec.json.decode(label, type=list[str])
        except msgspec.MsgspecError:
            return [label]
        if not found:
            raise NoRewardError(f"the label is an empty list, and the reward {name!r} compares with what is in it")
        return found
    return [label]


def words_answer(response: str, truncated: bool) -> str:
    """The response as it is compared, for votes."""
    return " ".join(_words(response))


# --- gpqa -----------------------------------------------------------------------------------------------------


def gpqa_reward(response: str, label: str, metadata: Mapping[str, object]) -> float:
    r"""1 for the right letter of a multiple-choice question, else 0.

    The answer is the letter in the last ``\boxed{…}``, alone or before ``.``, ``:`` or ``)`` and its text; else behind
    the last ``answer is`` or ``Answer:``; else the last letter that has a line to itself. The label is the letter, or
    the text of one of the row's ``choices`` (a list under ``data.metadata_keys``), which are lettered in their order.
    """
    wanted = _label_letter(label, metadata)
    return float(_letter(response) == wanted)


def _letter(response: str) -> str | None:
    response = _WRAPPED.sub(r"\1", response)
    boxes = boxed_answers(response)
    if boxes:
        inside = _CHOICE.fullmatch(boxes[-1].strip())
        return inside[1].upper() if inside else None
    said = list(_LETTER_SAID.finditer(response))
    if said:
        return next(letter for letter in said[-1].groups() if letter).upper()
    alone: list[str] = _LETTER_ALONE.findall(response)
    if alone:
        return alone[-1]
    whole = _CHOICE.fullmatch(response.strip())  # as of boxed_gpqa
    return whole[1].upper() if whole else None


def letter_answer(response: str, truncated: bool) -> str | None:
    """The letter that was chosen, for votes."""
    return _letter(response)


def _label_letter(label: str, metadata: Mapping[str, object]) -> str:
    bare = _BARE_LETTER.fullmatch(label.strip())
    if bare:
        return bare[1].upper()
    choices = metadata.get("choices")
    if isinstance(choices, list) and label in choices:
        return chr(ord("A") + cast("list[object]", choices).index(label))
    raise NoRewardError(
        f"the label is {label[:80]!r}; the reward 'gpqa' expects a letter, or one of the row's choices (a list that "
        "data.metadata_keys names as 'choices')"
    )


# --- dapo -----------------------------------------------------------------------------------------------------


def dapo_reward(response: str, label: str) -> dict[str, float]:
    r"""1 where the last ``Answer: …`` at the response's end equals the label, else -1; ``acc`` is 1 or 0 beside it.

    Answers are equal as numbers (``0.5``, ``1/2``, ``\frac{1}{2}``; ``1,000`` and ``1000``; a unit behind one of the
    two says nothing) or, without spaces, dollar signs, ``\text`` and such, as texts. Of words around one ``$…$``
    that is the answer; of an equation the last side, where no other is another number. A label that is no integer is
    compared like any other.
    """
    if not label.strip():
        raise NoRewardError("the row has no label, and the reward 'dapo' compares with it (data.label_key)")
    found = _ANSWER_LINE.findall(response[-DAPO_TAIL_CHARACTERS:])
    right = bool(found) and same_answer(found[-1], label)
    return {"score": DAPO_RIGHT if right else DAPO_WRONG, "acc": float(right)}


def dapo_answer(response: str, truncated: bool) -> str | None:
    """What is behind the last ``Answer:`` at the end, for votes."""
    found = _ANSWER_LINE.findall(response[-DAPO_TAIL_CHARACTERS:])
    return vote_form(found[-1]) if found else None


def vote_form(answer: str) -> str:
    """A short answer in the form in which votes for it are counted: a number in lowest terms, other text plainly."""
    plain = _plain(answer)
    number = _number(plain)
    return plain if number is None else str(number)


def same_answer(one: str, other: str) -> bool:
    """Whether two short answers are the same number or, written plainly, the same text."""
    first, second = _plain(one), _plain(other)
    if first == second:
        return bool(first)
    left, right = _number(first), _number(second)
    if right is not None and left is None:
        left = _number(_UNIT.sub("", first))
    elif left is not None and right is None:
        right = _number(_UNIT.sub("", second))
    return left is not None and left == right


def _plain(answer: str) -> str:
    text = _ARTICLE.sub("", answer.strip()).replace("\\$", "").replace("{,}", ",")
    boxes = boxed_answers(text)
    if boxes:
        text = boxes[-1]
    text = _last_side(text)
    if (formula := _FORMULA.fullmatch(text)) and not _NOT_ONLY_THAT.search(f"{formula[1]} {formula[3]}"):
        text = _last_side(formula[2])
    return _without_marks(text)


def _without_marks(text: str) -> str:
    text = _WRAPPED.sub(r"\1", text)
    for mark in ("$", "\\!", "\\,", "\\;", "\\ ", "\\left", "\\right", "**", '"', " "):
        text = text.replace(mark, "")
    text = text.replace("\\%", "%").replace("−", "-").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _THOUSANDS.sub("", text).rstrip(".。,;")
    return text.removeprefix("\\(").removesuffix("\\)")


def _last_side(text: str) -> str:
    """Of an equation; the whole text where another side is another number, or where it is none."""
    *others, last = text.split("=")
    numbers = {_number(_without_marks(side)) for side in (*others, last)} - {None}
    return text if any(side[-1:] in ("<", ">", "!", ":") for side in others) or len(numbers) > 1 else last


def _number(text: str) -> Fraction | None:
    """Digits are bounded, so that nothing here becomes large."""
    if whole := _FRACTION.fullmatch(text):
        sign, top, top_digit, bottom, bottom_digit = whole.groups()
        return _ratio(f"{sign}{top or top_digit}".replace("--", ""), bottom or bottom_digit)
    if ratio := _RATIO.fullmatch(text):
        return _ratio(ratio[1], ratio[2])
    return Fraction(text) if _DECIMAL.fullmatch(text) else None


def _ratio(top: str, bottom: str) -> Fraction | None:
    return Fraction(int(top), int(bottom)) if int(bottom) else None
