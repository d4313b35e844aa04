"""How the time of a lane divides among its states, for the report and the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from penstock.messages.training import Activity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LABELS: Final[dict[Activity, str]] = {
    Activity.WORKING: "working",
    Activity.WAITING_FOR_SAMPLES: "waiting for samples",
    Activity.WAITING_FOR_DEMAND: "waiting for demand",
    Activity.WAITING_FOR_WEIGHTS: "waiting for weights",
    Activity.WAITING_FOR_TOOLS: "waiting for tools",
    Activity.APPLYING_WEIGHTS: "applying weights",
    Activity.PUBLISHING: "publishing",
    Activity.CHECKPOINTING: "checkpointing",
    Activity.ASLEEP: "asleep",
    Activity.STARTING: "starting",
    Activity.DOWN: "down",
    Activity.ABSENT: "not in the run",
}
"""In the order in which they are shown everywhere."""


class TimedActivity(Protocol):
    """A span of a lane, as reported or as read back."""

    @property
    def activity(self) -> Activity: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...
    @property
    def occupancy(self) -> float: ...
    @property
    def outside(self) -> float: ...


class Shares:
    """Seconds by state, and how full the working time was."""

    def __init__(self, spans: Iterable[TimedActivity] = ()) -> None:
        self.seconds: dict[Activity, float] = dict.fromkeys(Activity, 0.0)
        self.occupied_s = 0.0
        """Working time, weighted by occupancy."""
        self.outside_s = 0.0
        """All time, weighted by the share of slots whose episodes wait for tools, environments and agents."""
        self.last: Activity | None = None
        self.add(spans)

    def add(self, spans: Iterable[TimedActivity]) -> None:
        """Count these too."""
        for span in spans:
            length_s = span.end_s - span.start_s
            self.seconds[span.activity] += length_s
            self.last = span.activity
            self.outside_s += length_s * span.outside
            if span.activity is Activity.WORKING:
                self.occupied_s += length_s * span.occupancy

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def present_s(self) -> float:
        """Of it, while the actor was in the run."""
        return self.total_s - self.seconds[Activity.ABSENT]

    @property
    def busy(self) -> float:
        """Share of the time since the start that was work, in [0, 1]; 0 of no time."""
        ready_s = self.present_s - self.seconds[Activity.STARTING]
        return self.seconds[Activity.WORKING] / ready_s if ready_s > 0 else 0.0

    @property
    def occupancy(self) -> float | None:
        """Mean occupancy while working; None when there was no work."""
        working_s = self.seconds[Activity.WORKING]
        return self.occupied_s / working_s if working_s else None

    def percentages(self) -> dict[Activity, float]:
        """Percent by state, rounded to tenths so that they add up to exactly 100.0; all 0 of no time."""
        values = [self.seconds[activity] for activity in LABELS]
        return dict(zip(LABELS, rounded_shares(values), strict=True))


def shares_text(shares: Shares, places: str = "slots") -> str:
    """Percent of the time by state, which add up to 100, and of the working time what was used of its places."""
    parts = [f"{percent:.1f} % {LABELS[activity]}" for activity, percent in shares.percentages().items() if percent]
    if shares.occupancy is not None and shares.percentages()[Activity.WORKING] and shares.occupancy < 1:
        parts[0] += f" ({100 * shares.occupancy:.0f} % of the {places})"
    return ", ".join(parts) or "–"


def rounded_shares(values: Sequence[float]) -> list[float]:
    """Percentages of non-negative values in tenths that add up to 100.0: what rounding down leaves over goes to those
    with the largest remainders. All 0 when the values are."""
    total = sum(values)
    if total <= 0:
        return [0.0] * len(values)
    exact = [1000 * value / total for value in values]
    tenths = [int(share) for share in exact]
    by_remainder = sorted(range(len(values)), key=lambda i: (tenths[i] - exact[i], i))
    for i in by_remainder[: 1000 - sum(tenths)]:
        tenths[i] += 1
    return [tenth / 10 for tenth in tenths]
