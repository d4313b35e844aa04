"""The WeightPublisher: which engine serves which version, and when a version is safe to announce.

Invariants:

* An engine is told to commit a publish only after it has fetched it whole, and only if an engine has passed the canary
  with it or this one is the canary (there is one canary for each publish). An engine without weights is none where
  others have some, and is given only what has passed: what it waited for might never be taken by any other, when the
  one that should have is replaced and goes on with something newer.
* An engine that comes when a version is announced counts in no quorum before it serves something, and is no canary
  while another engine can be one: nobody waits for it. One that is to leave takes part in nothing.
* An engine whose lent device was taken back is one that has come and serves nothing, also when its next turn is heard
  of first.
* An engine that is late or wrong is handed to the supervisor once and takes part in nothing until it has returned.
* Engines that can pass weights on are told who has, or fetches, the same (``fan_out.py``).
* A publish that the canary, or two engines one after the other, found wrong has failed: no engine is given it any more.
  Until the Learner has published again the best that an engine has passed is served, by the canary as well, which
  loads it again. Too many in a row end the run.
* An engine that is wrong with what another has passed, or twice in a row, is itself at fault and replaced.

How an engine comes from phase to phase stands in ``phases.py``.

| waits for | who ends it |
|---|---|
| a publish | the Learner |
| an engine's turn on a device that it shares with the learner | the Learner, then as below |
| an engine to open, to fetch, to be idle, to swap | the engine; a timer for each, at whose end it is replaced |
| the canary | its engine; the same timers, then another engine becomes the canary |
| another publish after one that failed | the Learner, which is told until it has heard it |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never, final

import msgspec

from penstock.actors.weight_publisher.announcing import Announcing
from penstock.actors.weight_publisher.canaries import Canaries
from penstock.actors.weight_publisher.engines import EngineTable
from penstock.actors.weight_publisher.exports import ExportTable
from penstock.actors.weight_publisher.fan_out import FanOut
from penstock.actors.weight_publisher.phases import Phase
from penstock.actors.weight_publisher.waiting import publisher_waits
from penstock.messages.base import Metric
from penstock.messages.canary import divergence
from penstock.messages.commands import FailRun, ReplaceActor, Send, StartTimer, StopTimer
from penstock.messages.local import Started, TimerFired
from penstock.messages.membership import EngineJoined, EngineLeaving, EngineLost
from penstock.messages.names import LEARNER, SUPERVISOR, WEIGHT_PUBLISHER
from penstock.messages.training import NoticeGiven, StepFinished, UpdateMode
from penstock.messages.weights import (
    DrainFinished,
    EngineOpening,
    EngineReady,
    PublishFailed,
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
    from penstock.messages.waits import Wait

_IDLE: Final = Phase.IDLE
_STAGED: Final = Phase.STAGED
"""See :data:`penstock.messages.base.LOSSY`."""
_TAKES_NEXT: Final = (_IDLE, _STAGED)
"""Something may follow at once for an engine that has come here."""


@final
class WeightPublisher:
    """The WeightPublisher's state machine."""

    def __init__(self, settings: WeightPublisherSettings) -> None:
        self.settings = settings
        self.engines = EngineTable()
        self.exports = ExportTable()
        self._announcing = Announcing(self.engines, settings.options.announce_fraction)
        self.learner_version = 0
        self.num_failed_publishes = 0
        self.num_quarantines = 0
        self.canaries = Canaries(settings, self.engines, self.exports)
        self._fan_out = FanOut(self.engines, is_tree=settings.options.fan_out == "tree")
        self._touched: dict[str, None] = {}
        """Engines that may have something to do next."""
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        return "idle" if all(e.phase is Phase.IDLE for e in self.engines.by_name.values()) else "publishing"

    @property
    def announced(self) -> int:
        """The newest version that was announced; −1: none."""
        return self._announcing.version

    def leases(self) -> tuple[()]:
        """The publisher holds no samples."""
        return ()

    def waits(self) -> tuple[Wait, ...]:
        """Engines on their way, and a publish for those that have nothing to take."""
        return tuple(publisher_waits(self.engines, self.exports, self.canaries))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Running totals of this incarnation."""
        return (
            Metric("weight_publisher/failed_publishes", self.num_failed_publishes),
            Metric("weight_publisher/quarantines", self.num_quarantines),
            Metric("weight_publisher/detours", self._fan_out.num_detours),
        )

    def handle(self, event: WeightPublisherEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        self.engines.steps.cause = type(event)
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
                    self._out.append(StartTimer(engine.name, self.settings.options.commit_timeout_s))
            case EngineOpening():
                engine = self.engines.live(event.engine, event.engine_epoch)
                if engine is not None and engine.phase is Phase.STARTING:
                    self._out.append(StartTimer(engine.name, self.settings.start_timeout_s))
            case EngineReady():
                self._on_ready(event)
            case EngineJoined():
                self._on_joined(event)
            case EngineLost() | EngineLeaving():
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
        self._out.extend(self._announcing.advance())
        out, self._out = self._out, []
        return out

    # --- events -----------------------------------------------------------------------------------------------

    def _turn(self, engine: EngineState, phase: Phase, target: WeightsExported | None = None) -> None:
        self.engines.turn(engine, phase, target)
        if phase in _TAKES_NEXT:
            self._touched[engine.name] = None

    def _touch_all(self) -> None:
        self._touched = dict.fromkeys(self.engines.by_name)

    def _on_ready(self, event: EngineReady) -> None:
        engine = self.engines.live(event.engine, event.engine_epoch)
        if engine is not None and event.turn > engine.turn:  # what it had before, its device was taken back from
            self._drop(engine)
            self.engines.join(event.engine, event.engine_epoch, is_newcomer=True, turn=event.turn)
            engine = self.engines.live(event.engine, event.engine_epoch)
        if engine is not None and engine.phase is Phase.STARTING and event.num_slots:
            engine.passes_on_at = event.passes_on_at
            self._turn(engine, Phase.IDLE)
            self._out.append(StopTimer(engine.name))

    def _on_joined(self, event: EngineJoined) -> None:
        engine = self.engines.by_name.get(event.name)
        if engine is not None:
            if engine.epoch >= event.epoch:
                return
            self._drop(engine)
        is_newcomer = self.announced >= 0 or event.name in self.settings.lent
        self.engines.join(event.name, event.epoch, is_newcomer=is_newcomer)
        if event.name not in self.settings.share_devices:  # the others say when it is their turn to open
            self._out.append(StartTimer(event.name, self.settings.start_timeout_s))

    def _drop(self, engine: EngineState) -> None:
        self.engines.drop(engine)
        self._out.append(StopTimer(engine.name))
        self._free_canary(engine.name)

    def _free_canary(self, name: str) -> None:
        self.canaries.free(name)
        for engine in self.engines.by_name.values():
            if engine.phase is Phase.STAGED and engine.target is not None and self._is_in_vain(engine, engine.target):
                self._turn(engine, Phase.IDLE)
        self._touch_all()

    def _is_in_vain(self, engine: EngineState, target: WeightsExported) -> bool:
        """Whether what it has fetched passes no more: nobody goes first with it, nor may this engine, as others have
        gone on with something else."""
        publish, canaries = target.manifest.publish, self.canaries
        is_open = canaries.of(publish) is not None or self.exports.has_passed(publish)
        return not is_open and not canaries.can_go_first(engine)

    def _on_exported(self, event: WeightsExported) -> None:
        if self.exports.add(event):
            self._touch_all()
            self.exports.forget_old(self.engines.publishes())

    def _on_fetched(self, event: WeightsFetched) -> None:
        engine = self.engines.live(event.engine, event.engine_epoch)
        if engine is not None:
            for text in self._fan_out.heard(event):
                self._notice(text)
        if engine is None or engine.phase is not Phase.STAGING or not engine.takes(event.publish):
            return
        assert engine.target is not None
        if not event.error and event.digest == engine.target.manifest.digest:
            engine.num_fetch_errors = 0
            self._turn(engine, Phase.STAGED, engine.target)
            self._out.append(StopTimer(engine.name))
            return
        target = engine.target
        self._turn(engine, Phase.IDLE)  # again, with what is to be taken now
        self._out.append(StopTimer(engine.name))
        if self._next_for(engine) is target:
            engine.num_fetch_errors += 1
            if engine.num_fetch_errors > self.settings.max_fetch_retries:
                self._on_unfetchable(engine, target, event.error or "wrong digest")

    def _on_unfetchable(self, engine: EngineState, export: WeightsExported, error: str) -> None:
        manifest = export.manifest
        cause = f"cannot fetch version {manifest.version}: {error}"
        engine.num_fetch_errors = 0
        if export is not self.exports.newest:
            # Weights of a Learner that is gone: they may have gone with it, and that is no fault of the engine.
            self.exports.fails(manifest.publish)
            self._give_back(manifest.publish)
            self._notice(f"{engine.name} {cause}; the Learner's own are awaited")
            return
        self._quarantine(engine, cause)
        if self.exports.unfetchable(manifest.publish) > 1 and not self.exports.has_passed(manifest.publish):
            self._on_failed(engine, manifest, cause)

    def _on_applied(self, event: WeightsApplied) -> None:
        engine = self.engines.live(event.engine, event.engine_epoch)
        if engine is None or event.publish < engine.publish or engine.phase is Phase.STARTING:
            return
        export = self.exports.get(event.publish)
        if export is None:
            self._on_unknown(engine, event)
            return
        if engine.takes(event.publish):  # also while it is staging: it has served them before this publisher was there
            self._out.append(StopTimer(engine.name))
            self._turn(engine, Phase.IDLE)
        wrong = self.canaries.what_is_wrong(export.manifest, event)
        if wrong:
            self._on_wrong(engine, export.manifest, wrong)
            return
        self.engines.serves(engine, event.version, event.publish)
        self.exports.loads(event.publish, event.layout, event.checksum)
        if self.exports.passes(event.publish):
            self.canaries.suspects.clear()
            self._touch_all()
        self.canaries.done(event.publish)

    def _on_unknown(self, engine: EngineState, event: WeightsApplied) -> None:
        """Served since before this publisher was there, or let go when the device of who was to take it was taken back:
        it is not known to be whole, so nothing builds on it. But the engine does not go back behind it, so nothing that
        would be is waited for."""
        engine.said_version = max(engine.said_version, event.version)
        if engine.target is not None and engine.target.manifest.version < event.version:
            self._out.append(StopTimer(engine.name))
            self._turn(engine, Phase.IDLE)

    def _on_wrong(self, engine: EngineState, manifest: WeightManifest, wrong: str) -> None:
        has_passed = self.exports.has_passed(manifest.publish)
        if has_passed or engine.name in self.canaries.suspects:
            self._quarantine(engine, f"version {manifest.version}: {wrong}")
        else:
            self.engines.serves(engine, -1, -1)
            self._free_canary(engine.name)
        if not has_passed:
            self._on_failed(engine, manifest, wrong)

    def _on_failed(self, engine: EngineState, manifest: WeightManifest, wrong: str) -> None:
        """No engine has passed with this publish, and one that should have did not: it may be the weights."""
        exports, version = self.exports, manifest.version
        if exports.has_failed(manifest.publish):
            return
        exports.fails(manifest.publish)
        exports.num_failed_in_a_row += 1
        self.canaries.suspects.add(engine.name)
        self.num_failed_publishes += 1
        self._give_back(manifest.publish)
        num_failed = exports.num_failed_in_a_row
        if num_failed >= self.settings.options.max_failed_publishes:
            last = f"the last, version {version}, on {engine.name}: {wrong}"
            has_diverged = manifest.canary is not None and bool(divergence(manifest.canary))
            self._out.append(FailRun(f"{num_failed} publishes in a row failed, {last}", has_diverged))
            return
        best = exports.best()
        served = "no version is served yet" if best is None else f"version {best.manifest.version} is served again"
        self._notice(f"version {version} failed on {engine.name} ({wrong}); {served}, the Learner publishes again")
        failed = PublishFailed(version=version, publish=manifest.publish, cause=f"{engine.name}: {wrong}")
        self._out.append(Send(LEARNER, failed))

    def _give_back(self, publish: int) -> None:
        """Nobody is to take this publish any more."""
        for engine in self.engines.by_name.values():
            if engine.takes(publish):
                self._out.append(StopTimer(engine.name))
                self._turn(engine, Phase.IDLE)
        self._touch_all()

    def _on_late(self, name: str) -> None:
        engine = self.engines.by_name.get(name)
        if engine is None:
            return
        if engine.phase is Phase.STARTING:
            self._quarantine(engine, f"not open after {self.settings.start_timeout_s:g} s")
            return
        if engine.phase not in (Phase.STAGING, Phase.COMMITTING) or engine.target is None:
            return
        version = engine.target.manifest.version
        doing = "fetching" if engine.phase is Phase.STAGING else "taking"
        self._quarantine(engine, f"late with {doing} version {version}")

    def _quarantine(self, engine: EngineState, cause: str) -> None:
        self._turn(engine, Phase.QUARANTINED)
        self.num_quarantines += 1
        self._out.append(StopTimer(engine.name))
        self._free_canary(engine.name)
        self._out.append(ReplaceActor(engine.name, engine.epoch, cause))
        self._notice(f"{engine.name} is replaced: {cause}")

    def _notice(self, text: str) -> None:
        self._out.append(Send(SUPERVISOR, NoticeGiven(name=WEIGHT_PUBLISHER, text=text)))

    # --- what follows from the state --------------------------------------------------------------------------

    def _advance(self) -> None:
        """Stage and commit what can be."""
        touched, self._touched = self._touched, {}
        engines = [self.engines.by_name[name] for name in touched if name in self.engines.by_name]
        staged: set[str] = set()
        for engine in engines:
            if engine.phase is _IDLE and (export := self._next_for(engine)) is not None:
                self._turn(engine, Phase.STAGING, export)
                staged.add(engine.name)
        for engine in engines:
            if engine.name in staged and engine.target is not None:
                self._stage(engine, engine.target.manifest)
            if engine.phase is _STAGED and engine.target is not None:
                self._commit(engine, engine.target)
        self._fan_out.end_turn()

    def _stage(self, engine: EngineState, manifest: WeightManifest) -> None:
        sources = self._fan_out.sources_for(engine, manifest.publish)
        if sources:
            manifest = msgspec.structs.replace(manifest, sources=sources)
        engine.told_publish = max(engine.told_publish, manifest.publish)
        self._out.append(Send(engine.name, WeightsStaged(manifest=manifest)))
        self._out.append(StartTimer(engine.name, self.settings.options.stage_timeout_s))

    def _commit(self, engine: EngineState, export: WeightsExported) -> None:
        manifest = export.manifest
        if not self.canaries.may_commit(engine, manifest.publish):
            return  # another engine goes first
        self._turn(engine, Phase.COMMITTING, export)
        committed = WeightsCommitted(version=manifest.version, publish=manifest.publish, update_mode=export.update_mode)
        drains = export.update_mode is UpdateMode.DRAIN
        timeout_s = self.settings.options.drain_timeout_s if drains else self.settings.options.commit_timeout_s
        self._out.append(Send(engine.name, committed))
        self._out.append(StartTimer(engine.name, timeout_s))

    def _next_for(self, engine: EngineState) -> WeightsExported | None:
        return self.exports.next_for(engine, goes_first=self.canaries.can_go_first(engine))

    def validate(self) -> None:
        """Assert the invariants."""
        self.engines.validate()
        self.exports.validate()
        self.canaries.validate()
        for engine in self.engines.by_name.values():
            if engine.phase is Phase.COMMITTING and engine.target is not None:
                publish = engine.target.manifest.publish
                assert self.exports.has_passed(publish) or self.canaries.of(publish) == engine.name, engine
        for engine in self.engines.by_name.values():
            assert engine.target is None or not self.exports.has_failed(engine.target.manifest.publish), engine
