"""What teachers and reward models have in common: an EngineWorker whose weights never change.

It has none of the duties of an engine that generates: it holds no lease, takes no new weights, and no version waits for
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.training import Activity

if TYPE_CHECKING:
    from penstock.messages.base import Metric
    from penstock.messages.membership import HeldLease


class FixedModel:
    """How the time of such a model is spent."""

    def __init__(self) -> None:
        self.num_slots = 0
        """0 until the engine is open."""

    @property
    def num_open(self) -> int:
        """Samples that it has been asked about."""
        raise NotImplementedError

    @property
    def state(self) -> str:
        """For people."""
        return "serving" if self.num_slots else "starting"

    @property
    def shows(self) -> tuple[Activity, float, float]:
        """See :class:`penstock.actors.machine.Accounted`; its capacity is what it works on side by side."""
        if not self.num_slots:
            return Activity.STARTING, 0.0, 0.0
        activity = Activity.WORKING if self.num_open else Activity.WAITING_FOR_SAMPLES
        return activity, min(1.0, self.num_open / self.num_slots), 0.0

    def leases(self) -> tuple[HeldLease, ...]:
        """None: the Scorer holds every sample that a question is about."""
        return ()

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Nothing: the backend has gauges."""
        return ()
