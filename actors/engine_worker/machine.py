"""The EngineWorker: one inference engine, its requests, and the order of generating and taking new weights.

Invariants:

* Not more than ``num_slots`` requests are submitted to the engine; the others wait here, so that a drain waits only for
  what runs.
* A request is submitted only when the engine serves its ``min_version``.
* Between the beginning of a swap and its end nothing is submitted, and under ``drain`` and ``interrupt`` nothing runs
  when it begins.
* A swap whose digest or canary is wrong ends the use of this engine: nothing that it makes afterwards is passed on.
* An attempt that is over here is not begun again, however often it is issued.
* A sample leaves once: as ``SampleGenerated``, or as a failure that PromptSource hears of, or cancelled by settlement.

| state | leaves it |
|---|---|
| ``starting`` | ``EngineOpened`` → ``serving`` |
| ``serving`` | a commit of staged weights → ``draining``, ``interrupting`` or ``applying`` |
| ``draining``, ``interrupting`` | the last running request ends → ``applying`` |
| ``applying`` | ``WeightsSwapped`` → ``serving``, or ``spoilt`` when digest or canary are wrong |
| ``spoilt`` | never: the WeightPublisher has this engine replaced |

| waits for | who ends it |
|---|---|
| the engine to open | its backend; the supervisor's start deadline |
| running requests | the engine; the length limit, and PromptSource's lease deadline |
| weights to be fetched, swapped | its backend; the WeightPublisher's stage and commit deadlines |
| a version that serves ``min_version`` | the WeightPublisher, which stages the newest on every engine |
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, assert_never, final

import msgspec

from penstock.actors.canary import canary_difference
from penstock.actors.parts import tail
from penstock.actors.settled import KnownSettled
from penstock.messages.commands import (
    AbortGeneration,
    ApplyWeights,
    FetchWeights,
    Generate,
    InterruptGenerations,
    OpenEngine,
    Send,
)
from penstock.messages.flow import (
    GenerationClosed,
    GenerationProgressed,
    SampleGenerated,
    SampleIssued,
    SamplesSettled,
)
from penstock.messages.local import (
    EngineOpened,
    GenerationAdvanced,
    GenerationEnded,
    Started,
    TimerFired,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.membership import HeldLease, LeaseStage
from penstock.messages.names import PROMPT_SOURCE, SCORER, SUPERVISOR, WEIGHT_PUBLISHER
from penstock.messages.samples import Cancelled, InfraError, Part, Sample, SampleKey
from penstock.messages.training import Activity, NoticeGiven, UpdateMode
from penstock.messages.weights import (
    DrainFinished,
    EngineReady,
    WeightManifest,
    WeightsApplied,
    WeightsCommitted,
    WeightsFetched,
    WeightsStaged,
)

if TYPE_CHECKING:
    from penstock.actors.engine_worker.settings import EngineWorkerSettings
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.flow import SettledState
    from penstock.messages.inboxes import EngineWorkerEvent
    from penstock.messages.samples import ModelOutcome


class Phase(StrEnum):
    """State of the engine."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    INTERRUPTING = "interrupting"
    APPLYING = "applying"
    SPOILT = "spoilt"


class Request(msgspec.Struct):
    """One sample at this engine."""

    issued: SampleIssued
    is_running: bool = False
    prefix: Part | None = None
    num_tokens: int = 0
    """That PromptSource knows of."""


