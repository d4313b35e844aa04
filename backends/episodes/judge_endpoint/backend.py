"""Any engine's backend, which answers a judge's questions beside the samples of the actor.

The engine behind it has ``num_slots`` places more than the actor is told of, and these are the judge's: neither waits
for the other's places.

Invariants:

* The actor hears of no question: not of its tokens, not of its end, and its slots and figures do not count it.
* Not more than ``num_slots`` questions are in the engine; the others wait here, in the order in which they came.
* Questions are in the engine only while it serves weights that came through a swap whose digest and canary were right.
  Whatever ends that (a swap, an interruption, sleep) finds none: their ends are ordered before it.
* A question that was stopped goes on after the next swap, with the tokens that it had.
* Each question is answered once, unless it was dropped.
* Nothing is told to the actor while the lock is held, as whoever hears it may hold a lock of its own.

| waits for | who ends it |
|---|---|
| a question for a place | the end of another one, which has a length limit; whoever asked, at its deadline |
| a question for weights | the next swap that is right, which the WeightPublisher's deadlines see to; whoever asked |
"""

from __future__ import annotations

import threading
import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from penstock.backends.protocol import Leaver
from penstock.messages.base import Metric
from penstock.messages.canary import canary_difference
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    Generate,
    InterruptGenerations,
    SleepEngine,
)
from penstock.messages.local import EngineOpened, GenerationAdvanced, GenerationEnded, WeightsSwapped
from penstock.messages.samples import Cancelled, Part, Prompt, Purpose, SampleKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.messages.commands import EngineCommand
    from penstock.messages.local import LocalEvent
    from penstock.messages.samples import Outcome
    from penstock.messages.weights import WeightManifest

QUESTION: Final = SampleKey(-(1 << 62), 0)
"""No sample's: groups of the run are counted from 0, those of evaluations down from −1."""
NO_DEADLINE: Final = 1 << 62
"""No version is too new for an answer that is not trained on."""


class Asked(NamedTuple):
    """What is to be answered."""

    prompt: bytes
    """int32 ids ``[P]``."""
    seed: int
    dataset: int
    """As of a prompt: it says how the engine draws."""
    max_new_tokens: int


class _Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    """Its end was ordered, and it is to go on later."""
    DROPPED = "dropped"


class _Question:
    def __init__(self, number: int, asked: Asked, answer: Callable[[Outcome, Part], None]) -> None:
        self.number = number
        self.asked = asked
        self.answer = answer
        self.phase = _Phase.WAITING
        self.part = Part()
        """What there is of its answer."""
        self.num_heard = 0
        """Tokens of the answer that the figures count."""


class QuestionServer(Protocol):
    """Who brings questions, from a thread of its own."""

    def start(self, engine: JudgingEngine, fail: Fail) -> None:
        """Called once, before the engine is started."""
        ...

    def close(self, timeout_s: float) -> None:
        """End what is open, with a reason, and the thread."""
        ...


