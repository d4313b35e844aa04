"""The EngineWorker: one inference engine, its requests, and the order of generating and taking new weights.

Invariants:

* Not more than ``num_slots`` requests are submitted to the engine; the others wait here, so that a drain waits only for
  what runs.
* A request is submitted only when the engine serves its ``min_version``.
* Between the beginning of a swap and its end nothing is submitted, and under ``drain`` and ``interrupt`` nothing runs
  when it begins.
* The version that it serves never goes down. What it loaded and was wrong it has not served.
* Of a swap whose digest or canary is wrong nothing is passed on: what runs is ended, its tokens since the swap are
  dropped, and it goes on from there under the next weights that are right.
* Nobody waits for the end of what is evaluated: when nothing else runs any more before a drained swap, or in a turn of
  the learner, it is interrupted, and goes on after it.
* An attempt that is over here is not begun again, however often it is issued.
* One that shares devices with the learner opens, wakes and generates in a turn of the engines only. In the learner's it
  submits nothing, sleeps when nothing runs any more, and says so; it wakes with the next weights that it is told to
  swap to.
* One that is lent its devices hands everything back, likewise, when the learner's turn begins, and is one without
  weights from then on. Whoever counts on engines hears so, and when it has a turn again.
* PromptSource is told which version it serves whenever that changes.
* One that is to leave submits nothing more and takes no more weights. It breaks off what runs, tells the tokens that
  PromptSource lacks, and hands everything back.
* A sample leaves once: as ``SampleGenerated``, or as a failure that PromptSource hears of, handed back, or cancelled by
  settlement.

How it comes from state to state stands in ``phases.py``.

| waits for | who ends it |
|---|---|
| the engine to open | its backend; the supervisor's start deadline |
| running requests | the engine; the length limit, and PromptSource's lease deadline |
| weights to be fetched, swapped | its backend; the WeightPublisher's stage and commit deadlines |
| other weights than the wrong ones | the WeightPublisher, which stages the best that it has or replaces the engine |
| its turn on a device that it shares | the Learner, whose own work has deadlines; another Learner takes its place |
| the engine to fall asleep | its backend; the Learner's ``yield_timeout_s``, then it is replaced |
| a version that serves ``min_version`` | the WeightPublisher, which stages the newest on every engine |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never, final

import msgspec

from penstock.actors.engine_worker.looks import engine_activity, engine_waits
from penstock.actors.engine_worker.phases import BUSY, ENGINE, HOLDING_NOTHING, REQUEST, Phase
from penstock.actors.engine_worker.requests import RequestTable, closed
from penstock.actors.engine_worker.weights import Weights
from penstock.actors.transitions import Steps
from penstock.messages.base import Metric
from penstock.messages.commands import (
    AbortGeneration,
    InterruptGenerations,
    OpenEngine,
    Send,
    SleepEngine,
)
from penstock.messages.flow import (
    SampleIssued,
    SampleRevoked,
    SamplesSettled,
)
from penstock.messages.local import (
    EngineOpened,
    EngineSlept,
    EpisodeMoved,
    GenerationAdvanced,
    GenerationEnded,
    Started,
    TimerFired,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.membership import EngineLeaving, EngineNoticed
from penstock.messages.names import BUFFER, LEARNER, PROMPT_SOURCE, SCORER, SUPERVISOR, WEIGHT_PUBLISHER
from penstock.messages.parts import cut
from penstock.messages.samples import Cancelled, Completed, InfraError, Part, PolicyError, Truncated
from penstock.messages.training import Activity, DeviceTurned, DeviceYielded, Holder, NoticeGiven, UpdateMode
from penstock.messages.weights import (
    EngineOpening,
    EngineReady,
    WeightsCommitted,
    WeightsStaged,
)

if TYPE_CHECKING:
    from penstock.actors.engine_worker.requests import Request
    from penstock.actors.engine_worker.settings import EngineWorkerSettings
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import EngineWorkerEvent
    from penstock.messages.membership import HeldLease
    from penstock.messages.waits import Wait

_SERVING: Final = Phase.SERVING
_SPOILT: Final = Phase.SPOILT
_WORKING: Final = Activity.WORKING
_IDLE: Final = Activity.WAITING_FOR_DEMAND, 0.0, 0.0
_WITHOUT_WEIGHTS: Final = Activity.WAITING_FOR_WEIGHTS, 0.0, 0.0
"""See :data:`penstock.messages.base.LOSSY`."""


@final
class EngineWorker:
    """The EngineWorker's state machine."""

    __slots__ = (
        "_has_yielded", "_is_leaving", "_num_outside", "_offered", "_out", "_steps", "_turned", "num_slots",
        "num_spoilt_tokens", "phase", "requests", "settings", "weights",
    )  # fmt: skip

    def __init__(self, settings: EngineWorkerSettings) -> None:
        self.settings = settings
        self.phase = Phase.CLOSED if settings.takes_turns else Phase.STARTING
        self.num_slots = 0
        self.weights = Weights(settings)
        self._steps = Steps({**ENGINE, **REQUEST})
        self.requests = RequestTable(settings.name, self._steps)
        self._turned: DeviceTurned | None = None
        """Whose turn it is, as far as is known here."""
        self._has_yielded = False
        """In this turn."""
        self._offered: EngineReady | None = None
        """What PromptSource was told last; one that is lent its devices takes requests, or none."""
        self._num_outside = 0
        self._is_leaving = False
        self.num_spoilt_tokens = 0
        """Made by weights that were wrong, and dropped."""
        self._out: list[AnyCommand] = []

    # --- what others see --------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """For people."""
        return self.phase.value

    @property
    def activity(self) -> Activity:
        """What the engine's time is spent on."""
        num_generating = self.requests.num_running - self.num_outside
        return engine_activity(self.phase, self.requests, self.weights, num_generating, is_our_turn=self._is_our_turn)

    @property
    def occupancy(self) -> float:
        """Requests that the engine works on ÷ slots."""
        num_working = self.requests.num_running
        if self._num_outside:
            num_working -= self.num_outside
        return num_working / self.num_slots if self.num_slots else 0.0

    @property
    def outside(self) -> float:
        """Requests whose episodes wait for tools, environments and agents ÷ slots."""
        return self.num_outside / self.num_slots if self._num_outside and self.num_slots else 0.0

    @property
    def shows(self) -> tuple[Activity, float, float]:
        """Activity, occupancy and outside at once, as whoever follows them asks after nearly every event."""
        requests = self.requests
        if self.phase is not _SERVING or self._num_outside or self.settings.takes_turns:
            return self.activity, self.occupancy, self.outside
        if num_running := requests.num_running:
            return _WORKING, num_running / self.num_slots, 0.0
        return _IDLE if not requests.num_waiting and self.weights.version >= 0 else _WITHOUT_WEIGHTS

    @property
    def num_outside(self) -> int:
        """Running requests whose episodes wait for something else than the engine."""
        return min(self._num_outside, self.requests.num_running) if self._num_outside else 0

    def leases(self) -> tuple[HeldLease, ...]:
        """Requests that wait or run here, and those that failed here."""
        return self.requests.leases(are_paused=self.phase is Phase.APPLYING)

    def waits(self) -> tuple[Wait, ...]:
        """The backend's answers, and the weights that waiting requests need."""
        return tuple(engine_waits(self.phase, self.requests, self.weights, is_our_turn=self._is_our_turn))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Beside the gauges of the backend."""
        return (
            Metric("engine/bad_version_tokens", self.num_spoilt_tokens),
            Metric("engine/canary_difference", self.weights.canary_difference),
        )

    # --- events -----------------------------------------------------------------------------------------------

    def handle(self, event: EngineWorkerEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        self._steps.cause = type(event)
        match event:
            case SamplesSettled():  # with many engines the most frequent
                for request in self.requests.settle(event.settled):
                    self._abort(request)
            case SampleIssued():
                self._on_issued(event)
            case GenerationAdvanced():
                self._on_advanced(event)
            case GenerationEnded():
                self._on_ended(event)
            case EpisodeMoved():
                self._num_outside = event.num_outside
            case SampleRevoked():
                self._on_revoked(event)
            case WeightsStaged():
                self._out += self.weights.ask(event.manifest)
            case WeightsStagedLocally():
                self._out += self.weights.fetched(event)
            case WeightsCommitted():
                self._out += self.weights.committed(event)
            case WeightsSwapped():
                self._on_swapped(event)
            case EngineOpened():
                self._on_opened(event)
            case DeviceTurned():
                self._turned, self._has_yielded = event, False
            case EngineLeaving():
                self._is_leaving |= event.name == self.settings.name  # on real machines it hears of the others too
            case EngineSlept():
                if self.phase is Phase.SLEEPING:
                    self._turn(Phase.ASLEEP)
            case Started():
                if not self.settings.takes_turns:  # others open in a turn, of which they may hear before this
                    self._out.append(OpenEngine())
            case TimerFired():
                pass
            case _:
                assert_never(event)
        if self._turned is not None:
            self._take_turn(self._turned)
        if self._is_leaving or (self.settings.is_lent and not self._is_our_turn):
            self._leave()
        else:
            if self.weights.commit is not None and (commit := self.weights.due) is not None:
                self._begin_swap(commit)
            if self.phase is _SERVING and self.requests.num_waiting:
                self._submit()
        out, self._out = self._out, []
        return out

    def _send(self, to: str, event: Event) -> None:
        self._out.append(Send(to, event))

    def _turn(self, phase: Phase) -> None:
        self._steps.take(self.phase, phase)
        self.phase = phase

    def _on_opened(self, event: EngineOpened) -> None:
        if self.phase is not Phase.STARTING:
            return
        self.num_slots = event.num_slots
        self._turn(Phase.SERVING)
        name, epoch = self.settings.name, self.settings.epoch
        for text in event.notices:
            self._send(SUPERVISOR, NoticeGiven(name=name, text=text))
            self._send(BUFFER, EngineNoticed(engine=name, engine_epoch=epoch, text=text))
        if self.settings.is_lent:  # the learner may have taken its device back meanwhile
            self._offer(event.num_slots if self._is_our_turn else 0)
        else:
            self._offer(event.num_slots, event.passes_on_at)

    def _offer(self, num_slots: int, passes_on_at: str = "") -> None:
        """Say that it takes requests, or none. A lent one passes no weights on: it fetches what it had again."""
        self._offered = EngineReady(
            engine=self.settings.name,
            engine_epoch=self.settings.epoch,
            num_slots=num_slots,
            passes_on_at=passes_on_at,
            turn=self._turned.turn if self._turned is not None and self.settings.is_lent else 0,
        )
        self._send(PROMPT_SOURCE, self._offered)
        self._send(WEIGHT_PUBLISHER, self._offered)

    @property
    def _is_offered(self) -> bool:
        return self._offered is not None and self._offered.num_slots > 0

    def _tell_version(self) -> None:
        """Say which version it serves now; one that takes no requests begins without any in its next turn."""
        if self._offered is not None and self._is_offered and self._offered.version != self.weights.version:
            self._offered = msgspec.structs.replace(self._offered, version=self.weights.version)
            self._send(PROMPT_SOURCE, self._offered)

    # --- turns on a device that is shared ---------------------------------------------------------------------

    @property
    def _is_our_turn(self) -> bool:
        """Whether the device may be used."""
        turned = self._turned
        return not self.settings.takes_turns or (turned is not None and turned.holder is Holder.ENGINES)

    def _take_turn(self, turned: DeviceTurned) -> None:
        """Open in a turn of the engines; in the learner's yield when nothing runs."""
        if not self.settings.takes_turns:
            return
        name, epoch = self.settings.name, self.settings.epoch
        if self.settings.is_lent and self._is_offered != self._is_our_turn and self.num_slots and not self._is_leaving:
            if self._is_our_turn:
                self.weights.forget()
            self._offer(self.num_slots if self._is_our_turn else 0)
        if self._is_our_turn:
            if self.phase is Phase.CLOSED and not self._is_leaving:
                self._turn(Phase.STARTING)
                self._send(WEIGHT_PUBLISHER, EngineOpening(engine=name, engine_epoch=epoch))
                self._out.append(OpenEngine())
        elif self.phase in (Phase.CLOSED, Phase.ASLEEP):
            if not self._has_yielded:
                self._has_yielded = True
                self._send(LEARNER, DeviceYielded(engine=name, engine_epoch=epoch, turn=turned.turn))
        elif self.phase not in BUSY and not self.requests.num_running:
            self._turn(Phase.SLEEPING)
            self._out.append(SleepEngine())
        elif self.phase in (Phase.SERVING, Phase.DRAINING) and turned.interrupts:
            self._interrupt()
        elif self.phase in (Phase.SERVING, Phase.DRAINING):
            self._interrupt_evaluation()

    def _interrupt_evaluation(self) -> None:
        """If nothing else runs any more."""
        if self.requests.runs_only_evaluation:
            self._interrupt()

    def _interrupt(self) -> None:
        self._turn(Phase.INTERRUPTING)
        self._out.append(InterruptGenerations())

    # --- requests ---------------------------------------------------------------------------------------------

    def _on_issued(self, event: SampleIssued) -> None:
        if self.requests.is_news(event):
            self._abort(self.requests.remove(event.key))  # issued again: PromptSource goes on from what it knows
            self.requests.add(event)

    def _on_revoked(self, event: SampleRevoked) -> None:
        request = self.requests.current(event.key, event.attempt)
        if request is not None:
            self._abort(request)
            self.requests.fail(request, request.num_tokens)  # a PromptSource that was replaced asks what became of it

    def _submit(self) -> None:
        """Give waiting requests to the engine, which serves, while it has slots."""
        num_places = self.num_slots - self.requests.num_running
        if num_places <= 0 or not self._is_our_turn:
            return
        self._out.extend(request.generate() for request in self.requests.take(num_places, self.weights.version))

    def _leave(self) -> None:
        """Hand back what waits, and break off what runs; while weights are applied that has to wait."""
        for request in self.requests.waiting():
            self._send(PROMPT_SOURCE, self.requests.hand_back(request))
        if self.phase in (Phase.SERVING, Phase.DRAINING) and self.requests.num_running:
            self._interrupt()

    def _on_advanced(self, event: GenerationAdvanced) -> None:
        request = self.requests.current(event.key, event.attempt)
        if request is None or self.phase is _SPOILT:
            return
        self._report(request, event.from_token, event.chunk)

    def _report(self, request: Request, from_token: int, chunk: Part) -> None:
        self._send(PROMPT_SOURCE, request.reported(from_token, chunk, self.settings.name))

    def _on_ended(self, event: GenerationEnded) -> None:
        request = self.requests.current(event.key, event.attempt)
        if request is None:
            return
        if self.phase is _SPOILT:
            if request.is_running:  # as far as PromptSource was told, all of it is older than the wrong weights
                self.num_spoilt_tokens += max(0, event.part.num_tokens - request.num_tokens)
                self.requests.interrupt(request, request.response())
            return
        match event.outcome:
            case Completed() | Truncated() | PolicyError():
                self.requests.end(request)
                parts = event.parts or (event.part,)
                self._send(SCORER, request.generated(parts, event.outcome, self.settings.name))
                self._send(PROMPT_SOURCE, closed(event, self.settings.name))
            case Cancelled():  # interrupted: it goes on from here under the new weights
                self.requests.interrupt(request, event.part)
                if event.part.num_tokens > request.num_tokens:  # what PromptSource lacks it could never join later
                    self._report(request, request.num_tokens, cut(event.part, request.num_tokens))
            case InfraError():
                self.requests.fail(request, event.part.num_tokens)
                self._send(PROMPT_SOURCE, closed(event, self.settings.name))

    def _abort(self, request: Request | None) -> None:
        if request is not None and request.is_running:
            self._out.append(AbortGeneration(request.key, request.issued.attempt))

    # --- weights ----------------------------------------------------------------------------------------------

    def _begin_swap(self, commit: WeightsCommitted) -> None:
        """Go on with a commit whose weights are staged: drain or interrupt if need be, then apply."""
        if not self._is_our_turn:
            return
        if self.weights.would_go_back:
            self._out.append(self.weights.drop())
            return
        if self.phase is Phase.SERVING and self.requests.num_running:
            match commit.update_mode:
                case UpdateMode.DRAIN:
                    self._turn(Phase.DRAINING)
                case UpdateMode.INTERRUPT if not self.settings.retracts:
                    self._interrupt()
                case UpdateMode.INTERRUPT | UpdateMode.IN_FLIGHT:
                    self._apply()
                    return
        if self.phase is Phase.DRAINING:
            self._interrupt_evaluation()
        if self.phase not in (*BUSY, Phase.CLOSED) and not self.requests.num_running:
            self._out.append(self.weights.drained(commit))
            self._apply()

    def _apply(self) -> None:
        self._turn(Phase.APPLYING)
        self._out.append(self.weights.begin())

    def _on_swapped(self, event: WeightsSwapped) -> None:
        if self.weights.applying is None or self.weights.applying.publish != event.publish:
            return
        wrong = self.weights.swapped(event)
        self._out.append(self.weights.applied())
        if wrong:
            self._spoil(f"version {event.version}: {wrong}; nothing is passed on")
        else:
            self._turn(Phase.SERVING)
        self._tell_version()

    def _spoil(self, text: str) -> None:
        """Give up what was loaded."""
        self._turn(Phase.SPOILT)
        self.weights.forget_served()
        self._send(SUPERVISOR, NoticeGiven(name=self.settings.name, text=text))
        if self.requests.num_running:
            self._out.append(InterruptGenerations())

    def validate(self) -> None:
        """Assert the invariants."""
        self.requests.validate()
        self._steps.validate()
        num_running = self.requests.num_running
        assert num_running <= self.num_slots
        assert (self.phase is Phase.APPLYING) == (self.weights.applying is not None)
        assert self.phase not in (Phase.STARTING, *HOLDING_NOTHING) or not num_running
        assert self.settings.takes_turns or self.phase not in HOLDING_NOTHING
