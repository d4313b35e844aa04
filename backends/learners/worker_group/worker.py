"""What works in a learner's process, and what it needs of that process. Nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.words import LearnerAnswer
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.messages.base import Metric
    from penstock.messages.commands import LearnerCommand


class LearnerWorker(Protocol):
    """Trains, exports and saves, as one rank of a worker group or alone. One thread calls it."""

    def carry_out(self, command: LearnerCommand, /) -> LearnerAnswer | None:
        """Do it, and answer it unless that comes later, or never."""
        ...

    def finish(self) -> None:
        """All is done: let the published weights go, and wait for what is being written. Not after a failure."""
        ...


class WorkerHost(Protocol):
    """The process that a worker works in."""

    def emit(self, answer: LearnerAnswer, /) -> None:
        """Answer later, from any thread."""
        ...

    def fail(self, error: BaseException, /) -> None:
        """The learner cannot go on; from any thread but the worker's, which raises."""
        ...

    def check_stop(self) -> None:
        """Called now and then in a long command; raises to end it."""
        ...

    def show(self, gauges: tuple[Metric, ...], /) -> None:
        """All current figures."""
        ...


class RankOpener(Protocol):
    """What a learner with ranks names for them, as ``module:function``. Only the process of a rank imports it."""

    def __call__(self, plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost, /) -> LearnerWorker:
        """The worker of one rank; the first one publishes the weights.

        Raises:
            WeightExportError: they cannot be published as ``plan.export`` says.
        """
        ...
