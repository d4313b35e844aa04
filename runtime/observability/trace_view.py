"""Traces and lanes as one JSON file of trace events, which Perfetto (ui.perfetto.dev) and Chrome's tracing page open.

Invariants:

* On one track events follow each other or lie within each other, which is what the format can say. What would overlap
  otherwise goes to a further track.
* The lanes of the devices are as in ``activity.jsonl``: their events tile the time.
* Times are microseconds since the run began, exact to the nanosecond.
* What models and functions wrote is only ever a JSON string in ASCII.
"""

from __future__ import annotations

import json
import os
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.messages.errors import UserFault
from penstock.messages.training import Activity
from penstock.runtime.observability.shares import LABELS
from penstock.runtime.observability.spans import is_episode_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.runtime.observability.lives import Life
    from penstock.runtime.observability.spans import AttributeValue
    from penstock.runtime.observability.traces import SpanRow
    from penstock.runtime.observability.trackers import ActivityRow, EventRow

DEVICES: Final = 1
SAMPLES: Final = 2
STEPS: Final = 3
ACTORS: Final = 4
_NAMES: Final = {DEVICES: "devices", SAMPLES: "samples", STEPS: "steps and versions", ACTORS: "handled events"}


class Slice(NamedTuple):
    """One event that lasts."""

    name: str
    kind: str
    start_ns: int
    end_ns: int
    facts: Mapping[str, AttributeValue | None]


def write_view(
    path: Path,
    *,
    began_ns: int,
    lanes: Mapping[str, Sequence[ActivityRow]],
    lives: Sequence[Life],
    steps: Sequence[SpanRow],
    handled: Sequence[EventRow] = (),
) -> int:
    """Write the file, whole or not at all; returns how many events are in it.

    Args:
        path: written anew.
        began_ns: Unix time at which the run began, from which the lanes count.
        lanes: of learner and engines.
        lives: of the samples to show.
        steps: spans of steps and versions.
        handled: events that the actors handled, shown as moments.

    Raises:
        UserFault: the file cannot be written.
    """
    events = _events(lanes, lives, steps, handled, began_ns)
    partial = path.with_name(f"{path.name}.partial")
    count = 0
    try:
        with partial.open("w", encoding="ascii") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            for count, event in enumerate(events, start=1):
                file.write(("\n" if count == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
        os.replace(partial, path)
    except OSError as error:
        raise UserFault(f"{path}: the trace cannot be written: {error.strerror}") from None
    return count


def _events(
    lanes: Mapping[str, Sequence[ActivityRow]],
    lives: Iterable[Life],
    steps: Iterable[SpanRow],
    handled: Iterable[EventRow],
    began_ns: int,
) -> Iterator[dict[str, Any]]:
    tracks: list[tuple[int, str, Sequence[Slice]]] = []
    tracks += [(DEVICES, name, [_lane_slice(row, began_ns) for row in rows]) for name, rows in sorted(lanes.items())]
    tracks += [(SAMPLES, "samples", row) for row in _swimlanes(lives)]
    tracks += [(STEPS, "steps", row) for row in _rows([_span_slice(row, "step") for row in steps])]
    by_actor: dict[str, list[Slice]] = {}
    for event in handled:
        at_ns = began_ns + round(1e9 * event.at_s)
        one = Slice(event.event, "handled", at_ns, at_ns, {"about": event.summary})
        by_actor.setdefault(f"{event.actor} #{event.epoch}", []).append(one)
    tracks += [(ACTORS, name, slices) for name, slices in sorted(by_actor.items())]
    for process in sorted({process for process, _, _ in tracks}):
        yield _named("process_name", process, 0, _NAMES[process])
    for number, (process, name, slices) in enumerate(tracks, start=1):
        yield _named("thread_name", process, number, name)
        for one in slices:
            yield _complete(one, process, number, began_ns)


def _named(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _complete(one: Slice, process: int, track: int, began_ns: int) -> dict[str, Any]:
    how = {"ph": "i", "s": "t"} if process == ACTORS else {"ph": "X", "dur": (one.end_ns - one.start_ns) / 1000}
    return {
        **how, "name": one.name, "cat": one.kind, "pid": process, "tid": track, "ts": (one.start_ns - began_ns) / 1000,
        "args": {name: value for name, value in one.facts.items() if value not in (None, "")},
    }  # fmt: skip


def _lane_slice(row: ActivityRow, began_ns: int) -> Slice:
    start_ns, end_ns = (began_ns + round(1e9 * at_s) for at_s in (row.start_s, row.end_s))
    occupancy = row.occupancy if row.activity is Activity.WORKING else None
    return Slice(LABELS[row.activity], "lane", start_ns, end_ns, {"occupancy": occupancy, "incarnation": row.epoch})


def _span_slice(row: SpanRow, kind: str) -> Slice:
    return Slice(row.name, kind, row.start_ns, row.end_ns, {"actor": row.actor, **row.attributes})


def _life_slices(life: Life) -> list[Slice]:
    fate = life.fate
    facts: dict[str, AttributeValue | None] = {"fate": fate.text, "reason": fate.reason, "num_tokens": fate.num_tokens}
    facts["is_traced"] = life.is_traced
    whole = Slice(f"sample {fate.name}", "sample", life.start_ns, life.end_ns, facts)
    return [whole] + [
        Slice(
            stage.name,
            ("episode" if is_episode_step(stage.name) else "stage") if stage.is_recorded else "not recorded",
            stage.start_ns,
            stage.end_ns,
            {"actor": stage.actor, "attempt": stage.attempt, **stage.attributes},
        )
        for stage in (*life.stages, *life.steps)
    ]


def _swimlanes(lives: Iterable[Life]) -> list[list[Slice]]:
    """As few tracks as there are lives at once: a track is used again when the life on it is over."""
    tracks: list[list[Slice]] = []
    in_use: list[tuple[int, int]] = []
    """The end of the newest life on each track, and its place: a heap."""
    for life in sorted((life for life in lives if life.stages), key=lambda life: life.start_ns):
        for row in _rows(_life_slices(life)):
            if in_use and in_use[0][0] <= life.start_ns:
                _, place = heappop(in_use)
            else:
                place = len(tracks)
                tracks.append([])
            tracks[place] += row
            heappush(in_use, (max(life.end_ns, life.start_ns + 1), place))
    return tracks


def _rows(slices: Sequence[Slice]) -> list[list[Slice]]:
    """The slices on as many tracks as it takes, so that on each of them they follow or contain one another."""
    rows: list[list[Slice]] = []
    open_ends: list[list[int]] = []
    """Of each track the ends of the slices that are open, the outermost first."""
    for one in sorted(slices, key=lambda one: (one.start_ns, -one.end_ns)):
        place = next((place for place, ends in enumerate(open_ends) if _fits(one, ends)), len(rows))
        if place == len(rows):
            rows.append([])
            open_ends.append([])
        rows[place].append(one)
        open_ends[place].append(one.end_ns)
    return rows


def _fits(one: Slice, open_ends: list[int]) -> bool:
    """Whether nothing on the track is cut by the slice; what has ended before it is closed."""
    while open_ends and open_ends[-1] <= one.start_ns:
        open_ends.pop()
    return not open_ends or one.end_ns <= open_ends[-1]
