"""Charts of the report as data, which the page's own script draws (``report.js``)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from markupsafe import Markup

from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS: Final = "step"
"""What most charts go over."""
MAX_POINTS: Final = 3000
"""Of a line; of a longer one each point is the mean of some neighbours."""
_DIGITS: Final = 6
"""Significant ones, of every number in the page."""
_EXACT: Final = 10**_DIGITS
"""Whole numbers below it have no more."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a chart."""

    label: str
    x: list[float]
    y: list[float | None]
    """None where there is a gap."""
    spread: list[float | None] = []
    """A band is drawn this far above and below ``y``."""
    style: Literal["line", "steps", "dashed", "points"] = "line"
    is_smoothed: bool = True
    """Follows the page's smoothing."""
    colour: int | None = None
    """By number; that of its place in the chart unless given."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Where something was changed: an upright line with a few words."""

    x: float
    label: str


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One chart with its title and the sentence below it. Charts of one ``x_label`` share crosshair and zoom."""

    title: str
    note: str
    lines: list[Line]
    x_label: str = STEPS
    y_label: str = ""
    from_zero: bool = False
    """Begin the y axis at 0."""
    are_bars: bool = False
    marks: list[Mark] = []

    def data(self) -> Markup:
        """All of it as JSON for a ``script`` element: no text in it can end that element."""
        return Markup(msgspec.json.encode(self).decode().replace("<", "\\u003c"))


def line_of(
    label: str,
    x: Sequence[float],
    y: Sequence[float | None],
    *,
    spread: Sequence[float | None] = (),
    style: Literal["line", "steps", "dashed", "points"] = "line",
    is_smoothed: bool = True,
) -> Line:
    """A line with rounded numbers, no more than :data:`MAX_POINTS` of them, and gaps for what is not finite."""
    size = max(1, math.ceil(len(x) / MAX_POINTS))
    return Line(
        label=terminal_text(label),
        x=[value for value in _means(x, size) if value is not None],
        y=_means(y, size),
        spread=_means(spread, size),
        style=style,
        is_smoothed=is_smoothed,
    )


def _means(values: Sequence[float | None], size: int) -> list[float | None]:
    if size == 1:  # as below, in a fraction of the time: the dashboard draws all that a run has, again and again
        return [x if x is None else _rounded(x) for x in values]
    parts = (values[at : at + size] for at in range(0, len(values), size))
    finite = ([value for value in part if value is not None and math.isfinite(value)] for part in parts)
    return [float(f"{math.fsum(part) / len(part):.{_DIGITS}g}") if part else None for part in finite]


def _rounded(value: float) -> float | None:
    if value % 1 == 0 and -_EXACT < value < _EXACT:
        return float(value)
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
