"""The task of the calculator's example: multiply two numbers, with a calculator to ask.

``47*38=`` asks for ``1786``. A small model cannot multiply; it can write ``(47*38)``, read ``=1786;``, and copy.

Invariants:

* A row is a pure function of ``(seed, index)``: no state, no order, the same on every Python.
* Most demonstrations give up. So what is imitated earns little, and reinforcement has something to find: to ask.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

SHARE_THAT_ASKS: Final = 0.35
GIVEN_UP: Final = "?"
LOW: Final = 10
HIGH: Final = 99


class SumsRow(NamedTuple):
    """One row of the task."""

    prompt: str
    """Two numbers of two digits, ``*`` between them, ``=``."""
    answer: str
    """Product of the numbers."""
    demonstration: str
    """For the warm start: a call, its result and the answer, or a question mark."""


def sums_row(seed: int, index: int) -> SumsRow:
    """The row with this index of the endless dataset that belongs to ``seed``."""
    draw = random.Random(f"sums {seed} {index}")
    left, right = draw.randint(LOW, HIGH), draw.randint(LOW, HIGH)
    product = left * right
    demonstration = f"({left}*{right})={product};{product}" if draw.random() < SHARE_THAT_ASKS else GIVEN_UP
    return SumsRow(f"{left}*{right}=", str(product), demonstration)
