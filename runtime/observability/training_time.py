"""For how long a run has trained: since every actor is up and the learner is through with its start and warm start.

Invariants:

* The time begins once. A step that is recorded before anybody has said so begins it, as something was trained then: an
  actor reports once in a heartbeat, and many a step is quicker. It then begins where the learner was last heard to
  start, so at most a heartbeat too early.
* What earlier drives of the run have trained is added.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from penstock.messages.names import LEARNER
from penstock.messages.training import Activity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.training import ActorReported
    from penstock.runtime.observability.trackers import StepRow

STOPPED_S: Final = 0.05
"""Of the clock, beyond what it trained meanwhile: then a run was stopped and resumed between two steps."""


def newest_drive(steps: Sequence[StepRow], fewest: int) -> Sequence[StepRow]:
    """The steps of the newest drive of a run that made so many: the time between two drives is no step's.

    Args:
        steps: of the run, in their order.
        fewest: where no drive has so many, and where the run did not tell its training time, all are returned.
    """
    pairs = enumerate(itertools.pairwise(steps), 1)
    first_ones = [at for at, (a, b) in pairs if b.at_s - a.at_s > b.training_s - a.training_s + STOPPED_S]
    if any(row.training_s <= 0 for row in steps):
        return steps
    drives = [steps[first:end] for first, end in itertools.pairwise((0, *first_ones, len(steps)))]
    return next((drive for drive in reversed(drives) if len(drive) >= fewest), steps)


class TrainingTime:
    """Of one drive. All times are seconds since the start of the run."""

    def __init__(self) -> None:
        self.before_s = 0.0
        """What earlier drives have trained."""
        self._began_s: float | None = None
        self._up_s: float | None = None
        self._opened_s: float | None = None
        """When the learner's start was over."""
        self._starting_until_s = 0.0
        """Until then at least the learner was starting."""

    def everyone_is_up(self, now_s: float) -> None:
        """Every actor's process is there; a second call changes nothing."""
        if self._up_s is None:
            self._up_s = now_s
            self._begin()

    def hear(self, report: ActorReported) -> None:
        """An actor has reported."""
        if self._began_s is not None or report.name != LEARNER or not report.activities:
            return
        starting = [span.end_s for span in report.activities if span.activity is Activity.STARTING]
        self._starting_until_s = max(self._starting_until_s, *starting, 0.0)
        if report.activities[-1].activity is not Activity.STARTING:
            self._opened_s = self._starting_until_s if starting else report.activities[0].start_s
            self._begin()

    def step(self) -> None:
        """A step is recorded."""
        if self._began_s is None:
            self._began_s = max(self._up_s or 0.0, self._starting_until_s)

    def at(self, now_s: float) -> float:
        """Seconds of training up to now."""
        return self.before_s + (0.0 if self._began_s is None else now_s - self._began_s)

    def _begin(self) -> None:
        if self._began_s is None and self._up_s is not None and self._opened_s is not None:
            self._began_s = max(self._up_s, self._opened_s)
