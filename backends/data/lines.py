"""The quickstart's task: write the sorted letters of the prompt, once per line, each line led by its capital.

``dbacC=`` asks for three lines (``C`` is the third capital) of the letters ``abcd``: ``AabcdBabcdCabcd``.

Invariants:

* A row is a pure function of ``(seed, index)``: no state, no order, the same on every Python.
* The prompt fixes the length of the right answer, so training cannot shrink it; the lengths are long-tailed (mean
  19, median 14, one in a hundred above 90, at most 204 characters).
* The reward needs no parser: it is the share of lines that are right.
"""

from __future__ import annotations

import random
import re
import string
from typing import Final, NamedTuple

MAX_LETTERS: Final = 16
MAX_LINES: Final = 12

_LINE: Final = re.compile(r"[A-Z][^A-Z]*|^[^A-Z]+")
"""A capital and what follows up to the next; what stands before the first capital is a line too, a wrong one."""


class LinesRow(NamedTuple):
    """One row of the task."""

    prompt: str
    """Some distinct letters, a capital that says how many lines, ``=``."""
    answer: str
    """The right response."""


def lines_row(seed: int, index: int) -> LinesRow:
    """The row with this index of the endless dataset that belongs to ``seed``."""
    draw = random.Random(f"lines {seed} {index}")
    num_letters = min(MAX_LETTERS, 2 + int(draw.lognormvariate(0.0, 0.6) * 4))
    num_lines = min(MAX_LINES, 1 + int(draw.lognormvariate(0.0, 0.9) * 1.5))
    letters = draw.sample(string.ascii_lowercase, num_letters)
    line = "".join(sorted(letters))
    capitals = string.ascii_uppercase[:num_lines]
    return LinesRow(
        prompt=f"{''.join(letters)}{capitals[-1]}=",
        answer="".join(capital + line for capital in capitals),
    )


def noisy_answer(answer: str, seed: int, index: int, rate: float = 0.1) -> str:
    """``answer`` with each small letter replaced, with probability ``rate``, by one drawn from the whole alphabet.

    Imitation of such demonstrations alone stays bad, which leaves reinforcement something to repair.
    """
    draw = random.Random(f"noise {seed} {index}")
    return "".join(draw.choice(string.ascii_lowercase) if c.islower() and draw.random() < rate else c for c in answer)


def worse_answer(answer: str, seed: int, index: int) -> str:
    """``answer`` with at least one wrong letter, for the rejected half of a pair."""
    noisy = noisy_answer(answer, seed, index, rate=0.3)
    if noisy != answer:
        return noisy
    place = next(place for place, character in enumerate(answer) if character.islower())
    letters = string.ascii_lowercase
    other = letters[(letters.index(answer[place]) + 1) % len(letters)]
    return f"{answer[:place]}{other}{answer[place + 1 :]}"


def lines_reward(response: str, answer: str, *, truncated: bool) -> float:
    """The share of lines that are right, in ``[0, 1]``.

    A line begins at each capital. Lines are compared in order, and the larger number of lines is the denominator, so
    neither missing nor extra lines pay. A response that the length limit cut off gets 0.
    """
    if truncated:
        return 0.0
    given: list[str] = _LINE.findall(response)
    wanted: list[str] = _LINE.findall(answer)
    num_right = sum(a == b for a, b in zip(given, wanted, strict=False))
    return num_right / max(len(given), len(wanted), 1)
