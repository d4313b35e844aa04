"""The EngineWorker in the role of a reward model: its backend is asked by the processes of reward functions.

What is scored is the Scorer's, whose reward functions ask again when an answer does not come; so this holds nothing
that could be lost. All that it knows is whether its backend has something to do.

| waits for | who ends it |
|---|---|
| the model to open | its backend; of a server, within ``reward_model.start_timeout_s`` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never, final

from penstock.messages.commands import OpenEngine
from penstock.messages.local import EngineOpened, ScoringMoved, Started
from penstock.messages.training import Activity
from penstock.messages.waits import OWN_BACKEND, Wait

if TYPE_CHECKING:
    from penstock.messages.base import Metric
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import RewardModelEvent
    from penstock.messages.membership import HeldLease


@final
class RewardModel:
    """The state machine of a reward model."""

    def __init__(self) -> None:
        self.num_slots = 0
        """0 until the model is open."""
        self.num_open = 0
        """Samples that the backend scores."""

    @property
    def state(self) -> str:
        """For people."""
        return "serving" if self.num_slots else "starting"

    @property
    def activity(self) -> Activity:
        """What its time is spent on."""
        if not self.num_slots:
            return Activity.STARTING
        return Activity.WORKING if self.num_open else Activity.WAITING_FOR_SAMPLES

    @property
    def occupancy(self) -> float:
        """Samples ÷ those that it scores side by side."""
        return min(1.0, self.num_open / self.num_slots) if self.num_slots else 0.0

    @property
    def outside(self) -> float:
        """It plays no episodes."""
        return 0.0

    def leases(self) -> tuple[HeldLease, ...]:
        """None: the Scorer holds every sample."""
        return ()

    def waits(self) -> tuple[Wait, ...]:
        """The start; the Scorer waits for scores."""
        return () if self.num_slots else (Wait("start of", "the reward model", OWN_BACKEND),)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Nothing: the backend has gauges."""
        return ()

    def handle(self, event: RewardModelEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case Started():
                return [OpenEngine()]
            case EngineOpened():
                self.num_slots = event.num_slots
            case ScoringMoved():
                self.num_open = event.num_open
            case _:
                assert_never(event)
        return []

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.num_open >= 0
        assert not self.num_open or self.num_slots, "asked before it was open"
