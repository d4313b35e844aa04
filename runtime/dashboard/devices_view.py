"""*Devices*: a lane for each engine and the learner, in columns of equal time, each with the share of every state.

Invariants:

* Within a column the shares of a lane add up to the part of it that the lane covers, however short its spans are.
* At most :data:`MAX_LANES` lanes are sent, whatever the run has. Above that, all engines together are one lane, with
  the quantiles of how busy they were, and those that did least have lanes of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np

from penstock.backends.profiling import profile_files
from penstock.messages.errors import UserFault
from penstock.messages.names import is_engine
from penstock.messages.training import Activity
from penstock.runtime.dashboard.book import STATES, Lane, book_of
from penstock.runtime.dashboard.routes import Query, Route, View
from penstock.runtime.observability.actors_file import ACTORS_FILE, Loss, read_actors
from penstock.runtime.observability.charts import Chart
from penstock.runtime.observability.lanes import EMPTY_SLOTS, lane_order
from penstock.runtime.observability.nvml import GPU_FILE
from penstock.runtime.observability.plots import gpu_charts
from penstock.runtime.observability.shares import LABELS, rounded_shares
from penstock.runtime.observability.trackers import ACTIVITY_FILE, METRICS_FILE
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

MAX_LANES: Final = 64
NUM_WORST: Final = 16
MAX_MARKS: Final = 200
MAX_PROFILE_BYTES: Final = 20 * 2**20
"""Larger ones would not fit into an answer as text."""
FULL: Final = 255
"""A column's share of 1."""
_ROWS: Final = (Activity.WORKING.value, EMPTY_SLOTS, *(each.value for each in LABELS if each is not Activity.WORKING))
"""Of the table of a lane, from the bottom of its drawing up."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Window(Query, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of the time, and how fine."""

    start_s: Seconds = 0.0
    end_s: Seconds | None = None
    """None: up to now."""
    columns: Annotated[int, msgspec.Meta(ge=10, le=2000)] = 600


class LaneColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One lane within the window."""

    name: str
    shares: dict[str, bytes]
    """State → its share of each column, of :data:`FULL`; states that do not occur are left out."""
    percentages: dict[str, float]
    """Of the window; they add up to 100.0."""
    occupancy: float | None
    """Percent of the slots in use while it worked."""


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """How busy many engines were: of each column the share of slots in use, in percent."""

    num_engines: int
    p10: list[float]
    p50: list[float]
    p90: list[float]


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of the view."""

    start_s: float
    end_s: float
    total_s: float
    states: list[tuple[str, str]]
    """Name and label, from the bottom of a lane up."""
    lanes: list[LaneColumns]
    num_lanes: int
    band: Band | None
    losses: list[Loss]
    steps_s: list[float]
    """When steps ended within the window, where they are few enough to be seen."""
    gpus: list[Chart]
    profiles: list[str]
    """Files in the run's folder."""


def answer_devices(folder: Path, window: Window) -> Devices:
    """The lanes of a run, as far as it is."""
    book, now = book_of(folder), read_actors(folder)
    lanes = {name: lane for name, lane in book.lanes().items() if lane.ends_s}
    total_s = max((lane.ends_s[-1] for lane in lanes.values()), default=0.0)
    start_s, end_s = window.start_s, total_s if window.end_s is None else min(window.end_s, total_s)
    if end_s <= start_s:
        start_s, end_s = 0.0, total_s
    edges = np.linspace(start_s, max(end_s, start_s + 1e-6), window.columns + 1)
    tables = {name: _seconds(lane, edges) for name, lane in lanes.items()}
    names = sorted(tables, key=lane_order)
    shown, band = _chosen(names, tables, edges[1] - edges[0])
    marks = [row.at_s for row in book.steps() if start_s <= row.at_s <= end_s]
    return Devices(
        start_s=start_s,
        end_s=end_s,
        total_s=total_s,
        states=[(name, _label(name)) for name in _ROWS],
        lanes=[_columns(name, table, edges[1] - edges[0]) for name, table in shown.items()],
        num_lanes=len(names),
        band=band,
        losses=[Loss(each.at_s, each.name, terminal_lines(each.story)) for each in (now.losses if now else ())],
        steps_s=marks if len(marks) <= MAX_MARKS else [],
        gpus=gpu_charts(book.gpus()),
        profiles=[terminal_text(path.as_posix()) for path in profile_files(folder)],
    )


