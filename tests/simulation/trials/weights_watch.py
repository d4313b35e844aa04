"""Watches what engines make of weights and what the WeightPublisher has them do, with books of its own.

Invariants:

* An engine loads nothing older than what it has served, as long as it has that in its memory. What was loaded wrong it
  has not served.
* From a swap that went wrong until one that did not, an engine is asked to generate nothing, and passes on and reports
  nothing. What it goes on from afterwards it had reported before.
* An engine says that it serves what it has loaded, and nothing where that is wrong.
* It is told to take only what it has said that it fetched whole, and nothing that has failed before.
* One incarnation is given up once by the same WeightPublisher.
* A version is announced when so many serve it, or a newer one, as are needed of those that are open and not given up;
  of those that came when others served already, and of those that are lent, only who serves something counts. That is
  something that the publisher knows: what it has let go, as nobody served or took it, counts for nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.weight_publisher.engines import ROUNDING
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.messages.commands import ApplyWeights, Generate, ReplaceActor, Send
from penstock.messages.flow import GenerationProgressed, SampleGenerated, SampleIssued
from penstock.messages.local import WeightsSwapped
from penstock.messages.membership import EngineJoined, EngineLeaving, EngineLost
from penstock.messages.samples import SampleKey
from penstock.messages.weights import (
    EngineReady,
    PublishFailed,
    VersionAnnounced,
    WeightManifest,
    WeightsApplied,
    WeightsCommitted,
    WeightsExported,
    WeightsFetched,
    WeightsStaged,
)
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


class _Loaded(msgspec.Struct):
    """What one engine incarnation has in its memory."""

    version: int = -1
    """That it serves rightly; −1: none."""
    applying: WeightManifest | None = None
    is_wrong: bool = False
    told: dict[SampleKey, tuple[int, int]] = {}
    """Attempt, and tokens of it that PromptSource knows of."""


class _Served(msgspec.Struct):
    """What one engine incarnation has said."""

    epoch: int
    is_newcomer: bool
    is_open: bool = False
    turn: int = 0
    version: int = -1
    publish: int = -1

    @property
    def counts(self) -> bool:
        return self.is_open and not (self.is_newcomer and self.version < 0)


class _Publisher(msgspec.Struct):
    """What one WeightPublisher was told, and what it has said."""

    asked: dict[tuple[str, int], WeightManifest] = {}
    """By engine and publish: what that engine is to fetch."""
    fetched: set[tuple[str, int, int]] = set()
    """Engine, epoch, publish."""
    failed: set[int] = set()
    replaced: set[tuple[str, int]] = set()
    announced: int = -1
    exported: dict[int, WeightManifest] = {}
    engines: dict[str, _Served] = {}


class WeightsWatch(IdleWatcher):
    """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(self) -> None:
        self.num_wrong = 0
        """Swaps that went wrong."""
        self.num_wrong_in_use = 0
        """Those of them under which samples ran."""
        self._engines: dict[Process, _Loaded] = {}
        self._publishers: dict[Process, _Publisher] = {}

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        machine = process.shell.machine
        if isinstance(machine, EngineWorker):
            self._look_at_engine(process, event, commands)
        elif isinstance(machine, WeightPublisher):
            known = self._publishers.setdefault(process, _Publisher())
            _hear(known, machine, event)
            self._look_at_publisher(known, machine, event, commands)

    # --- engines ----------------------------------------------------------------------------------------------

    def _look_at_engine(self, process: Process, event: Event, commands: list[AnyCommand]) -> None:
        loaded = self._engines.setdefault(process, _Loaded())
        who, machine = f"{process.name} {process.epoch}", process.shell.machine
        if isinstance(event, WeightsSwapped):
            assert isinstance(machine, EngineWorker)
            self._swapped(loaded, event, machine)
        elif isinstance(event, SampleIssued) and event.attempt > loaded.told.get(event.key, (-1, 0))[0]:
            loaded.told[event.key] = event.attempt, 0 if event.prefix is None else event.prefix.num_tokens
        for command in commands:
            match command:
                case ApplyWeights(manifest=manifest):
                    assert loaded.applying is None, f"{who} swaps twice at once"
                    assert manifest.version >= loaded.version, f"{who} goes back from {loaded.version} to {manifest}"
                    loaded.applying = manifest
                case Generate(key=key, prefix=prefix):
                    assert not loaded.is_wrong, f"{who} generates {key} with wrong weights"
                    assert loaded.applying is None, f"{who} begins {key} in the middle of a swap"
                    told = loaded.told[key][1]
                    assert prefix is None or prefix.num_tokens <= told, f"{who} goes on with {key} from behind {told}"
                case Send(event=SampleGenerated() | GenerationProgressed() as made):
                    assert not loaded.is_wrong, f"{who} has wrong weights, and says {made}"
                    if isinstance(made, GenerationProgressed):
                        loaded.told[made.key] = made.attempt, made.num_tokens
                case Send(event=EngineReady() as ready):
                    if not ready.num_slots:  # its device is taken back, and it begins anew in its next turn
                        loaded.version = -1
                    assert ready.version in (-1, loaded.version), f"{who} serves {loaded.version}, and says {ready}"
                case _:
                    pass

    def _swapped(self, loaded: _Loaded, event: WeightsSwapped, machine: EngineWorker) -> None:
        manifest, loaded.applying = loaded.applying, None
        assert manifest is not None, "a swap that nobody asked for"
        loaded.is_wrong = event.digest != manifest.digest
        if machine.settings.check_canary and manifest.canary is not None:  # else it has no weights to be wrong
            loaded.is_wrong |= event.canary_logprobs != manifest.canary.logprobs
        loaded.version = -1 if loaded.is_wrong else event.version
        if loaded.is_wrong:
            self.num_wrong += 1
            self.num_wrong_in_use += machine.requests.num_running > 0

    # --- the publisher ----------------------------------------------------------------------------------------

    def _look_at_publisher(
        self, known: _Publisher, machine: WeightPublisher, event: Event, commands: list[AnyCommand]
    ) -> None:
        if isinstance(event, WeightsFetched) and not event.error:
            manifest = known.asked.get((event.engine, event.publish))
            if manifest is not None and manifest.digest == event.digest:
                known.fetched.add((event.engine, event.engine_epoch, event.publish))
        for command in commands:
            match command:
                case Send(event=PublishFailed(publish=publish)):
                    known.failed.add(publish)
                case Send(event=WeightsStaged(manifest=manifest)):
                    known.asked[command.to, manifest.publish] = manifest
                    assert manifest.publish not in known.failed, f"{command.to} is given {manifest}, which has failed"
                case Send(event=WeightsCommitted(publish=publish)):
                    has_it = any((name, of) == (command.to, publish) for name, _, of in known.fetched)
                    assert has_it, f"{command.to} is to take publish {publish}, and has not fetched it"
                case ReplaceActor():
                    given_up = (command.name, command.epoch)
                    assert given_up not in known.replaced, f"{command} was said before"
                    known.replaced.add(given_up)
                    known.engines.pop(command.name, None)
                case Send(event=VersionAnnounced(version=version)) if version > known.announced:
                    _assert_enough(known, version, machine.settings.options.announce_fraction)
                    known.announced = version
                case _:
                    pass


