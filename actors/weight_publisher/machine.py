"""The WeightPublisher: which engine serves which version, and when a version is safe to announce.

Invariants:

* An engine is told to commit a publish only after it has fetched it whole, and only if an engine has passed the canary
  with it or this one is the canary (there is one canary for each publish).
* The announced version never goes down. It is served by ``announce_fraction`` of the engines that are ready.
* An engine that is late or wrong is handed to the supervisor once and takes part in nothing until it has returned.

Phases of an engine:

| phase | leaves it |
|---|---|
| ``starting`` | ``EngineReady`` → ``idle`` |
| ``idle`` | there are newer weights than it serves → ``staging`` |
| ``staging`` | ``WeightsFetched`` → ``staged``; on an error again ``staging``, or ``quarantined`` |
| ``staged`` | the canary has passed, or it is the canary → ``committing`` |
| ``committing`` | ``WeightsApplied`` → ``idle``, or ``quarantined`` when digest or canary are wrong |
| ``quarantined`` | ``EngineLost`` and ``EngineJoined``: a new incarnation starts over |

| waits for | who ends it |
|---|---|
| a publish | the Learner |
| an engine to fetch, to be idle, to swap | the engine; a timer for each, at whose end it is replaced |
| the canary | its engine; the same timers, then another engine becomes the canary |
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never, final

import msgspec

from penstock.actors.canary import canary_difference
from penstock.messages.commands import FailRun, ReplaceActor, Send, StartTimer, StopTimer
from penstock.messages.local import Started, TimerFired
from penstock.messages.membership import EngineJoined, EngineLost
from penstock.messages.names import BUFFER, LEARNER, PROMPT_SOURCE, SUPERVISOR, WEIGHT_PUBLISHER
from penstock.messages.training import NoticeGiven, StepFinished, UpdateMode
from penstock.messages.weights import (
    DrainFinished,
    EngineReady,
    ServingEngine,
    VersionAnnounced,
    WeightManifest,
    WeightsApplied,
    WeightsCommitted,
    WeightsExported,
    WeightsFetched,
    WeightsStaged,
)

if TYPE_CHECKING:
    from penstock.actors.weight_publisher.settings import WeightPublisherSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import WeightPublisherEvent


ROUNDING: Final = 1e-9
"""0.55 · 20 is a little more than 11 in floating point."""


class Phase(StrEnum):
    """What the publisher waits for from one engine."""

    STARTING = "starting"
    IDLE = "idle"
    STAGING = "staging"
    STAGED = "staged"
    COMMITTING = "committing"
    QUARANTINED = "quarantined"


class EngineState(msgspec.Struct):
    """One engine incarnation."""

    name: str
    epoch: int
    phase: Phase = Phase.STARTING
    version: int = -1
    publish: int = -1
    """What it serves; −1: nothing yet."""
    target: WeightsExported | None = None
    """What it is staging or committing."""
    num_fetch_errors: int = 0

    def takes(self, publish: int) -> bool:
        """Whether this is what it is staging or committing."""
        return self.target is not None and self.target.manifest.publish == publish

    def lacks(self, manifest: WeightManifest) -> bool:
        """Whether these are newer than what it serves. A learner that goes over old batches again publishes old
        versions under new numbers; engines do not go back to them."""
        return self.publish < manifest.publish and self.version <= manifest.version


@final
class WeightPublisher:
    """The WeightPublisher's state machine."""

    def __init__(self, settings: WeightPublisherSettings) -> None:
        self.settings = settings
        self.engines: dict[str, EngineState] = {}
        self.latest: WeightsExported | None = None
        self.announced = -1
        self.learner_version = 0
        self._exports: dict[int, WeightsExported] = {}
        """By publish number: the newest, and older ones that an engine still serves or takes."""
        self._passed: set[int] = set()
        """Publishes with which an engine has passed the canary."""
        self._canaries: dict[int, str] = {}
        self._num_failures: dict[int, int] = {}
        self._told: VersionAnnounced | None = None
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        return "idle" if all(e.phase is Phase.IDLE for e in self.engines.values()) else "publishing"

    def leases(self) -> tuple[()]:
        """The publisher holds no samples."""
        return ()

    def handle(self, event: WeightPublisherEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case WeightsExported():
                self._on_exported(event)
            case WeightsFetched():
                self._on_fetched(event)
            case WeightsApplied():
                self._on_applied(event)
            case DrainFinished():
                engine = self._engine(event.engine, event.engine_epoch)
                if engine is not None and engine.phase is Phase.COMMITTING and engine.takes(event.publish):
                    self._out.append(StartTimer(engine.name, self.settings.commit_timeout_s))
            case EngineReady():
                engine = self._engine(event.engine, event.engine_epoch)
                if engine is not None and engine.phase is Phase.STARTING:
                    engine.phase = Phase.IDLE
            case EngineJoined():
                self._on_joined(event)
            case EngineLost():
                engine = self.engines.get(event.name)
                if engine is not None and engine.epoch == event.epoch:
                    self._drop(engine)
            case StepFinished():
                self.learner_version = max(self.learner_version, event.version)
            case TimerFired():
                self._on_late(event.key)
            case Started():
                pass
            case _:
                assert_never(event)
        self._advance()
        self._announce()
        out, self._out = self._out, []
        return out

    # --- events -----------------------------------------------------------------------------------------------

    def _engine(self, name: str, epoch: int) -> EngineState | None:
        """The live incarnation, if that is the one meant and it is not given up."""
        engine = self.engines.get(name)
        if engine is None or engine.epoch != epoch or engine.phase is Phase.QUARANTINED:
            return None
        return engine

    def _on_joined(self, event: EngineJoined) -> None:
        engine = self.engines.get(event.name)
        if engine is not None:
            if engine.epoch >= event.epoch:
                return
            self._drop(engine)
        self.engines[event.name] = EngineState(event.name, event.epoch)

    def _drop(self, engine: EngineState) -> None:
        del self.engines[engine.name]
        self._out.append(StopTimer(engine.name))
        self._free_canary(engine.name)

    def _free_canary(self, name: str) -> None:
        for publish in [publish for publish, canary in self._canaries.items() if canary == name]:
            del self._canaries[publish]

    def _on_exported(self, event: WeightsExported) -> None:
        if self.latest is None or event.manifest.publish > self.latest.manifest.publish:
            self.latest = event
            self._exports[event.manifest.publish] = event

    def _on_fetched(self, event: WeightsFetched) -> None:
        engine = self._engine(event.engine, event.engine_epoch)
        if engine is None or engine.phase is not Phase.STAGING or not engine.takes(event.publish):
            return
        assert engine.target is not None
        if not event.error and event.digest == engine.target.manifest.digest:
            engine.phase, engine.num_fetch_errors = Phase.STAGED, 0
            self._out.append(StopTimer(engine.name))
            return
        superseded = engine.target is not self.latest
        engine.phase, engine.target = Phase.IDLE, None  # again, with the newest
        self._out.append(StopTimer(engine.name))
        if not superseded:
            engine.num_fetch_errors += 1
            if engine.num_fetch_errors > self.settings.max_fetch_retries:
                self._quarantine(engine, f"cannot fetch version {event.version}: {event.error or 'wrong digest'}")

    def _on_applied(self, event: WeightsApplied) -> None:
        engine = self._engine(event.engine, event.engine_epoch)
        if engine is None or event.publish < engine.publish:
            return
        export = self._exports.get(event.publish)
        if export is None:
            # Served before this publisher was there: it is not known to be whole, so nothing builds on it.
            return
        if engine.takes(event.publish):  # also while it is staging: it has served them before this publisher was there
            self._out.append(StopTimer(engine.name))
            engine.phase, engine.target = Phase.IDLE, None
        wrong = self._what_is_wrong(export.manifest, event)
        if wrong:
            self._on_wrong(engine, export.manifest, wrong)
            return
        engine.version, engine.publish = event.version, event.publish
        self._passed.add(event.publish)
        self._num_failures.pop(event.version, None)
        self._canaries.pop(event.publish, None)
        self._forget_old()

    def _what_is_wrong(self, manifest: WeightManifest, event: WeightsApplied) -> str:
        if event.digest != manifest.digest:
            return f"it loaded the digest {event.digest}, {manifest.digest} was exported"
        if self.settings.check_canary and manifest.canary is not None:
            difference = canary_difference(manifest.canary, event.canary_logprobs)
            if difference > self.settings.canary_tolerance:
                return f"its canary is off by {difference:.3g} nats, {self.settings.canary_tolerance:g} are allowed"
        return ""

    def _on_wrong(self, engine: EngineState, manifest: WeightManifest, wrong: str) -> None:
        self._quarantine(engine, f"version {manifest.version}: {wrong}")
        failures = self._num_failures[manifest.version] = self._num_failures.get(manifest.version, 0) + 1
        if manifest.publish not in self._passed and failures >= self.settings.max_failed_publishes:
            self._out.append(
                FailRun(f"version {manifest.version} failed on {failures} engines in a row, the last: {wrong}")
            )

    def _on_late(self, name: str) -> None:
        engine = self.engines.get(name)
        if engine is None or engine.phase not in (Phase.STAGING, Phase.COMMITTING) or engine.target is None:
            return
        version = engine.target.manifest.version
        doing = "fetching" if engine.phase is Phase.STAGING else "taking"
        self._quarantine(engine, f"late with {doing} version {version}")

    def _quarantine(self, engine: EngineState, cause: str) -> None:
        engine.phase, engine.target = Phase.QUARANTINED, None
        self._out.append(StopTimer(engine.name))
        self._free_canary(engine.name)
        self._out.append(ReplaceActor(engine.name, engine.epoch, cause))
        self._out.append(
            Send(SUPERVISOR, NoticeGiven(name=WEIGHT_PUBLISHER, text=f"{engine.name} is replaced: {cause}"))
        )

    # --- what follows from the state --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Stage and commit what can be; idempotent."""
        if self.latest is None:
            return
        for engine in self.engines.values():
            if engine.phase is Phase.IDLE and engine.lacks(self.latest.manifest):
                engine.phase, engine.target = Phase.STAGING, self.latest
                self._out.append(Send(engine.name, WeightsStaged(manifest=self.latest.manifest)))
                self._out.append(StartTimer(engine.name, self.settings.stage_timeout_s))
            if engine.phase is Phase.STAGED and engine.target is not None:
                self._commit(engine, engine.target)

    def _commit(self, engine: EngineState, export: WeightsExported) -> None:
        manifest = export.manifest
        has_passed = manifest.publish in self._passed
        if not has_passed and self._canaries.setdefault(manifest.publish, engine.name) != engine.name:
            return  # another engine goes first
        engine.phase = Phase.COMMITTING
        committed = WeightsCommitted(version=manifest.version, publish=manifest.publish, update_mode=export.update_mode)
        drains = export.update_mode is UpdateMode.DRAIN
        timeout_s = self.settings.drain_timeout_s if drains else self.settings.commit_timeout_s
        self._out.append(Send(engine.name, committed))
        self._out.append(StartTimer(engine.name, timeout_s))

    def _announce(self) -> None:
        """Announce the newest version that enough engines serve, and who serves what, when either has changed."""
        ready = [e for e in self.engines.values() if e.phase not in (Phase.STARTING, Phase.QUARANTINED)]
        serving = tuple(ServingEngine(e.name, e.version) for e in ready if e.version >= 0)
        if not serving:
            return
        needed = max(1, math.ceil(self.settings.announce_fraction * len(ready) - ROUNDING))
        versions = sorted((engine.version for engine in serving), reverse=True)
        if len(versions) >= needed:
            self.announced = max(self.announced, versions[needed - 1])
        if self.announced < 0:
            return
        publish = max((e.publish for e in ready if e.version <= self.announced), default=-1)
        event = VersionAnnounced(version=self.announced, publish=publish, serving=serving)
        if event != self._told:
            is_new = self._told is None or self._told.version != event.version
            self._told = event
            self._out.append(Send(PROMPT_SOURCE, event))
            if is_new:
                self._out.extend((Send(BUFFER, event), Send(LEARNER, event)))

    def _forget_old(self) -> None:
        """Drop exports that no engine serves or takes any more."""
        used = {e.publish for e in self.engines.values()}
        used |= {e.target.manifest.publish for e in self.engines.values() if e.target is not None}
        latest = -1 if self.latest is None else self.latest.manifest.publish
        for publish in [publish for publish in self._exports if publish not in used and publish != latest]:
            del self._exports[publish]
            self._passed.discard(publish)

    def validate(self) -> None:
        """Assert the invariants."""
        for engine in self.engines.values():
            moving = engine.phase in (Phase.STAGING, Phase.STAGED, Phase.COMMITTING)
            assert moving == (engine.target is not None), engine
            if engine.phase is Phase.COMMITTING and engine.target is not None:
                publish = engine.target.manifest.publish
                assert publish in self._passed or self._canaries.get(publish) == engine.name, engine
        for publish, canary in self._canaries.items():
            assert canary in self.engines, (publish, canary)