class ProfileQuery(Query, frozen=True, kw_only=True):
    """Which profile."""

    name: Annotated[str, msgspec.Meta(max_length=400)]


class ProfileBody(msgspec.Struct, frozen=True, kw_only=True):
    """A file as it is."""

    body: bytes


def answer_profile(folder: Path, query: ProfileQuery) -> ProfileBody:
    """One of the run's profiles, and no other file.

    Raises:
        UserFault: there is none of this name, or it is too large for the page.
    """
    path = next((path for path in profile_files(folder) if path.as_posix() == query.name), None)
    if path is None:
        raise UserFault(f"{query.name}: this run has no such profile")
    if (folder / path).stat().st_size > MAX_PROFILE_BYTES:
        raise UserFault(f"{path}: is too large to be sent; it lies in the run's folder")
    return ProfileBody(body=(folder / path).read_bytes())


def _label(state: str) -> str:
    return "slots empty" if state == EMPTY_SLOTS else LABELS[Activity(state)]


def _seconds(lane: Lane, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of each row of :data:`_ROWS` in each column: as the spans tile the lane, their running totals are lines
    between the ends of spans, and a column is what a total grows between its edges."""
    ends = np.frombuffer(lane.ends_s, dtype=np.float64)
    states = np.frombuffer(lane.states, dtype=np.uint8)
    occupancies = np.frombuffer(lane.occupancies, dtype=np.float64)
    lengths = np.diff(ends, prepend=0.0)
    corners = np.concatenate(([0.0], ends))
    table = np.zeros((len(_ROWS), len(edges) - 1))
    for place in np.unique(states):
        state = STATES[int(place)]
        here = np.where(states == place, lengths, 0.0)
        parts = {state.value: here}
        if state is Activity.WORKING:
            parts = {state.value: here * occupancies, EMPTY_SLOTS: here * (1 - occupancies)}
        for name, part in parts.items():
            totals = np.concatenate(([0.0], np.cumsum(part)))
            table[_ROWS.index(name)] = np.diff(np.interp(edges, corners, totals))
    return table


def _chosen(
    names: Sequence[str], tables: Mapping[str, NDArray[np.float64]], column_s: float
) -> tuple[dict[str, NDArray[np.float64]], Band | None]:
    """The lanes to show; of too many engines their mean, and those that did least."""
    if len(names) <= MAX_LANES:
        return {name: tables[name] for name in names}, None
    engines = [name for name in names if is_engine(name)]
    others = [name for name in names if not is_engine(name)][: MAX_LANES - NUM_WORST - 1]
    busy = np.array([tables[name][0] for name in engines])
    worst = [engines[int(place)] for place in np.argsort(busy.sum(axis=1), kind="stable")[:NUM_WORST]]
    shares: NDArray[np.float64] = np.quantile(100 * busy / column_s, (0.1, 0.5, 0.9), axis=0)
    p10, p50, p90 = ([round(float(share), 1) for share in row] for row in shares)
    mean = np.mean([tables[name] for name in engines], axis=0)
    shown = {name: tables[name] for name in others} | {f"all {len(engines)} engines": mean}
    return shown | {name: tables[name] for name in worst}, Band(num_engines=len(engines), p10=p10, p50=p50, p90=p90)


def _columns(name: str, table: NDArray[np.float64], column_s: float) -> LaneColumns:
    seconds = table.sum(axis=1)
    working_s = float(seconds[0] + seconds[1])
    shares = np.clip(np.round(FULL * table / column_s), 0, FULL).astype(np.uint8)
    return LaneColumns(
        name=terminal_text(name),
        shares={_ROWS[place]: shares[place].tobytes() for place in range(len(_ROWS)) if seconds[place] > 0},
        percentages=dict(zip(_ROWS, rounded_shares(seconds.tolist()), strict=True)),
        occupancy=100 * float(seconds[0]) / working_s if working_s > 0 and "engine" in name else None,
    )


DEVICES: Final = View(
    name="devices",
    title="Devices",
    files=(ACTIVITY_FILE, GPU_FILE, METRICS_FILE, ACTORS_FILE),
    routes=(
        Route(path="devices", query=Window, answer=answer_devices, is_shared=True),
        Route(path="devices/profile", query=ProfileQuery, answer=answer_profile),
    ),
)
