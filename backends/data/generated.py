"""Rows that are made on the spot: the quickstart's task, the calculator's, and the tasks of reasoning-gym.

Invariants:

* A generated row is a function of the seed and its number.
* An entry of reasoning-gym keeps its exact form on its way to the reward function: tuples, sets and keys that are no
  texts are marked, because some tasks compare with them and JSON has none.
"""
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import difflib
import random
import re
from typing import TYPE_CHECKING, Final, cast

from penstock.backends.data.lines import lines_row, noisy_answer, worse_answer
from penstock.backends.data.problems import DataError
from penstock.backends.data.row import RawRow
from penstock.backends.extras import missing_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.backends.data.lines import LinesRow

TUPLE: Final = "__tuple__"
SET: Final = "__set__"
PAIRS: Final = "__pairs__"
SHARE_THAT_ASKS: Final = 0.35
"""Of the demonstrations of ``sums:N``."""

_COUNT: Final = re.compile(r"[1-9][0-9_]*")


_LINES_COLUMNS: Final[Mapping[str, Callable[[LinesRow, int, int], str]]] = {
    "prompt": lambda row, _seed, _index: row.prompt,
    "label": lambda row, _seed, _index: row.answer,
    "response": lambda row, seed, index: noisy_answer(row.answer, seed, index),
    "chosen": lambda row, _seed, _index: row.answer,
    "rejected": lambda row, seed, index: worse_answer(row.answer, seed, index),
}


def lines_rows(
    path: str, rest: str, seed: int, columns: Sequence[str] = (*_LINES_COLUMNS,), optional: Sequence[str] = ()
) -> Iterator[RawRow]:
    """``lines:N``: columns ``prompt``, ``label`` (the right answer), ``response`` (a noisy demonstration, for a warm
    start), and a pair, ``chosen`` (right) and ``rejected`` (wrong).

    Only the columns that are asked for are made: noise takes most of the time, and three processes of a run read the
    same rows. Where one is asked for that there is not, all are, so that the refusal of the row can name them.
    """
    asked = {*columns, *optional} if _LINES_COLUMNS.keys() >= set(columns) else _LINES_COLUMNS.keys()
    makers = [(name, make) for name, make in _LINES_COLUMNS.items() if name in asked]
    for index in range(_count(path, rest, "lines:256")):
        row = lines_row(seed, index)
        yield RawRow(f"{path} row {index}", {name: make(row, seed, index) for name, make in makers})


def sums_rows(path: str, rest: str, seed: int) -> Iterator[RawRow]:
    """``sums:N``: columns ``prompt`` (``47*38=``), ``label`` (the product), ``response`` (a demonstration, for a warm
    start: a call of the calculator, its result and the answer; or a question mark).

    A small model cannot multiply; it can write ``(47*38)``, read ``=1786;``, and copy. Most demonstrations give up, so
    what is imitated earns little, and reinforcement has something to find: to ask.
    """
    for index in range(_count(path, rest, "sums:256")):
        draw = random.Random(f"sums {seed} {index}")
        left, right = draw.randint(10, 99), draw.randint(10, 99)
        product = str(left * right)
        asks = draw.random() < SHARE_THAT_ASKS
        response = f"({left}*{right})={product};{product}" if asks else "?"
        columns = {"prompt": f"{left}*{right}=", "label": product, "response": response}
        yield RawRow(f"{path} row {index}", columns)


def shapes_rows(path: str, rest: str, seed: int) -> Iterator[RawRow]:
    """``shapes:N``: columns ``prompt``, ``images`` (the bytes of one) and ``label`` (the first letter of a colour).

    Raises:
        DataError: Pillow is not installed.
    """
    if missing := missing_extra("PIL"):
        raise DataError(f"{path}: {missing}")
    from penstock.backends.data.shapes import shapes_row

    for index in range(_count(path, rest, "shapes:256")):
        row = shapes_row(seed, index)
        yield RawRow(f"{path} row {index}", {"prompt": row.prompt, "images": row.image, "label": row.answer})


def reasoning_gym_rows(path: str, rest: str, seed: int) -> Iterator[RawRow]:
    """``reasoning_gym:NAME:N``: columns ``prompt`` (the question) and ``label`` (an answer; empty where the task only
    has a checker); the whole entry travels as metadata, for the reward ``reasoning_gym``.

    Raises:
        DataError: there is no such task, it cannot be made, or reasoning-gym is not installed.
    """
    name, _, number = rest.rpartition(":")
    count = _count(path, number, f"reasoning_gym:{name or 'chain_sum'}:1000")
    if missing := missing_extra("reasoning_gym"):
        raise DataError(f"{path}: {missing}")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    known = sorted(str(task) for task in DATASETS)
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=3)) or ", ".join(known[:5]) + ", …"
        raise DataError(f"{path}: reasoning-gym has no task {name!r}; near it: {near}")
    try:
        dataset = reasoning_gym.create_dataset(name, size=count, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{path}: reasoning-gym cannot make {name} without further options: {error}") from error
    for index, entry in enumerate(dataset):
        answer = entry["answer"]
        columns = {"prompt": entry["question"], "label": "" if answer is None else str(answer)}
        yield RawRow(f"{path} row {index}", columns, {"reasoning_gym": name, "entry": marked(entry)})


def marked(value: object) -> object:
    """``value`` in a form that JSON can carry and :func:`unmarked` undoes."""
    match value:
        case tuple():
            return {TUPLE: [marked(item) for item in cast("tuple[object, ...]", value)]}
        case set() | frozenset():
            return {SET: [marked(item) for item in cast("set[object]", value)]}
        case list():
            return [marked(item) for item in cast("list[object]", value)]
        case dict():
            items = cast("dict[object, object]", value).items()
            if all(isinstance(key, str) for key, _ in items):
                return {str(key): marked(item) for key, item in items}
            return {PAIRS: [[marked(key), marked(item)] for key, item in items]}
        case _:
            return value


def unmarked(value: object) -> object:
    """The opposite of :func:`marked`."""
    if isinstance(value, list):
        return [unmarked(item) for item in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    document = cast("dict[str, object]", value)
    match list(document.items()):
        case [(str(mark), list(listed))] if mark == TUPLE:
            return tuple(unmarked(item) for item in cast("list[object]", listed))
        case [(str(mark), list(listed))] if mark == SET:
            return {unmarked(item) for item in cast("list[object]", listed)}
        case [(str(mark), list(listed))] if mark == PAIRS:
            pairs = cast("list[list[object]]", listed)
            return {unmarked(key): unmarked(item) for key, item in pairs}
        case items:
            return {key: unmarked(item) for key, item in items}


def _count(path: str, number: str, example: str) -> int:
    if not _COUNT.fullmatch(number):
        raise DataError(f"{path}: expected a number of rows, as in {example}, got {number!r}")
    return int(number)
