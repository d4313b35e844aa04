"""The EngineWorker in the role of a reward model: its backend is asked by the processes of reward functions.

What is scored is the Scorer's, whose reward functions ask again when an answer does not come; so this holds nothing
that could be lost. All that it knows is whether its backend has something to do.

| waits for | who ends it |
|---|---|
| the model to open | its backend; of a server, within ``reward_model.start_timeout_s`` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never, final

from penstock.actors.engine_worker.fixed_model import FixedModel
from penstock.messages.commands import OpenEngine
from penstock.messages.local import EngineOpened, ScoringMoved, Started
from penstock.messages.waits import OWN_BACKEND, Wait

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import RewardModelEvent


@final
class RewardModel(FixedModel):
    """The state machine of a reward model."""

    def __init__(self) -> None:
        super().__init__()
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Samples that the backend scores."""
        return self._num_open

    def waits(self) -> tuple[Wait, ...]:
        """The start; the Scorer waits for scores."""
        return () if self.num_slots else (Wait("start of", "the reward model", OWN_BACKEND),)

    def handle(self, event: RewardModelEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case Started():
                return [OpenEngine()]
            case EngineOpened():
                self.num_slots = event.num_slots
            case ScoringMoved():
                self._num_open = event.num_open
            case _:
                assert_never(event)
        return []

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.num_open >= 0
        assert not self.num_open or self.num_slots, "asked before it was open"
