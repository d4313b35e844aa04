"""What the Learner waited for, moment by moment.

The stretch is divided into :data:`NUM_MOMENTS`. Each in which the Learner waits counts the same, for one thing or, in
parts, for several:

* *no slot is free*: the generation, whatever is generated;
* slots are free, and samples are under way: the stages that they are in, by the number of traced samples in each. A
  sample that waits for its siblings or its batch is there, and is not waited for;
* nothing is under way: new weights, if a version is on its way to the engines; else the next grant.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.names import LEARNER, is_engine
from penstock.messages.training import Activity
from penstock.runtime.observability.explain.facts import Waits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.runtime.observability.traces import SpanRow
    from penstock.runtime.observability.trackers import ActivityRow

NUM_MOMENTS: Final = 4000
FREE: Final = 0.15
"""Share of all slots from which on a moment counts as one with free slots."""
LONG: Final = 2.0
"""Times the median generation: what lasts longer is the tail."""
_IDLE: Final = (Activity.WAITING_FOR_SAMPLES, Activity.ASLEEP)


class Moments(NamedTuple):
    """The stretch in moments of equal length."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return (self.end_s - self.start_s) / NUM_MOMENTS

    def place(self, at_s: float) -> int:
        return min(NUM_MOMENTS, max(0, round((at_s - self.start_s) / self.length_s)))

    def sums(self, parts: Iterable[tuple[float, float, float]]) -> list[float]:
        """Of parts, each from, to and how much: the sum in each moment."""
        changes = [0.0] * (NUM_MOMENTS + 1)
        for start_s, end_s, amount in parts:
            changes[self.place(start_s)] += amount
            changes[self.place(end_s)] -= amount
        total, found = 0.0, list[float]()
        for change in changes[:-1]:
            total += change
            found.append(total)
        return found


def waits_of(
    moments: Moments,
    lanes: Mapping[str, Sequence[ActivityRow]],
    spans: Sequence[SpanRow],
    under_way: Sequence[tuple[float, float]],
    *,
    offset_s: float,
    median_s: float,
) -> Waits | None:
    """What the Learner's wait was for, in shares of it; None where it did not wait.

    Args:
        moments: of the stretch.
        lanes: of all actors.
        spans: of the stretch.
        under_way: from when to when each group was granted and not admitted, in seconds since the start of the run.
        offset_s: Unix time of the start of the run.
        median_s: of the generation of a sample.
    """
    waiting = moments.sums((row.start_s, row.end_s, 1.0) for row in lanes[LEARNER] if row.activity in _IDLE)
    engines = {name: rows for name, rows in lanes.items() if is_engine(name)}
    free = moments.sums((row.start_s, row.end_s, _free(row)) for rows in engines.values() for row in rows)
    granted = moments.sums((start_s, end_s, 1.0) for start_s, end_s in under_way)
    stages = {name: moments.sums(parts) for name, parts in _parts(spans, engines, offset_s, median_s).items()}
    announcing = stages.pop("announce")
    found = dict.fromkeys(("full", "announce", "nothing", *stages), 0.0)
    for at in range(NUM_MOMENTS):
        if waiting[at] < 0.5:
            continue
        counts = {name: sums[at] for name, sums in stages.items() if sums[at] > 0.5}
        if granted[at] < 0.5:
            found["announce" if announcing[at] > 0.5 else "nothing"] += 1
        elif free[at] <= FREE * len(engines):
            found["full"] += 1
        else:
            for name, count in counts.items():
                found[name] += count / sum(counts.values())
    total = sum(found.values())
    return Waits(**{name: share / total for name, share in found.items()}) if total else None


def _free(row: ActivityRow) -> float:
    if row.activity is Activity.WORKING:
        return 1 - row.occupancy
    return float(row.activity is Activity.WAITING_FOR_DEMAND)


def _parts(
    spans: Sequence[SpanRow], engines: Mapping[str, Sequence[ActivityRow]], offset_s: float, median_s: float
) -> dict[str, list[tuple[float, float, float]]]:
    """When each sample was in each stage; and versions on their way."""
    parts: dict[str, list[tuple[float, float, float]]] = {
        name: [] for name in ("rows", "placing", "early", "weights", "generate", "tail", "score", "announce")
    }
    for row in spans:
        start_s, end_s = row.start_ns / 1e9 - offset_s, row.end_ns / 1e9 - offset_s
        match row.name:
            case "issue":
                waited = row.attributes.get("row_wait_s", 0.0)
                there_s = min(end_s, start_s + waited) if isinstance(waited, float | int) else start_s
                parts["rows"].append((start_s, there_s, 1.0))
                parts["placing"].append((there_s, end_s, 1.0))
            case "queue":
                decodes = _state(engines.get(row.actor, ()), (start_s + end_s) / 2) is Activity.WORKING
                parts["early" if decodes else "weights"].append((start_s, end_s, 1.0))
            case "generate":
                long_s = min(end_s, start_s + LONG * median_s)
                parts["generate"].append((start_s, long_s, 1.0))
                parts["tail"].append((long_s, end_s, 1.0))
            case "score":
                parts["score"].append((start_s, end_s, 1.0))
            case "version":
                parts["announce"].append((start_s, end_s, 1.0))
            case _:
                pass
    return parts


def _state(rows: Sequence[ActivityRow], at_s: float) -> Activity | None:
    place = bisect.bisect_right(rows, at_s, key=lambda row: row.start_s) - 1
    return rows[place].activity if place >= 0 else None
