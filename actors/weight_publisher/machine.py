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

from typing import TYPE_CHECKING, assert_never, final

from penstock.actors.canary import canary_difference
from penstock.actors.weight_publisher.engines import EngineTable, Phase
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
    from penstock.actors.weight_publisher.engines import EngineState
    from penstock.actors.weight_publisher.settings import WeightPublisherSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import WeightPublisherEvent


@final
class WeightPublisher:
    """The WeightPublisher's state machine."""

    def __init__(self, settings: WeightPublisherSettings) -> None:
        self.settings = settings
        self.engines = EngineTable()
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
        self._touched: dict[str, None] = {}
        """Engines that may have something to do next."""
        self._serving_changed = False
        """Since PromptSource was told."""
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        return "idle" if all(e.phase is Phase.IDLE for e in self.engines.by_name.values()) else "publishing"

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
                engine = self.engines.live(event.engine, event.engine_epoch)
                if engine is not None and engine.phase is Phase.COMMITTING and engine.takes(event.publish):
                    self._out.append(StartTimer(engine.name, self.settings.commit_timeout_s))
            case EngineReady():
                engine = self.engines.live(event.engine, event.engine_epoch)
                if engine is not None and engine.phase is Phase.STARTING:
                    self._turn(engine, Phase.IDLE)
            case EngineJoined():
                self._on_joined(event)
            case EngineLost():
                engine = self.engines.by_name.get(event.name)
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

    def _turn(self, engine: EngineState, phase: Phase, target: WeightsExported | None = None) -> None:
        self.engines.turn(engine, phase, target)
        if phase in (Phase.IDLE, Phase.STAGED):
            self._touched[engine.name] = None

    def _touch_all(self) -> None:
        self._touched = dict.fromkeys(self.engines.by_name)

    def _on_joined(self, event: EngineJoined) -> None:
        engine = self.engines.by_name.get(event.name)
        if engine is not None:
            if engine.epoch >= event.epoch:
                return
            self._drop(engine)
        self.engines.join(event.name, event.epoch)

    def _drop(self, engine: EngineState) -> None:
        self.engines.drop(engine)
        self._serving_changed = True
        self._out.append(StopTimer(engine.name))
        self._free_canary(engine.name)

    def _free_canary(self, name: str) -> None:
        for publish in [publish for publish, canary in self._canaries.items() if canary == name]:
            del self._canaries[publish]
            self._touch_all()

    def _on_exported(self, event: WeightsExported) -> None:
        if self.latest is None or event.manifest.publish > self.latest.manifest.publish:
            self.latest = event
            self._exports[event.manifest.publish] = event
            self._touch_all()
            self._forget_old()

    def _on_fetched(self, event: WeightsFetched) -> None:
        engine = self.engines.live(event.engine, event.engine_epoch)
        if engine is None or engine.phase is not Phase.STAGING or not engine.takes(event.publish):
            return
        assert engine.target is not None
        if not event.error and event.digest == engine.target.manifest.digest:
            engine.num_fetch_errors = 0
            self._turn(engine, Phase.STAGED, engine.target)
            self._out.append(StopTimer(engine.name))
            return
        superseded = engine.target is not self.latest
        self._turn(engine, Phase.IDLE)  # again, with the newest
        self._out.append(StopTimer(engine.name))
        if not superseded:
            engine.num_fetch_errors += 1
            if engine.num_fetch_errors > self.settings.max_fetch_retries:
                self._quarantine(engine, f"cannot fetch version {event.version}: {event.error or 'wrong digest'}")

    def _on_applied(self, event: WeightsApplied) -> None:
        engine = self.engines.live(event.engine, event.engine_epoch)
        if engine is None or event.publish < engine.publish:
            return
        export = self._exports.get(event.publish)
        if export is None:
            # Served before this publisher was there: it is not known to be whole, so nothing builds on it.
            return
        if engine.takes(event.publish):  # also while it is staging: it has served them before this publisher was there
            self._out.append(StopTimer(engine.name))
            self._turn(engine, Phase.IDLE)
        wrong = self._what_is_wrong(export.manifest, event)
        if wrong:
            self._on_wrong(engine, export.manifest, wrong)
            return
        self.engines.serves(engine, event.version, event.publish)
        self._serving_changed = True
        if event.publish not in self._passed:
            self._passed.add(event.publish)
            self._touch_all()
        self._num_failures.pop(event.version, None)
        self._canaries.pop(event.publish, None)

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
        engine = self.engines.by_name.get(name)
        if engine is None or engine.phase not in (Phase.STAGING, Phase.COMMITTING) or engine.target is None:
            return
        version = engine.target.manifest.version
        doing = "fetching" if engine.phase is Phase.STAGING else "taking"
        self._quarantine(engine, f"late with {doing} version {version}")

    def _quarantine(self, engine: EngineState, cause: str) -> None:
        self._turn(engine, Phase.QUARANTINED)
        self._serving_changed = True
        self._out.append(StopTimer(engine.name))
        self._free_canary(engine.name)
        self._out.append(ReplaceActor(engine.name, engine.epoch, cause))
        self._out.append(
            Send(SUPERVISOR, NoticeGiven(name=WEIGHT_PUBLISHER, text=f"{engine.name} is replaced: {cause}"))
        )

    # --- what follows from the state --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Stage and commit what can be."""
        touched, self._touched = self._touched, {}
        if self.latest is None:
            return
        for engine in [self.engines.by_name[name] for name in touched if name in self.engines.by_name]:
            if engine.phase is Phase.IDLE and engine.lacks(self.latest.manifest):
                self._turn(engine, Phase.STAGING, self.latest)
                self._out.append(Send(engine.name, WeightsStaged(manifest=self.latest.manifest)))
                self._out.append(StartTimer(engine.name, self.settings.stage_timeout_s))
            if engine.phase is Phase.STAGED and engine.target is not None:
                self._commit(engine, engine.target)

    def _commit(self, engine: EngineState, export: WeightsExported) -> None:
        manifest = export.manifest
        has_passed = manifest.publish in self._passed
        if not has_passed and self._canaries.setdefault(manifest.publish, engine.name) != engine.name:
            return  # another engine goes first
        self._turn(engine, Phase.COMMITTING, export)
        committed = WeightsCommitted(version=manifest.version, publish=manifest.publish, update_mode=export.update_mode)
        drains = export.update_mode is UpdateMode.DRAIN
        timeout_s = self.settings.drain_timeout_s if drains else self.settings.commit_timeout_s
        self._out.append(Send(engine.name, committed))
        self._out.append(StartTimer(engine.name, timeout_s))

    def _announce(self) -> None:
        """Announce the newest version that enough engines serve. PromptSource also hears who serves what once no engine
        is on its way: with a thousand engines it would otherwise hear of each of a thousand swaps."""
        newest = self.engines.served_by(self.settings.announce_fraction)
        is_new = newest > self.announced
        if not is_new and (self.engines.num_moving or not self._serving_changed or self.announced < 0):
            return
        self._serving_changed = False
        self.announced = max(self.announced, newest)
        ready = self.engines.ready()
        event = VersionAnnounced(
            version=self.announced,
            publish=max((e.publish for e in ready if e.version <= self.announced), default=-1),
            serving=tuple(ServingEngine(e.name, e.version) for e in ready if e.version >= 0),
        )
        if event != self._told and event.serving:
            self._told = event
            self._out.append(Send(PROMPT_SOURCE, event))
            if is_new:
                self._out.extend((Send(BUFFER, event), Send(LEARNER, event)))

    def _forget_old(self) -> None:
        """Drop exports that no engine serves or takes any more."""
        used = {e.publish for e in self.engines.by_name.values()}
        used |= {e.target.manifest.publish for e in self.engines.by_name.values() if e.target is not None}
        latest = -1 if self.latest is None else self.latest.manifest.publish
        for publish in [publish for publish in self._exports if publish not in used and publish != latest]:
            del self._exports[publish]
            self._passed.discard(publish)

    def validate(self) -> None:
        """Assert the invariants."""
        self.engines.validate()
        for engine in self.engines.by_name.values():
            if engine.phase is Phase.COMMITTING and engine.target is not None:
                publish = engine.target.manifest.publish
                assert publish in self._passed or self._canaries.get(publish) == engine.name, engine
        for publish, canary in self._canaries.items():
            assert canary in self.engines.by_name, (publish, canary)
