"""What there is of all samples: of each fate, without spread, and reward against length.

Each question reads one covering index of the samples once (:mod:`penstock.runtime.dashboard.sample_rows`).
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.dashboard.sample_index import open_index
from penstock.runtime.dashboard.sample_rows import CountQuery, conditions, index_of
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.dashboard.routes import Query

MAX_POINTS: Final = 1500
BINNED: Final = 100_000
"""Samples that are counted for a chart, at most about so many: of more, one in so many."""
WIDTH: Final = 60
HEIGHT: Final = 24


class FateCount(msgspec.Struct, frozen=True):
    """Samples of one fate."""

    state: str
    cause: str
    num_samples: int


class FlatCount(msgspec.Struct, frozen=True):
    """Groups whose samples all have this reward."""

    reward: float
    num_groups: int


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What can be chosen, and what there is of it."""

    fates: list[FateCount]
    engines: list[str]
    num_flat_groups: int
    flat: list[FlatCount]
    """The most frequent ones."""


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """Samples of about this length and reward."""

    num_tokens: float
    reward: float
    num_samples: int


class Bins(msgspec.Struct, frozen=True, kw_only=True):
    """Reward against length."""

    num_samples: int
    """That pass and have a reward."""
    every: int
    """One in so many is counted in the cells."""
    lowest: float
    highest: float
    most_tokens: int
    cell_tokens: float
    """Width of a cell; 0: each cell is one sample."""
    cell_reward: float
    cells: list[Cell]


def choices(run_folder: Path, _query: Query) -> Choices:
    """Fates and engines, and the groups without spread; the index has to be complete."""
    with closing(open_index(run_folder)) as index:
        fates = index.execute(
            "SELECT state, cause, num FROM (SELECT fate, count(*) AS num FROM samples INDEXED BY by_fate GROUP BY fate)"
            " JOIN fates USING (fate) ORDER BY num DESC"
        ).fetchall()
        flat = index.execute(
            "SELECT reward, count(*), sum(count(*)) OVER () FROM (SELECT max(reward) AS reward FROM samples "
            "INDEXED BY flat WHERE is_flat GROUP BY group_id) GROUP BY reward ORDER BY count(*) DESC LIMIT 12"
        ).fetchall()
        engines = [terminal_text(name) for (name,) in index.execute("SELECT name FROM engines ORDER BY name")]
    return Choices(
        fates=[FateCount(*row) for row in fates],
        engines=engines,
        num_flat_groups=flat[0][2] if flat else 0,
        flat=[FlatCount(*row[:2]) for row in flat],
    )


def bins(run_folder: Path, query: CountQuery) -> Bins:
    """Reward against length of the samples that pass: each of them where they are few, otherwise counted in cells."""
    with closing(open_index(run_folder)) as index:
        terms, values = conditions(run_folder, index, query)
        where = f"FROM samples {index_of(query, terms)} WHERE {' AND '.join(terms)} AND reward IS NOT NULL"
        number, low, high, most = index.execute(
            f"SELECT count(*), coalesce(min(reward), 0.0), coalesce(max(reward), 0.0), "
            f"coalesce(max(num_tokens), 0) {where}",
            values,
        ).fetchone()
        every = max(1, number // BINNED)
        wide, high_cell = ((most + 1) / WIDTH, (high - low or 1.0) / HEIGHT) if number > MAX_POINTS else (0.0, 0.0)
        if number <= MAX_POINTS:
            cells = [
                Cell(tokens, reward, 1)
                for tokens, reward in index.execute(f"SELECT num_tokens, reward {where}", values)
            ]
        else:
            found = index.execute(
                f"SELECT CAST(num_tokens / ? AS INTEGER) AS x, min(CAST((reward - ?) / ? AS INTEGER), ?) AS y, count(*)"
                f" {where} AND (group_id * 31 + sample_index) % ? = 0 GROUP BY x, y",
                [wide, low, high_cell, HEIGHT - 1, *values, every],
            )
            cells = [Cell(wide * x, low + high_cell * y, num) for x, y, num in found]
    return Bins(
        num_samples=number, every=every, lowest=low, highest=high, most_tokens=most, cell_tokens=wide,
        cell_reward=high_cell, cells=cells,
    )  # fmt: skip