def _hear(known: _Publisher, machine: WeightPublisher, event: Event) -> None:
    match event:
        case EngineJoined(name=name, epoch=epoch):
            if name not in known.engines or known.engines[name].epoch < epoch:
                known.engines[name] = _Served(epoch, known.announced >= 0 or name in machine.settings.lent)
        case EngineLost(name=name, epoch=epoch) | EngineLeaving(name=name, epoch=epoch):
            if name in known.engines and known.engines[name].epoch == epoch:
                del known.engines[name]
        case EngineReady(engine=name, engine_epoch=epoch):
            engine = known.engines.get(name)
            if engine is not None and engine.epoch == epoch:
                if event.turn > engine.turn:
                    engine = known.engines[name] = _Served(epoch, is_newcomer=True, turn=event.turn)
                engine.is_open |= event.num_slots > 0
        case WeightsApplied(engine=name, engine_epoch=epoch, publish=publish):
            engine, manifest = known.engines.get(name), known.exported.get(publish)
            if engine is None or manifest is None or engine.epoch != epoch or publish < engine.publish:
                return
            if machine.exports.get(publish) is None:  # told in a turn before, and taken late
                return
            is_right = event.digest == manifest.digest
            if name not in machine.settings.weightless and manifest.canary is not None:
                is_right &= event.canary_logprobs == manifest.canary.logprobs
            engine.version, engine.publish = (event.version, publish) if is_right else (-1, -1)
        case WeightsExported(manifest=manifest):
            known.exported[manifest.publish] = manifest
        case _:
            pass


def _assert_enough(known: _Publisher, version: int, fraction: float) -> None:
    counted = [engine.version for engine in known.engines.values() if engine.counts]
    num_needed = max(1, math.ceil(fraction * len(counted) - ROUNDING))
    assert sum(served >= version for served in counted) >= num_needed, f"{version} is announced, served are {counted}"
