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
* A sample leaves once: as ``SampleGenerated``, or as a failure that PromptSource hears of, or cancelled by settlement.

| state | leaves it |
|---|---|
| ``closed`` (shares devices) | a turn of the engines → ``starting`` |
| ``starting`` | ``EngineOpened`` → ``serving`` |
| ``serving`` | a commit of staged weights → ``draining``, ``interrupting`` or ``applying`` |
| ``draining``, ``interrupting`` | the last running request ends → ``applying`` |
| ``applying`` | ``WeightsSwapped`` → ``serving``, or ``spoilt`` when digest or canary are wrong |
| ``spoilt`` | a commit of other weights, when nothing runs any more → ``applying`` |
| any of these but ``starting`` and ``applying`` | a turn of the learner, when nothing runs any more → ``sleeping`` |
| ``sleeping`` | ``EngineSlept`` → ``asleep`` |
| ``asleep`` | a commit of staged weights, in a turn of the engines → ``applying`` |

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

from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never, final

from penstock.actors.engine_worker.requests import RequestTable
from penstock.actors.parts import tail
from penstock.actors.waits import several
from penstock.messages.base import Metric
from penstock.messages.canary import canary_difference, divergence
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchWeights,
    Generate,
    InterruptGenerations,
    OpenEngine,
    Send,
    SleepEngine,
)
from penstock.messages.flow import (
    GenerationClosed,
    GenerationProgressed,
    SampleGenerated,
    SampleIssued,
    SampleRevoked,
    SamplesSettled,
)
from penstock.messages.local import (
    EngineOpened,
    EngineSlept,
    GenerationAdvanced,
    GenerationEnded,
    Started,
    TimerFired,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.names import LEARNER, PROMPT_SOURCE, SCORER, SUPERVISOR, WEIGHT_PUBLISHER
from penstock.messages.samples import Cancelled, InfraError, Part, Sample
from penstock.messages.training import Activity, DeviceTurned, DeviceYielded, Holder, NoticeGiven, UpdateMode
from penstock.messages.waits import OWN_BACKEND, Wait
from penstock.messages.weights import (
    DrainFinished,
    EngineOpening,
    EngineReady,
    WeightManifest,
    WeightsApplied,
    WeightsCommitted,
    WeightsFetched,
    WeightsStaged,
)

if TYPE_CHECKING:
    from penstock.actors.engine_worker.requests import Request
    from penstock.actors.engine_worker.settings import EngineWorkerSettings
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import EngineWorkerEvent
    from penstock.messages.membership import HeldLease
    from penstock.messages.samples import ModelOutcome


class Phase(StrEnum):
    """State of the engine."""

    CLOSED = "closed"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    INTERRUPTING = "interrupting"
    APPLYING = "applying"
    SPOILT = "spoilt"
    SLEEPING = "sleeping"
    ASLEEP = "asleep"


BUSY: Final = (Phase.STARTING, Phase.APPLYING, Phase.SLEEPING)
"""The backend does something that cannot be broken off."""
HOLDING_NOTHING: Final = (Phase.CLOSED, Phase.SLEEPING, Phase.ASLEEP)
"""No device memory, or not for long."""


@final
class EngineWorker:
    """The EngineWorker's state machine."""

    def __init__(self, settings: EngineWorkerSettings) -> None:
        self.settings = settings
        self.phase = Phase.CLOSED if settings.takes_turns else Phase.STARTING
        self.num_slots = 0
        self.version = -1
        self.served: WeightManifest | None = None
        self.digest = ""
        """Of what the engine loaded, as it computed it."""
        self.canary_logprobs = b""
        """Of the canary of what it serves."""
        self.canary_difference = 0.0
        """See :func:`penstock.messages.canary.canary_difference`."""
        self._layout = self._checksum = ""
        self.requests = RequestTable()
        self._fetching: WeightManifest | None = None
        self._staged: WeightManifest | None = None
        self._wanted: WeightManifest | None = None
        """Staged by the publisher while another fetch was running."""
        self._commit: WeightsCommitted | None = None
        self.applying: WeightManifest | None = None
        self._turned: DeviceTurned | None = None
        """Whose turn it is, as far as is known here."""
        self._has_yielded = False
        """In this turn."""
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
        if self.phase is Phase.STARTING:
            return Activity.STARTING
        if self.phase in HOLDING_NOTHING and not self._is_our_turn:
            return Activity.ASLEEP
        if self.phase is Phase.SPOILT:
            return Activity.WAITING_FOR_WEIGHTS
        if self.requests.num_running:
            return Activity.WORKING
        if self.phase is Phase.APPLYING:
            return Activity.APPLYING_WEIGHTS
        if self.requests.num_waiting or self.version < 0 or self.phase is Phase.ASLEEP:
            return Activity.WAITING_FOR_WEIGHTS
        return Activity.WAITING_FOR_DEMAND

    @property
    def occupancy(self) -> float:
        """Running requests ÷ slots."""
        return self.requests.num_running / self.num_slots if self.num_slots else 0.0

    def leases(self) -> tuple[HeldLease, ...]:
        """Requests that wait or run here, and those that failed here."""
        return self.requests.leases(are_paused=self.phase is Phase.APPLYING)

    def waits(self) -> tuple[Wait, ...]:
        """The backend's answers, and the weights that waiting requests need."""
        waits: list[Wait] = []
        if self.phase is Phase.STARTING:
            waits.append(Wait("start of", "the engine", OWN_BACKEND))
        elif self.phase is Phase.SPOILT:
            waits.append(Wait("other weights than", "the wrong ones", WEIGHT_PUBLISHER))
        elif self.phase is Phase.SLEEPING:
            waits.append(Wait("sleep of", "the engine", OWN_BACKEND))
        elif self.phase in HOLDING_NOTHING and not self._is_our_turn:
            waits.append(Wait("turn on", "the device", LEARNER))
        elif self.phase is Phase.ASLEEP:
            waits.append(Wait("weights for", "the engine that sleeps", WEIGHT_PUBLISHER))
        for doing, manifest in (("fetched weights of", self._fetching), ("swapped weights of", self.applying)):
            if manifest is not None:
                waits.append(Wait(doing, f"version {manifest.version}", OWN_BACKEND))
        waits += several("tokens of", OWN_BACKEND, [(r.key, r.num_tokens) for r in self.requests.running()])
        lacking = sorted({r.issued.min_version for r in self.requests.waiting() if r.issued.min_version > self.version})
        waits += several("weights of", WEIGHT_PUBLISHER, [(f"version {version}", 0) for version in lacking])
        return tuple(waits)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Beside the gauges of the backend."""
        return (
            Metric("engine/bad_version_tokens", self.num_spoilt_tokens),
            Metric("engine/canary_difference", self.canary_difference),
        )

    # --- events -----------------------------------------------------------------------------------------------

    def handle(self, event: EngineWorkerEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case SampleIssued():
                self._on_issued(event)
            case GenerationAdvanced():
                self._on_advanced(event)
            case GenerationEnded():
                self._on_ended(event)
            case SampleRevoked():
                self._on_revoked(event)
            case SamplesSettled():
                for request in self.requests.settle(event.settled):
                    self._abort(request)
            case WeightsStaged():
                self._on_staged(event.manifest)
            case WeightsStagedLocally():
                self._on_fetched(event)
            case WeightsCommitted():
                self._on_commit(event)
            case WeightsSwapped():
                self._on_swapped(event)
            case EngineOpened():
                self._on_opened(event.num_slots)
            case DeviceTurned():
                self._turned, self._has_yielded = event, False
            case EngineSlept():
                if self.phase is Phase.SLEEPING:
                    self.phase = Phase.ASLEEP
            case Started():
                if self.phase is Phase.STARTING:
                    self._out.append(OpenEngine())
            case TimerFired():
                pass
            case _:
                assert_never(event)
        self._take_turn()
        self._begin_swap()
        self._submit()
        out, self._out = self._out, []
        return out

    def _send(self, to: str, event: Event) -> None:
        self._out.append(Send(to, event))

    def _on_opened(self, num_slots: int) -> None:
        if self.phase is not Phase.STARTING:
            return
        self.phase, self.num_slots = Phase.SERVING, num_slots
        ready = EngineReady(engine=self.settings.name, engine_epoch=self.settings.epoch, num_slots=num_slots)
        self._send(PROMPT_SOURCE, ready)
        self._send(WEIGHT_PUBLISHER, ready)

    # --- turns on a device that is shared ---------------------------------------------------------------------

    @property
    def _is_our_turn(self) -> bool:
        """Whether the device may be used."""
        turned = self._turned
        return not self.settings.takes_turns or (turned is not None and turned.holder is Holder.ENGINES)

    def _take_turn(self) -> None:
        """Open in a turn of the engines; in the learner's yield when nothing runs."""
        if self._turned is None or not self.settings.takes_turns:
            return
        name, epoch = self.settings.name, self.settings.epoch
        if self._is_our_turn:
            if self.phase is Phase.CLOSED:
                self.phase = Phase.STARTING
                self._send(WEIGHT_PUBLISHER, EngineOpening(engine=name, engine_epoch=epoch))
                self._out.append(OpenEngine())
        elif self.phase in (Phase.CLOSED, Phase.ASLEEP):
            if not self._has_yielded:
                self._has_yielded = True
                self._send(LEARNER, DeviceYielded(engine=name, engine_epoch=epoch, turn=self._turned.turn))
        elif self.phase not in BUSY and not self.requests.num_running:
            self.phase = Phase.SLEEPING
            self._out.append(SleepEngine())
        elif self.phase in (Phase.SERVING, Phase.DRAINING):
            self._interrupt_evaluation()

    def _interrupt_evaluation(self) -> None:
        """If nothing else runs any more."""
        if self.requests.runs_only_evaluation:
            self.phase = Phase.INTERRUPTING
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
        """Give waiting requests to the engine while it serves and has slots."""
        num_places = self.num_slots - self.requests.num_running
        if self.phase is not Phase.SERVING or not self._is_our_turn or num_places <= 0 or not self.requests.num_waiting:
            return
        for request in self.requests.take(num_places, self.version):
            issued = request.issued
            self._out.append(
                Generate(
                    key=issued.key,
                    attempt=issued.attempt,
                    purpose=issued.purpose,
                    prompt=issued.prompt,
                    seed=issued.seed,
                    deadline_version=issued.deadline_version,
                    prefix=request.prefix,
                )
            )

    def _on_advanced(self, event: GenerationAdvanced) -> None:
        request = self.requests.current(event.key, event.attempt)
        if request is None or self.phase is Phase.SPOILT:
            return
        self._report(request, event.from_token, event.chunk)

    def _report(self, request: Request, from_token: int, chunk: Part) -> None:
        request.reported(from_token, chunk)
        progressed = GenerationProgressed(
            engine=self.settings.name,
            key=request.issued.key,
            attempt=request.issued.attempt,
            from_token=from_token,
            chunk=chunk,
            num_tokens=request.num_tokens,
        )
        self._send(PROMPT_SOURCE, progressed)

    def _on_ended(self, event: GenerationEnded) -> None:
        request = self.requests.current(event.key, event.attempt)
        if request is None:
            return
        if self.phase is Phase.SPOILT:
            if request.is_running:  # as far as PromptSource was told, all of it is older than the wrong weights
                self.num_spoilt_tokens += max(0, event.part.num_tokens - request.num_tokens)
                self.requests.interrupt(request, request.response())
            return
        match event.outcome:
            case Cancelled():  # interrupted: it goes on from here under the new weights
                self.requests.interrupt(request, event.part)
                if event.part.num_tokens > request.num_tokens:  # what PromptSource lacks it could never join later
                    self._report(request, request.num_tokens, tail(event.part, request.num_tokens))
            case InfraError():
                self.requests.fail(request, event.part.num_tokens)
                self._close(event)
            case _:
                self.requests.end(request)
                self._pass_on(request.issued, event.parts or (event.part,), event.outcome)
                self._close(event)

    def _pass_on(self, issued: SampleIssued, parts: tuple[Part, ...], outcome: ModelOutcome) -> None:
        sample = Sample(
            key=issued.key,
            attempt=issued.attempt,
            engine=self.settings.name,
            parts=parts,
            outcome=outcome,
            loss=issued.prompt.loss,
        )
        generated = SampleGenerated(
            sample=sample, group_size=issued.group_size, purpose=issued.purpose, prompt=issued.prompt
        )
        self._send(SCORER, generated)

    def _close(self, event: GenerationEnded) -> None:
        closed = GenerationClosed(
            engine=self.settings.name,
            key=event.key,
            attempt=event.attempt,
            outcome=event.outcome,
            num_tokens=event.part.num_tokens,
        )
        self._send(PROMPT_SOURCE, closed)

    def _abort(self, request: Request | None) -> None:
        if request is not None and request.is_running:
            self._out.append(AbortGeneration(request.key, request.issued.attempt))

    # --- weights ----------------------------------------------------------------------------------------------

    def _on_staged(self, manifest: WeightManifest) -> None:
        if self.served is not None and (
            manifest.publish <= self.served.publish or manifest.version < self.served.version
        ):
            self._tell_applied()
        elif self.applying is not None and (
            manifest.publish <= self.applying.publish or manifest.version < self.applying.version
        ):
            pass  # answered when the swap is done
        elif self._staged is not None and self._staged.publish == manifest.publish:
            self._tell_fetched(manifest, self._staged.digest, "")
        elif self._fetching is None:
            self._fetch(manifest)
        else:  # the publisher knows best: also an older one, when the newer has failed elsewhere
            self._wanted = None if self._fetching.publish == manifest.publish else manifest

    def _fetch(self, manifest: WeightManifest) -> None:
        self._fetching, self._wanted = manifest, None
        self._out.append(FetchWeights(manifest))

    def _on_fetched(self, event: WeightsStagedLocally) -> None:
        manifest = self._fetching
        if manifest is None or manifest.publish != event.publish:
            return
        self._fetching = None
        error = event.error
        if not error and event.digest != manifest.digest:
            error = f"the weights fetched have the digest {event.digest}, those exported {manifest.digest}"
        if not error:
            self._staged = manifest
        self._tell_fetched(manifest, event.digest, error)
        if self._wanted is not None:
            self._fetch(self._wanted)

    def _tell_fetched(self, manifest: WeightManifest, digest: str, error: str) -> None:
        fetched = WeightsFetched(
            engine=self.settings.name,
            engine_epoch=self.settings.epoch,
            version=manifest.version,
            publish=manifest.publish,
            digest=digest,
            error=error,
        )
        self._send(WEIGHT_PUBLISHER, fetched)

    def _on_commit(self, event: WeightsCommitted) -> None:
        if self.served is not None and event.publish <= self.served.publish:
            self._tell_applied()
        elif self._staged is not None and self._staged.publish == event.publish:
            self._commit = event
        # Otherwise it was meant for the incarnation before this one: this one has not said that it fetched them.

    def _begin_swap(self) -> None:
        """Go on with a commit whose weights are staged: drain or interrupt if need be, then apply."""
        commit, staged = self._commit, self._staged
        if commit is None or staged is None or staged.publish != commit.publish or not self._is_our_turn:
            return
        if staged.version < self.version:  # staged before the swap to what is served now; engines do not go back
            self._commit = self._staged = None
            self._tell_applied()
            return
        if self.phase is Phase.SERVING and self.requests.num_running:
            match commit.update_mode:
                case UpdateMode.DRAIN:
                    self.phase = Phase.DRAINING
                case UpdateMode.INTERRUPT if not self.settings.retracts:
                    self.phase = Phase.INTERRUPTING
                    self._out.append(InterruptGenerations())
                case UpdateMode.INTERRUPT | UpdateMode.IN_FLIGHT:
                    self._apply(staged, commit)
                    return
        if self.phase is Phase.DRAINING:
            self._interrupt_evaluation()
        if self.phase not in (*BUSY, Phase.CLOSED) and not self.requests.num_running:
            drained = DrainFinished(
                engine=self.settings.name,
                engine_epoch=self.settings.epoch,
                version=commit.version,
                publish=commit.publish,
            )
            self._send(WEIGHT_PUBLISHER, drained)
            self._apply(staged, commit)

    def _apply(self, manifest: WeightManifest, commit: WeightsCommitted) -> None:
        self.phase, self.applying = Phase.APPLYING, manifest
        self._commit = self._staged = None
        self._out.append(ApplyWeights(manifest, commit.update_mode))

    def _on_swapped(self, event: WeightsSwapped) -> None:
        manifest = self.applying
        if manifest is None or manifest.publish != event.publish:
            return
        self.phase, self.served, self.applying = Phase.SERVING, manifest, None
        self.version, self.digest, self.canary_logprobs = event.version, event.digest, event.canary_logprobs
        self._layout, self._checksum = event.layout, event.checksum
        wrong = self._what_is_wrong(manifest)
        self._tell_applied()
        if wrong:
            self._spoil(f"version {event.version}: {wrong}; nothing is passed on")

    def _spoil(self, text: str) -> None:
        """Give up what was loaded: it counts as never served, so that the version before it may be loaded again."""
        self.phase, self.served, self.version = Phase.SPOILT, None, -1
        self._send(SUPERVISOR, NoticeGiven(name=self.settings.name, text=text))
        if self.requests.num_running:
            self._out.append(InterruptGenerations())

    def _what_is_wrong(self, manifest: WeightManifest) -> str:
        if self.digest != manifest.digest:
            return f"the digest of what was loaded is {self.digest}, that of what was exported {manifest.digest}"
        if self.settings.check_canary and manifest.canary is not None:
            difference = self.canary_difference = canary_difference(manifest.canary, self.canary_logprobs)
            if difference > self.settings.canary_tolerance:
                return divergence(manifest.canary) or f"the canary is off by {difference:.3g} of its spread"
        return ""

    def _tell_applied(self) -> None:
        served = self.served
        applied = WeightsApplied(
            engine=self.settings.name,
            engine_epoch=self.settings.epoch,
            version=self.version,
            publish=-1 if served is None else served.publish,
            digest=self.digest,
            canary_logprobs=self.canary_logprobs,
            layout=self._layout,
            checksum=self._checksum,
        )
        self._send(WEIGHT_PUBLISHER, applied)

    def validate(self) -> None:
        """Assert the invariants."""
        self.requests.validate()
        num_running = self.requests.num_running
        assert num_running <= self.num_slots
        assert (self.phase is Phase.APPLYING) == (self.applying is not None)
        assert self.phase not in (Phase.STARTING, *HOLDING_NOTHING) or not num_running
        assert self.settings.takes_turns or self.phase not in HOLDING_NOTHING
