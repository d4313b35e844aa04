"""The EngineWorker in the role of a teacher: it says how likely given tokens are, under weights that never change.

What it is asked is the Scorer's, which asks again when an answer does not come; so this holds nothing that could be
lost.

Invariants:

* Every question is answered once, with log-probs or with the reason why there are none. The same one, asked again
  before it is answered, is not computed twice.
* What is asked before the engine is open waits until it is.

| waits for | who ends it |
|---|---|
| the engine to open | its backend, within ``teacher.start_timeout_s`` |
| an answer of the backend | the backend; the Scorer, which has a teacher replaced that answers nothing |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never, final

from penstock.actors.engine_worker.fixed_model import FixedModel
from penstock.actors.waits import several
from penstock.messages.commands import ComputeLogprobs, OpenEngine, Send
from penstock.messages.local import EngineOpened, LogprobsComputed, Started
from penstock.messages.names import SCORER
from penstock.messages.teaching import TeacherAnswered, TeacherAsked
from penstock.messages.waits import OWN_BACKEND, Wait
from penstock.messages.weights import EngineReady

if TYPE_CHECKING:
    from penstock.actors.engine_worker.settings import TeacherSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import TeacherEvent
    from penstock.messages.samples import SampleKey


@final
class Teacher(FixedModel):
    """The state machine of a teacher."""

    def __init__(self, settings: TeacherSettings) -> None:
        super().__init__()
        self.settings = settings
        self.asked: dict[tuple[SampleKey, int], TeacherAsked] = {}
        """By sample and attempt; what has no answer yet."""
        self._out: list[AnyCommand] = []

    @property
    def num_open(self) -> int:
        """Questions without an answer."""
        return len(self.asked)

    def waits(self) -> tuple[Wait, ...]:
        """The backend's answers."""
        if not self.num_slots:
            return (Wait("start of", "the teacher", OWN_BACKEND),)
        return tuple(several("log-probs of", OWN_BACKEND, [(key, 0) for key, _ in self.asked]))

    def handle(self, event: TeacherEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case TeacherAsked():
                if (event.key, event.attempt) not in self.asked:
                    self.asked[event.key, event.attempt] = event
                    if self.num_slots:
                        self._compute(event)
            case LogprobsComputed():
                if self.asked.pop((event.key, event.attempt), None) is not None:
                    answer = TeacherAnswered(
                        teacher=self.settings.name,
                        key=event.key,
                        attempt=event.attempt,
                        logprobs=event.logprobs,
                        error=event.error,
                        top=event.top,
                    )
                    self._out.append(Send(SCORER, answer))
            case EngineOpened():
                self._on_opened(event.num_slots)
            case Started():
                self._out.append(OpenEngine())
            case _:
                assert_never(event)
        out, self._out = self._out, []
        return out

    def _on_opened(self, num_slots: int) -> None:
        self.num_slots = num_slots
        ready = EngineReady(engine=self.settings.name, engine_epoch=self.settings.epoch, num_slots=num_slots)
        self._out.append(Send(SCORER, ready))
        for asked in self.asked.values():
            self._compute(asked)

    def _compute(self, asked: TeacherAsked) -> None:
        self._out.append(ComputeLogprobs(key=asked.key, attempt=asked.attempt, texts=asked.texts))

    def validate(self) -> None:
        """Assert the invariants."""
        for (key, attempt), asked in self.asked.items():
            assert (key, attempt) == (asked.key, asked.attempt)
