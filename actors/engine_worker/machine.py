"""The EngineWorker: one inference engine, its requests, and the order of generating and taking new weights.

Invariants:

* Not more than ``num_slots`` requests are submitted to the engine; the others wait here, so that a drain waits only for
  what runs.
* A request is submitted only when the engine serves its ``min_version``.
* Between the beginning of a swap and its end nothing is submitted, and under ``drain`` and ``interrupt`` nothing runs
  when it begins.
* A swap whose canary fails ends the use of this engine: nothing that it makes afterwards is passed on.
* A sample leaves once: as ``SampleGenerated``, or as a failure that PromptSource hears of, or cancelled by settlement.

| state | leaves it |
|---|---|
| ``starting`` | ``EngineOpened`` → ``serving`` |
| ``serving`` | a commit of staged weights → ``draining``, ``interrupting`` or ``applying`` |
| ``draining``, ``interrupting`` | the last running request ends → ``applying`` |
| ``applying`` | ``WeightsSwapped`` → ``serving``, or ``spoilt`` when the canary fails |
| ``spoilt`` | never: the WeightPublisher has this engine replaced |

| waits for | who ends it |
|---|---|
| the engine to open | its backend; the supervisor's start deadline |
| running requests | the engine; the length limit, and PromptSource's lease deadline |
| weights to be fetched, swapped | its backend; the WeightPublisher's stage and commit deadlines |
| a version that serves ``min_version`` | the WeightPublisher, which stages the newest on every engine |
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, assert_never, final

import msgspec

from penstock.actors.canary import canary_difference
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
        self._fetching: WeightManifest | None = None
        self._staged: WeightManifest | None = None
        self._wanted: WeightManifest | None = None
        """Staged by the publisher while another fetch was running."""
        self._commit: WeightsCommitted | None = None
        self._applying: WeightManifest | None = None
        self._floor = 0
        self._above: frozenset[int] = frozenset()
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
                self.phase, self.num_slots = Phase.SERVING, event.num_slots
                ready = EngineReady(
                    engine=self.settings.name, engine_epoch=self.settings.epoch, num_slots=event.num_slots
                )
                self._send(PROMPT_SOURCE, ready)
                self._send(WEIGHT_PUBLISHER, ready)
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

    # --- requests ---------------------------------------------------------------------------------------------

    def _is_settled(self, group_id: int) -> bool:
        return group_id < self._floor or group_id in self._above

    def _on_issued(self, event: SampleIssued) -> None:
        if self._is_settled(event.key.group_id):
            return
        known = self.requests.get(event.key)
        if known is not None:
            if event.attempt <= known.issued.attempt:
                return
            self._drop(event.key)  # issued again: PromptSource goes on from what it knows
        self.failed.pop(event.key, None)
        num_tokens = 0 if event.prefix is None else event.prefix.num_tokens
        self.requests[event.key] = Request(event, prefix=event.prefix, num_tokens=num_tokens)

    def _submit(self) -> None:
        """Give waiting requests to the engine while it serves and has slots, in the order of their arrival."""
        if self.phase is not Phase.SERVING or len(self._running) >= self.num_slots:
            return
        if len(self._running) == len(self.requests):
            return
        for key, request in self.requests.items():
            if len(self._running) >= self.num_slots:
                return
            if request.is_running or request.issued.min_version > self.version:
                continue
            request.is_running = True
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
        request.num_tokens = event.from_token + event.chunk.num_tokens
        self._send(
            PROMPT_SOURCE,
            GenerationProgressed(
                engine=self.settings.name,
                key=event.key,
                attempt=event.attempt,
                from_token=event.from_token,
                chunk=event.chunk,
                num_tokens=request.num_tokens,
            ),
        )

    def _on_ended(self, event: GenerationEnded) -> None:
        request = self._current(event.key, event.attempt)
        if request is None or self.phase is Phase.SPOILT:
            return
        self._running.discard(event.key)
        request.is_running = False
        match event.outcome:
            case Cancelled():  # interrupted: it goes on from here under the new weights
                request.prefix, request.num_tokens = event.part, event.part.num_tokens
            case InfraError():
                del self.requests[event.key]
                self.failed[event.key] = HeldLease(event.key, event.attempt, LeaseStage.FAILED, event.part.num_tokens)
                self._close(event)
            case _:
                del self.requests[event.key]
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
        if request.is_running:
            self._running.discard(key)
            self._out.append(AbortGeneration(key, request.issued.attempt))

    def _on_settled(self, state: SettledState) -> None:
        self._floor, self._above = state.floor, frozenset(state.above)
        for key in [key for key in self.requests if self._is_settled(key.group_id)]:
            self._drop(key)
        for key in [key for key in self.failed if self._is_settled(key.group_id)]:
            del self.failed[key]

    # --- weights ----------------------------------------------------------------------------------------------

    def _on_staged(self, manifest: WeightManifest) -> None:
        if self.served is not None and manifest.publish <= self.served.publish:
            self._tell_applied()
        elif self._applying is not None and manifest.publish <= self._applying.publish:
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
        manifest, self._fetching = self._fetching, None
        if manifest is None or manifest.publish != event.publish:
            return
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
        self.phase, self._applying = Phase.APPLYING, manifest
        self._commit = self._staged = None
        self._out.append(ApplyWeights(manifest, commit.update_mode))

    def _on_swapped(self, event: WeightsSwapped) -> None:
        manifest, self._applying = self._applying, None
        if manifest is None or manifest.publish != event.publish:
            return
        self.phase, self.served = Phase.SERVING, manifest
        self.version, self.digest, self.canary_logprobs = event.version, event.digest, event.canary_logprobs
        if self.settings.check_canary and manifest.canary is not None:
            difference = canary_difference(manifest.canary, event.canary_logprobs)
            if difference > self.settings.canary_tolerance:
                self.phase = Phase.SPOILT
                text = f"the canary of version {event.version} is off by {difference:.3g} nats; nothing is passed on"
                self._send(SUPERVISOR, NoticeGiven(name=self.settings.name, text=text))
        self._tell_applied()

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
        assert not (self.requests.keys() & self.failed.keys())
        assert (self.phase is Phase.APPLYING) == (self._applying is not None)
        if self.phase is Phase.STARTING:
            assert not running
