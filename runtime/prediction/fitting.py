"""Least squares in which every coefficient is at least 0, is told apart from the others, and is tried on unseen data.

A coefficient that the data cannot tell is dropped, with the reason; nothing is put in its place. Its share of the time
then lies in the coefficients that stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Marks = NDArray[np.bool_]

APART: Final = 0.05
"""A column of which less than this is left, once the others have explained what they can, did not vary by itself."""
CERTAIN: Final = 2.0
"""Standard errors that a coefficient has to be above 0."""
MIN_COUNT: Final = 8
"""Fewer measurements fit a mean and no more."""


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """How far a fit is off, on measurements that it has not seen: those of steps with an even number."""

    typical: float | None
    """Mean |measured − fitted| ÷ mean measured. None: there were none."""
    bias: float | None
    """(Sum of fitted − sum of measured) ÷ sum of measured: what does not average out."""
    count: int


class Line(NamedTuple):
    """``y ≈ Σ values[name] · columns[name]``."""

    values: dict[str, float]
    dropped: dict[str, str]
    """Why each of the other columns is not among them."""
    fitted: Floats
    error: Error


def fit_line(y: Floats, columns: Mapping[str, Floats], unseen: Marks) -> Line:
    """Fit on everything; the error is that of the same fit on what is not ``unseen``.

    Args:
        y: float64 ``[N]``, what was measured.
        columns: float64 ``[N]`` each, the dearest to keep first; the first always stays.
        unseen: bool ``[N]``.
    """
    values, dropped = _fitted(y, columns, np.ones_like(unseen))
    by_seen = _fitted(y, columns, ~unseen)[0] if not unseen.all() else values
    error = error_of(y, _sum_of(columns, by_seen), unseen)
    return Line(values, dropped, _sum_of(columns, values), error)


def _fitted(y: Floats, columns: Mapping[str, Floats], seen: Marks) -> tuple[dict[str, float], dict[str, str]]:
    kept, dropped = _apart({name: column[seen] for name, column in columns.items()}, int(seen.sum()))
    return _solved(y[seen], {name: columns[name][seen] for name in kept}, dropped), dropped


def _sum_of(columns: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    total = np.zeros_like(next(iter(columns.values())))
    for name, value in values.items():
        total += value * columns[name]
    return total


def error_of(measured: Floats, fitted: Floats, unseen: Marks) -> Error:
    """Of what was not seen."""
    total = float(measured[unseen].sum())
    if total <= 0:
        return Error(typical=None, bias=None, count=int(unseen.sum()))
    difference = fitted[unseen] - measured[unseen]
    return Error(
        typical=float(np.abs(difference).sum()) / total, bias=float(difference.sum()) / total, count=int(unseen.sum())
    )


def _apart(columns: Mapping[str, Floats], count: int) -> tuple[list[str], dict[str, str]]:
    """Columns that vary by themselves."""
    kept: list[str] = []
    dropped: dict[str, str] = {}
    for name, column in columns.items():
        norm = float(np.linalg.norm(column))
        if norm == 0:
            dropped[name] = "nothing of it was recorded"
        elif kept and count < MIN_COUNT:
            dropped[name] = f"{count} measurements are too few"
        elif kept and _left(column, [columns[other] for other in kept]) < APART * norm:
            dropped[name] = "it did not vary by itself"
        else:
            kept.append(name)
    return kept, dropped


def _left(column: Floats, others: Sequence[Floats]) -> float:
    matrix = np.stack(others, axis=1)
    solution = np.linalg.lstsq(matrix, column, rcond=None)[0]
    return float(np.linalg.norm(column - matrix @ solution))


def _solved(y: Floats, columns: dict[str, Floats], dropped: dict[str, str]) -> dict[str, float]:
    """Drop, the least certain first, what is not above 0 by :data:`CERTAIN` standard errors, then what leaves nothing
    for the first column, which is all there is at last."""
    while True:
        names = list(columns)
        matrix = np.stack([columns[name] for name in names], axis=1)
        solution = np.linalg.lstsq(matrix, y, rcond=None)[0]
        residual = y - matrix @ solution
        freedom = max(1, len(y) - len(names))
        spread = np.linalg.pinv(matrix.T @ matrix).diagonal() * float(residual @ residual) / freedom
        certainty = solution / np.sqrt(np.maximum(spread, 1e-300))
        doubtful = [i for i in range(1, len(names)) if certainty[i] < CERTAIN]
        why = "its effect is not told apart from chance"
        if not doubtful and solution[0] <= 0 and len(names) > 1:
            doubtful, why = list(range(1, len(names))), f"with it {names[0]} would not be above 0"
        if not doubtful:
            return {name: float(value) for name, value in zip(names, solution, strict=True)}
        worst = names[min(doubtful, key=lambda i: float(certainty[i]))]
        dropped[worst] = why
        del columns[worst]


class Course:
    """A piecewise linear function of time, given by its jumps; asked for means."""

    def __init__(self, times: Floats, jumps: Floats, slopes: Floats | None = None) -> None:
        """
        Args:
            times: float64 ``[N]`` in seconds, in any order.
            jumps: float64 ``[N]``, by how much the value changes there.
            slopes: float64 ``[N]``, by how much its rate changes there, per second.
        """
        order = np.argsort(times, kind="stable")
        self._times: Floats = times[order]
        gaps = np.diff(self._times)
        self._slopes: Floats = np.zeros_like(times) if slopes is None else np.cumsum(slopes[order])
        grown = np.concatenate(([0.0], np.cumsum(self._slopes[:-1] * gaps)))
        self._values: Floats = np.cumsum(jumps[order]) + grown
        areas = self._values[:-1] * gaps + self._slopes[:-1] * gaps**2 / 2
        self._areas: Floats = np.concatenate(([0.0], np.cumsum(areas)))

    def means(self, starts: Floats, ends: Floats) -> Floats:
        """Mean of the function from each start to its end."""
        lengths = np.maximum(ends - starts, 1e-9)
        return (self._area(ends) - self._area(starts)) / lengths

    @property
    def highest(self) -> float:
        """The largest value after a jump."""
        return float(self._values.max(initial=0.0))

    def _area(self, at: Floats) -> Floats:
        place = np.maximum(np.searchsorted(self._times, at, side="right") - 1, 0)
        past = np.maximum(at - self._times[place], 0.0)
        area: Floats = self._areas[place] + self._values[place] * past + self._slopes[place] * past**2 / 2
        return area