@final
class EngineWorker:
    """The EngineWorker's state machine."""

    def __init__(self, settings: EngineWorkerSettings) -> None:
        self.settings = settings
        self.phase = Phase.STARTING
        self.num_slots = 0
        self.version = -1
        self.served: WeightManifest | None = None
        self.digest = ""
        """Of what the engine loaded, as it computed it."""
        self.canary_logprobs = b""
        """Of the canary of what it serves."""
        self.requests: dict[SampleKey, Request] = {}
        self.failed: dict[SampleKey, HeldLease] = {}
        """Ended as ``infra_error`` here; kept for the census until settled or issued again."""
        self._running: set[SampleKey] = set()
        self._waiting: OrderedDict[SampleKey, None] = OrderedDict()
        """Requests that do not run, in the order in which they are submitted."""
        self._ended: dict[SampleKey, int] = {}
        """The last attempt that is over here, until its group is settled."""
        self._fetching: WeightManifest | None = None
        self._staged: WeightManifest | None = None
        self._wanted: WeightManifest | None = None
        """Staged by the publisher while another fetch was running."""
        self._commit: WeightsCommitted | None = None
        self.applying: WeightManifest | None = None
        self._settled = KnownSettled()
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
        if self.phase is Phase.SPOILT:
            return Activity.DOWN
        if self._running:
            return Activity.WORKING
        if self.phase is Phase.APPLYING:
            return Activity.APPLYING_WEIGHTS
        if self.requests or self.version < 0:
            return Activity.WAITING_FOR_WEIGHTS
        return Activity.WAITING_FOR_DEMAND

    @property
    def occupancy(self) -> float:
        """Running requests ÷ slots."""
        return len(self._running) / self.num_slots if self.num_slots else 0.0

    def leases(self) -> tuple[HeldLease, ...]:
        """Requests that wait or run here, and those that failed here."""
        held = [
            HeldLease(
                key,
                request.issued.attempt,
                LeaseStage.RUNNING if request.is_running else LeaseStage.WAITING,
                request.num_tokens,
            )
            for key, request in self.requests.items()
        ]
        return (*held, *self.failed.values())

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
            case SamplesSettled():
                self._on_settled(event.settled)
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
            case Started():
                self._out.append(OpenEngine())
            case TimerFired():
                pass
            case _:
                assert_never(event)
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

    # --- requests ---------------------------------------------------------------------------------------------

    def _on_issued(self, event: SampleIssued) -> None:
        key = event.key
        if key.group_id in self._settled or event.attempt <= self._ended.get(key, -1):
            return
        known = self.requests.get(key)
        if known is not None:
            if event.attempt <= known.issued.attempt:
                return
            self._drop(key)  # issued again: PromptSource goes on from what it knows
        self.failed.pop(key, None)
        num_tokens = 0 if event.prefix is None else event.prefix.num_tokens
        self.requests[key] = Request(event, prefix=event.prefix, num_tokens=num_tokens)
        self._waiting[key] = None

    def _submit(self) -> None:
        """Give waiting requests to the engine while it serves and has slots."""
        if self.phase is not Phase.SERVING or not self._waiting or len(self._running) >= self.num_slots:
            return
        servable = (key for key in self._waiting if self.requests[key].issued.min_version <= self.version)
        for key in list(islice(servable, self.num_slots - len(self._running))):
            request = self.requests[key]
            request.is_running = True
            del self._waiting[key]
            self._running.add(key)
            issued = request.issued
            self._out.append(
                Generate(
                    key=key,
                    attempt=issued.attempt,
                    purpose=issued.purpose,
                    prompt=issued.prompt,
                    seed=issued.seed,
                    deadline_version=issued.deadline_version,
                    prefix=request.prefix,
                )
            )

    def _current(self, key: SampleKey, attempt: int) -> Request | None:
        request = self.requests.get(key)
        return request if request is not None and request.issued.attempt == attempt else None

    def _on_advanced(self, event: GenerationAdvanced) -> None:
        request = self._current(event.key, event.attempt)
        if request is None or self.phase is Phase.SPOILT:
            return
        self._report(request, event.from_token, event.chunk)

    def _report(self, request: Request, from_token: int, chunk: Part) -> None:
        request.num_tokens = from_token + chunk.num_tokens
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
        request = self._current(event.key, event.attempt)
        if request is None or self.phase is Phase.SPOILT:
            return
        self._running.discard(event.key)
        request.is_running = False
        match event.outcome:
            case Cancelled():  # interrupted: it goes on from here under the new weights
                request.prefix = event.part
                if event.part.num_tokens > request.num_tokens:  # what PromptSource lacks it could never join later
                    self._report(request, request.num_tokens, tail(event.part, request.num_tokens))
                self._waiting[event.key] = None
                self._waiting.move_to_end(event.key, last=False)
            case InfraError():
                self.failed[event.key] = HeldLease(event.key, event.attempt, LeaseStage.FAILED, event.part.num_tokens)
                self._close(event)
            case _:
                self._pass_on(request.issued, event.part, event.outcome)
                self._close(event)

    def _pass_on(self, issued: SampleIssued, part: Part, outcome: ModelOutcome) -> None:
        sample = Sample(
            key=issued.key, attempt=issued.attempt, engine=self.settings.name, parts=(part,), outcome=outcome
        )
        generated = SampleGenerated(
            sample=sample, group_size=issued.group_size, purpose=issued.purpose, prompt=issued.prompt
        )
        self._send(SCORER, generated)

    def _close(self, event: GenerationEnded) -> None:
        del self.requests[event.key]
        self._ended[event.key] = event.attempt
        closed = GenerationClosed(
            engine=self.settings.name,
            key=event.key,
            attempt=event.attempt,
            outcome=event.outcome,
            num_tokens=event.part.num_tokens,
        )
        self._send(PROMPT_SOURCE, closed)

    def _drop(self, key: SampleKey) -> None:
        request = self.requests.pop(key)
        self._waiting.pop(key, None)
        if request.is_running:
            self._running.discard(key)
            self._out.append(AbortGeneration(key, request.issued.attempt))

    def _on_settled(self, state: SettledState) -> None:
        if not self._settled.update(state):
            return
        for key in [key for key in self.requests if key.group_id in self._settled]:
            self._drop(key)
        for key in [key for key in self._ended if key.group_id in self._settled]:
            del self._ended[key]
            self.failed.pop(key, None)

    # --- weights ----------------------------------------------------------------------------------------------

    def _on_staged(self, manifest: WeightManifest) -> None:
        if self.served is not None and (
            manifest.publish <= self.served.publish or manifest.version < self.served.version
        ):
            self._tell_applied()
        elif self.applying is not None and manifest.publish <= self.applying.publish:
            pass  # answered when the swap is done
        elif self._staged is not None and self._staged.publish == manifest.publish:
            self._tell_fetched(manifest, self._staged.digest, "")
        elif self._fetching is None:
            self._fetch(manifest)
        elif self._fetching.publish < manifest.publish:
            self._wanted = manifest

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
        if commit is None or staged is None or staged.publish != commit.publish:
            return
        if self.phase is Phase.SERVING and self._running:
            match commit.update_mode:
                case UpdateMode.DRAIN:
                    self.phase = Phase.DRAINING
                case UpdateMode.INTERRUPT:
                    self.phase = Phase.INTERRUPTING
                    self._out.append(InterruptGenerations())
                case UpdateMode.IN_FLIGHT:
                    self._apply(staged, commit)
                    return
        if self.phase in (Phase.SERVING, Phase.DRAINING, Phase.INTERRUPTING) and not self._running:
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
        wrong = self._what_is_wrong(manifest)
        if wrong:
            self.phase = Phase.SPOILT
            text = f"version {event.version}: {wrong}; nothing is passed on"
            self._send(SUPERVISOR, NoticeGiven(name=self.settings.name, text=text))
        self._tell_applied()

    def _what_is_wrong(self, manifest: WeightManifest) -> str:
        if self.digest != manifest.digest:
            return f"the digest of what was loaded is {self.digest}, that of what was exported {manifest.digest}"
        if self.settings.check_canary and manifest.canary is not None:
            difference = canary_difference(manifest.canary, self.canary_logprobs)
            if difference > self.settings.canary_tolerance:
                return f"the canary is off by {difference:.3g} nats"
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
        )
        self._send(WEIGHT_PUBLISHER, applied)

    def validate(self) -> None:
        """Assert the invariants."""
        running = {key for key, request in self.requests.items() if request.is_running}
        assert running == self._running, (running, self._running)
        assert self.phase is Phase.STARTING or len(running) <= self.num_slots
        assert self._waiting.keys() == self.requests.keys() - running
        assert not (self.requests.keys() & self.failed.keys())
        assert self.failed.keys() <= self._ended.keys()
        assert (self.phase is Phase.APPLYING) == (self.applying is not None)
        if self.phase is Phase.STARTING:
            assert not running