class JudgingEngine:
    """See the module."""

    def __init__(
        self,
        inner: Backend[EngineCommand],
        server: QuestionServer,
        *,
        num_slots: int,
        canary_tolerance: float | None,
    ) -> None:
        """
        Args:
            inner: the engine; it has the judge's places.
            server: brings the questions.
            num_slots: of the judge.
            canary_tolerance: as the actor's; None: canaries are not looked at.
        """
        self._inner = inner
        self._server = server
        self._num_slots = num_slots
        self._canary_tolerance = canary_tolerance
        self._num_samples_slots = 0
        self._lock = threading.RLock()
        self._waiting: deque[_Question] = deque()
        self._inside: dict[int, _Question] = {}
        """In the engine, by number."""
        self._next_number = 0
        self._applying: WeightManifest | None = None
        self._is_serving = False
        self._num_tokens = self._last_generated = 0.0
        self._num_answered = 0

    # --- Backend ----------------------------------------------------------------------------------------------

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._server.start(self, fail)
        self._inner.start(self._hear, fail)

    def execute(self, command: EngineCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        with self._lock:
            if isinstance(command, ApplyWeights | InterruptGenerations | SleepEngine):
                self._stop_all()
                if isinstance(command, ApplyWeights):
                    self._applying = command.manifest
            self._inner.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Those of the engine without the judge's part, and the judge's: questions that run and wait, how many were
        answered, and tokens, since the start."""
        with self._lock:
            found = tuple(map(self._without_judge, self._inner.gauges()))
            return (
                *found,
                Metric("judge/running", len(self._inside)),
                Metric("judge/waiting", len(self._waiting)),
                Metric("judge/answered", self._num_answered),
                Metric("judge/tokens", self._num_tokens),
            )

    def leaves(self) -> None:
        """See :class:`penstock.backends.protocol.Leaver`."""
        if isinstance(self._inner, Leaver):
            self._inner.leaves()

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        deadline_s = time.monotonic() + timeout_s
        self._server.close(timeout_s / 2)
        self._inner.close(max(0.0, deadline_s - time.monotonic()))

    def _without_judge(self, metric: Metric) -> Metric:
        num_inside = len(self._inside)
        match metric.name:
            case "engine/generated_tokens":  # the engine is ahead of what was heard, and a total never goes down
                self._last_generated = max(self._last_generated, metric.value - self._num_tokens)
                return Metric(metric.name, self._last_generated)
            case "engine/running":
                return Metric(metric.name, max(0.0, metric.value - num_inside))
            case "engine/occupancy" if self._num_samples_slots:
                num_slots = self._num_samples_slots + self._num_slots
                num_running = max(0.0, metric.value * num_slots - num_inside)
                return Metric(metric.name, min(1.0, num_running / self._num_samples_slots))
            case _:
                return metric

    # --- questions --------------------------------------------------------------------------------------------

    def ask(self, asked: Asked, answer: Callable[[Outcome, Part], None]) -> int:
        """Take a question; its number. ``answer`` is called once, on a thread of the engine, and must return at once:
        with the outcome of a generation, and the tokens."""
        with self._lock:
            question = _Question(self._next_number, asked, answer)
            self._next_number += 1
            self._waiting.append(question)
            self._fill()
            return question.number

    def drop(self, number: int) -> None:
        """Nobody waits for the answer any more. Deaf where there is no such question."""
        with self._lock:
            for question in self._waiting:
                if question.number == number:
                    self._waiting.remove(question)
                    return
            inside = self._inside.get(number)
            if inside is not None and inside.phase is not _Phase.DROPPED:
                if inside.phase is _Phase.RUNNING:
                    self._abort(inside)
                inside.phase = _Phase.DROPPED

    def _fill(self) -> None:
        """Give questions to the engine while it serves and has places for them."""
        while self._is_serving and self._waiting and len(self._inside) < self._num_slots:
            question = self._waiting.popleft()
            asked = question.asked
            question.phase = _Phase.RUNNING
            self._inside[question.number] = question
            self._inner.execute(
                Generate(
                    key=QUESTION,
                    attempt=question.number,
                    purpose=Purpose.EVALUATE,
                    prompt=Prompt(row=0, epoch=0, tokens=asked.prompt, dataset=asked.dataset),
                    seed=asked.seed,
                    deadline_version=NO_DEADLINE,
                    prefix=question.part if question.part.num_tokens else None,
                    max_new_tokens=asked.max_new_tokens,
                )
            )

    def _stop_all(self) -> None:
        """Until the next weights that are right."""
        self._is_serving = False
        for question in list(self._inside.values()):
            if question.phase is _Phase.RUNNING:
                question.phase = _Phase.STOPPING
                self._abort(question)

    def _abort(self, question: _Question) -> None:
        self._inner.execute(AbortGeneration(QUESTION, question.number))

    # --- the engine's answers ---------------------------------------------------------------------------------

    def _hear(self, event: LocalEvent) -> None:
        """What the engine says, from any of its threads."""
        match event:
            case GenerationAdvanced() | GenerationEnded() if event.key == QUESTION:
                with self._lock:
                    self._hear_of_question(event)
                return
            case EngineOpened():
                self._num_samples_slots = event.num_slots - self._num_slots
                event = EngineOpened(num_slots=self._num_samples_slots)
            case WeightsSwapped():
                self._on_swapped(event)
            case _:
                pass
        self._emit(event)

    def _on_swapped(self, event: WeightsSwapped) -> None:
        with self._lock:
            manifest, self._applying = self._applying, None
            self._is_serving = (
                manifest is not None and manifest.publish == event.publish and self._is_right(manifest, event)
            )
            self._fill()

    def _is_right(self, manifest: WeightManifest, swapped: WeightsSwapped) -> bool:
        """As the actor sees it, which gives nothing to an engine with weights that are wrong."""
        if swapped.digest != manifest.digest:
            return False
        if self._canary_tolerance is None or manifest.canary is None:
            return True
        return canary_difference(manifest.canary, swapped.canary_logprobs) <= self._canary_tolerance

    def _hear_of_question(self, event: GenerationAdvanced | GenerationEnded) -> None:
        question = self._inside.get(event.attempt)
        if question is None:
            return
        part = event.chunk if isinstance(event, GenerationAdvanced) else event.part
        begin = event.from_token if isinstance(event, GenerationAdvanced) else 0
        num_known = begin + part.num_tokens
        self._num_tokens += max(0, num_known - question.num_heard)
        question.num_heard = max(question.num_heard, num_known)
        if isinstance(event, GenerationAdvanced):
            return
        del self._inside[event.attempt]
        if isinstance(event.outcome, Cancelled):
            if question.phase is not _Phase.DROPPED:
                question.part, question.phase = event.part, _Phase.WAITING
                self._waiting = deque(sorted((question, *self._waiting), key=lambda each: each.number))
        elif question.phase is not _Phase.DROPPED:
            self._num_answered += 1
            question.answer(event.outcome, event.part)
        self._fill()
