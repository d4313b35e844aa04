"""Words, sentences and paragraphs, as the checkers of instructions count them; and what a row says of an instruction.

Invariants:

* Work is linear in the length of the response: a quantifier gives back nothing that the next one could take as well,
  and begins only where its run begins.
* A row that does not say what its instruction needs gives no reward: that is not the model's doing.
"""

# ruff: noqa: RUF001 - marks of texts in other alphabets

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Final, cast

from penstock.backends.rewards.functions import NoRewardError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WORD: Final = re.compile(r"\w+")
_SPOKEN_WORD: Final = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SENTENCE_END: Final = re.compile(r"(?<![.!?…。！？])[.!?…。！？]++[\"'”’)\]*_]{0,4}(?=\s|$)|\n\s*\n")
_ABBREVIATION: Final = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|e\.g|i\.e|cf|no|vol|fig|inc|ltd|co|approx)|\b[a-z]|\bu\.s|\bu\.k)\.$",
    re.IGNORECASE,
)
MAX_MARKS: Final = 30
_HIDDEN_MARKS: Final = frozenset("\u0f73\u0f75\u0f81\uff9e\uff9f")
"""No marks by their class, but made of marks alone when they are taken apart."""
_LIST_NUMBER: Final = re.compile(r"(?:^|\n)\s*\d{1,3}\.$")


class Given:
    """The arguments of one instruction, as the row has them."""

    def __init__(self, instruction: str, arguments: Mapping[str, object]) -> None:
        self._instruction = instruction
        self._arguments = {name: value for name, value in arguments.items() if value is not None}

    def number(self, name: str) -> int:
        """A whole number. (Columns of tables that have empty places hold them as floats.)"""
        value = self._arguments.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._lacks(name, "a whole number", value)
        return value

    def text(self, name: str) -> str:
        """A text that is not empty."""
        value = self._arguments.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self._lacks(name, "a text", value)
        return value

    def texts(self, name: str) -> Sequence[str]:
        """A list of texts, at least one."""
        value = self._arguments.get(name)
        items = as_list(value)
        found = [item for item in items if isinstance(item, str) and item]
        if not found or len(found) != len(items):
            raise self._lacks(name, "a list of texts", value)
        return found

    def compared(self, count: int, name: str, relation: str) -> bool:
        """Whether a count stands in the relation to the number: ``at least`` or ``less than``."""
        limit, how = self.number(name), self.text(relation)
        if how == "at least":
            return count >= limit
        if how == "less than":
            return count < limit
        raise self._lacks(relation, "'at least' or 'less than'", how)

    def _lacks(self, name: str, expected: str, found: object) -> NoRewardError:
        what = "nothing" if found is None else repr(found)[:60]
        return NoRewardError(f"the row's kwargs of {self._instruction} have {what} as {name!r}; expected {expected}")


def as_list(value: object) -> list[object]:
    """What is no list has nothing in it."""
    return cast("list[object]", value) if isinstance(value, list) else []


def stream_safe(text: str) -> str:
    """Without marks beyond the thirtieth on one letter, as Unicode's stream-safe format has it: to sort them takes the
    square of their number."""
    if text.isascii():
        return text
    kept: list[str] = []
    num_marks = 0
    for character in text:
        is_mark = unicodedata.combining(character) or character in _HIDDEN_MARKS
        num_marks = num_marks + 1 if is_mark else 0
        if num_marks <= MAX_MARKS:
            kept.append(character)
    return "".join(kept)


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, as IFEval counts words: ``don't`` is two."""
    return _WORD.findall(text)


def spoken_words(text: str) -> list[str]:
    """Words as people count them: ``don't`` and ``well-known`` are one each."""
    return _SPOKEN_WORD.findall(text)


def sentences(text: str) -> list[str]:
    """Parts that end with ``.``, ``!`` or ``?`` before a blank, or with an empty line. Abbreviations and numbers of
    lists end none."""
    found: list[str] = []
    start = 0
    for match in _SENTENCE_END.finditer(text):
        tail = text[max(start, match.end() - 12) : match.end()]
        if match[0] == "." and (_ABBREVIATION.search(tail) or _LIST_NUMBER.search(tail)):
            continue
        so_far = text[start : match.end()].strip()
        start = match.end()
        if so_far:
            found.append(so_far)
    if rest := text[start:].strip():
        found.append(rest)
    return found


def paragraphs(text: str) -> list[str]:
    """Parts between empty lines."""
    return [part.strip() for part in re.split(r"\n[ \t]*\n", text) if part.strip()]


def lines(text: str) -> list[str]:
    """Lines with something in them, blanks at their starts kept."""
    return [line for line in text.splitlines() if line.strip()]
