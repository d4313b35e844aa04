"""The lanes of a run: one for each engine and the learner, coloured by what they spent their time on.

A lane is drawn in columns of equal time. Within a column each state has the height of its share, so nothing is lost
however short the spans are; the part of the working time that the occupancy leaves empty is drawn lighter.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.names import LEARNER, SCORER, is_engine, is_reward_model, is_teacher
from penstock.messages.training import Activity
from penstock.runtime.observability.shares import LABELS, Shares

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.runtime.observability.trackers import ActivityRow

MAX_LANES: Final = 16
NUM_COLUMNS: Final = 600
LANE_HEIGHT: Final = 22
LANE_GAP: Final = 8
LABEL_WIDTH: Final = 96
AXIS_HEIGHT: Final = 22
_COLUMN_WIDTH: Final = 1.5
_MIN_SHARE: Final = 1e-3
_NUM_STATES: Final = len(LABELS) + 1

EMPTY_SLOTS: Final = "empty"
"""The CSS class of working time in which no request ran in a slot."""


class LaneRow(msgspec.Struct, frozen=True, kw_only=True):
    """One lane in the table of shares."""

    name: str
    percentages: dict[str, float]
    """Share of the time in each state, in percent; they add up to 100.0."""
    total: float
    occupancy: float | None
    """Mean share of its slots, or workers, in use while it worked, in percent; None for what has none."""
    time_s: float


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the report says about time."""

    svg: str
    """Of this size, in its own units; the style sheet of the page colours it."""
    width: float
    height: float
    rows: tuple[LaneRow, ...]
    states: tuple[tuple[str, str], ...]
    """CSS class and label of the states that occur."""
    num_hidden: int
    """Engines that are in the mean but have no lane of their own."""

    @property
    def legend(self) -> list[tuple[str, str]]:
        """CSS class and label of every colour."""
        empty = [(EMPTY_SLOTS, "working, slots empty")]
        return [each for key in self.states for each in (key, *(empty if key[0] == Activity.WORKING.value else ()))]


def lanes_of(activity: Mapping[str, Sequence[ActivityRow]]) -> Lanes | None:
    """Draw the lanes and add them up; None when nothing was reported."""
    activity = {name: rows for name, rows in activity.items() if rows}
    if not activity:
        return None
    names = sorted(activity, key=lane_order)
    shown = names[:MAX_LANES]
    engines = [name for name in names if is_engine(name)]
    rows = [_lane_row(name, Shares(activity[name]), has_slots=name != LEARNER) for name in shown]
    if len(engines) > 1:
        spans = [span for name in engines for span in activity[name]]
        rows.append(_lane_row(f"all {len(engines)} engines", Shares(spans), has_slots=True))
    present = {state for name in names for state, seconds in Shares(activity[name]).seconds.items() if seconds}
    end_s = max(rows[-1].end_s for rows in activity.values())
    width, height = LABEL_WIDTH + NUM_COLUMNS * _COLUMN_WIDTH, len(shown) * (LANE_HEIGHT + LANE_GAP) + AXIS_HEIGHT
    return Lanes(
        svg=_svg([(name, activity[name]) for name in shown], end_s, width, height),
        width=width,
        height=height,
        rows=tuple(rows),
        states=tuple((state.value, label) for state, label in LABELS.items() if state in present),
        num_hidden=len(names) - len(shown),
    )


def lane_order(name: str) -> tuple[int, str, int]:
    """The learner first, then engines by number, then teachers and reward models, then the Scorer's workers."""
    head, _, tail = name.rpartition("/")
    kind = is_engine(name) + 2 * (is_teacher(name) or is_reward_model(name)) + 3 * (name == SCORER)
    return kind, head or name, int(tail) if tail.isdecimal() else 0


def _lane_row(name: str, shares: Shares, *, has_slots: bool) -> LaneRow:
    percentages = shares.percentages()
    return LaneRow(
        name=name,
        percentages={state.value: share for state, share in percentages.items()},
        total=round(sum(percentages.values()), 1),
        occupancy=100 * shares.occupancy if has_slots and shares.occupancy is not None else None,
        time_s=shares.total_s,
    )


# --- drawing --------------------------------------------------------------------------------------------------------


def _svg(lanes: Sequence[tuple[str, Sequence[ActivityRow]]], end_s: float, width: float, height: float) -> str:
    parts = [f'<svg class="lanes" role="img" aria-label="lanes" width="100%" viewBox="0 0 {width:g} {height:g}">']
    parts += _ticks(end_s, height - AXIS_HEIGHT)
    for place, (name, spans) in enumerate(lanes):
        top = place * (LANE_HEIGHT + LANE_GAP)
        middle = top + LANE_HEIGHT / 2
        parts.append(f'<text class="name" x="{LABEL_WIDTH - 10}" y="{middle:g}">{escape(name)}</text>')
        parts.append(f'<g transform="translate({LABEL_WIDTH} {top})">')
        parts += _rectangles(_columns(spans, end_s))
        parts.append("</g>")
    parts.append("</svg>")
    return "".join(parts)


def _ticks(end_s: float, bottom: float) -> list[str]:
    parts: list[str] = []
    step_s = _tick_step_s(end_s)
    for number in range(int(end_s / step_s) + 1):
        x = LABEL_WIDTH + number * step_s / end_s * NUM_COLUMNS * _COLUMN_WIDTH
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom:g}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 14:g}">{_duration(number * step_s, step_s)}</text>')
    return parts


def _tick_step_s(end_s: float) -> float:
    """A round distance that gives at most eight ticks."""
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
    return next((float(step) for step in steps if end_s / step <= 8), 86400.0 * max(1, round(end_s / 86400 / 8)))


def _duration(seconds: float, step_s: float) -> str:
    if step_s < 60:
        return f"{seconds:g} s"
    if step_s < 3600:
        return f"{seconds / 60:g} min"
    return f"{seconds / 3600:g} h"


def _columns(spans: Sequence[ActivityRow], end_s: float) -> list[list[float]]:
    """Seconds by state in each column: working and occupied, working and empty, then the other states."""
    order = {state: place + 1 for place, state in enumerate(LABELS)}
    columns = [[0.0] * _NUM_STATES for _ in range(NUM_COLUMNS)]
    column_s = end_s / NUM_COLUMNS
    for span in spans:
        first = min(NUM_COLUMNS - 1, int(span.start_s / column_s))
        last = min(NUM_COLUMNS - 1, int(span.end_s / column_s))
        for number in range(first, last + 1):
            begin_s, stop_s = number * column_s, (number + 1) * column_s
            overlap_s = min(span.end_s, stop_s) - max(span.start_s, begin_s)
            if overlap_s <= 0:
                continue
            if span.activity is Activity.WORKING:
                columns[number][0] += overlap_s * span.occupancy
                columns[number][1] += overlap_s * (1 - span.occupancy)
            else:
                columns[number][order[span.activity]] += overlap_s
    return columns


def _rectangles(columns: Sequence[Sequence[float]]) -> list[str]:
    """Successive columns that look alike become one rectangle for each state."""
    classes = (Activity.WORKING.value, EMPTY_SLOTS, *(state.value for state in LABELS if state is not Activity.WORKING))
    parts: list[str] = []
    begin = 0
    levels = [_levels(column) for column in columns]
    for number in range(1, len(levels) + 1):
        if number < len(levels) and levels[number] == levels[begin]:
            continue
        x, width = begin * _COLUMN_WIDTH, (number - begin) * _COLUMN_WIDTH
        top = float(LANE_HEIGHT)
        for css_class, height in zip(classes, levels[begin], strict=True):
            if height:
                top -= height
                parts.append(
                    f'<rect class="{css_class}" x="{x:g}" y="{top:.4g}" width="{width:g}" height="{height:.4g}"/>'
                )
        begin = number
    return parts


def _levels(column: Sequence[float]) -> tuple[float, ...]:
    """Heights of one column, from the bottom up; half a unit is as fine as anybody sees."""
    total = sum(column)
    if not total:
        return (0.0,) * len(column)
    halves = [round(2 * LANE_HEIGHT * seconds / total) if seconds / total > _MIN_SHARE else 0 for seconds in column]
    largest = max(range(len(halves)), key=lambda place: halves[place])
    halves[largest] += 2 * LANE_HEIGHT - sum(halves)
    return tuple(half / 2 for half in halves)
