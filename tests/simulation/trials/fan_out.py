"""Engines that pass weights on to each other, modelled, and what must be true of whom the WeightPublisher names.

An engine has fetched when the learner's part is here, as long as the engine alone takes, and then each source that it
was told of has its own part, or has used up its grace: one that was killed or stopped meanwhile never has.

Invariants that :class:`FanOutWatch` holds the WeightPublisher to, with books of its own:

* A source is there and not given up, serves where it is said to, and was told of the publish or serves it.
* Nobody waits for who waits for it, but for those who were told of the same sources in the same turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.messages.commands import FetchWeights, ReplaceActor, Send
from penstock.messages.local import EngineOpened, WeightsStagedLocally
from penstock.messages.membership import EngineJoined, EngineLeaving, EngineLost
from penstock.messages.weights import (
    EngineReady,
    WeightDetour,
    WeightsApplied,
    WeightsFetched,
    WeightSource,
    WeightsStaged,
)
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backends.protocol import Backend, Emit, Fail, Timers
    from penstock.messages.base import Event, Metric
    from penstock.messages.commands import AnyCommand, EngineCommand
    from penstock.messages.local import LocalEvent
    from penstock.messages.weights import WeightManifest
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

GRACE_S: Final = 3.0
LOOK_S: Final = 0.25

Parts = set[tuple[str, int]]
"""Location and publish: who has its own part of what."""


class PassingEngine:
    """The same engine, which passes weights on."""

    def __init__(self, engine: Backend[EngineCommand], location: str, parts: Parts, timers: Timers) -> None:
        """``parts``: of all engines of the run."""
        self._engine, self._location, self._parts, self._timers = engine, location, parts, timers
        self._manifest: WeightManifest | None = None

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._engine.start(self._hear, fail)

    def execute(self, command: EngineCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        if isinstance(command, FetchWeights):
            self._manifest = command.manifest
        self._engine.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Those of the engine."""
        return self._engine.gauges()

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._engine.close(timeout_s)

    def _hear(self, event: LocalEvent) -> None:
        match event:
            case EngineOpened():
                self._emit(msgspec.structs.replace(event, passes_on_at=self._location))
            case WeightsStagedLocally():
                assert self._manifest is not None
                assert self._manifest.publish == event.publish
                if event.digest == self._manifest.digest:
                    self._parts.add((self._location, event.publish))
                self._gather(event, self._manifest.sources, self._timers.now_s() + GRACE_S)
            case _:
                self._emit(event)

    def _gather(self, event: WeightsStagedLocally, sources: Sequence[WeightSource], until_s: float) -> None:
        late = [source for source in sources if source.location != self._location]
        late = [source for source in late if (source.location, event.publish) not in self._parts]
        if late and self._timers.now_s() < until_s:
            self._timers.call_later(LOOK_S, lambda: self._gather(event, sources, until_s))
            return
        detours = tuple(WeightDetour(source.engine, source.epoch, "late") for source in late)
        self._emit(msgspec.structs.replace(event, detours=detours))


class _Told(msgspec.Struct):
    """What an engine was told to fetch last, as long as it has not said that it did."""

    publish: int
    turn: int
    sources: tuple[WeightSource, ...]


class _Books:
    """Of one incarnation of the WeightPublisher."""

    def __init__(self) -> None:
        self.turn = 0
        self.epochs: dict[str, int] = {}
        self.locations: dict[str, str] = {}
        self.had: dict[str, set[int]] = {}
        """By engine: publishes that it was told of or serves."""
        self.told: dict[str, _Told] = {}

    def drop(self, name: str) -> None:
        for book in (self.epochs, self.locations, self.had, self.told):
            book.pop(name, None)

    def waits_for(self, name: str) -> Iterable[str]:
        """Engines that this one waits for and that fetch the same, but for those of its own turn."""
        told = self.told.get(name)
        if told is None:
            return ()
        here = [each.engine for each in told.sources if self.epochs.get(each.engine) == each.epoch]
        others = ((each, self.told.get(each)) for each in here)
        return [
            each
            for each, other in others
            if other is not None and other.publish == told.publish and other.turn != told.turn
        ]


class FanOutWatch(IdleWatcher):
    """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(self) -> None:
        self.num_told = self.num_detours = 0
        """Engines that were told of sources, and pieces that did not come from these."""
        self._books: dict[Process, _Books] = {}

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if not isinstance(process.shell.machine, WeightPublisher):
            return
        books = self._books.setdefault(process, _Books())
        books.turn += 1
        self._hear(books, event)
        told = [
            (command.to, command.event.manifest)
            for command in commands
            if isinstance(command, Send) and isinstance(command.event, WeightsStaged)
        ]
        for command in commands:
            if isinstance(command, ReplaceActor):
                books.drop(command.name)
        for name, manifest in told:
            books.told[name] = _Told(manifest.publish, books.turn, manifest.sources)
            books.had.setdefault(name, set()).add(manifest.publish)
        for name, manifest in told:
            self.num_told += bool(manifest.sources)
            for source in manifest.sources:
                who = f"{source.engine} is named to {name} as a source of publish {manifest.publish}"
                assert books.epochs.get(source.engine) == source.epoch, f"{who}, and is not there"
                assert books.locations.get(source.engine) == source.location, f"{who}, and serves elsewhere"
                assert manifest.publish in books.had.get(source.engine, ()), f"{who}, and has never heard of it"
            _assert_no_circle(books, name)

    def _hear(self, books: _Books, event: Event) -> None:
        match event:
            case EngineJoined() if event.epoch > books.epochs.get(event.name, -1):
                books.drop(event.name)
                books.epochs[event.name] = event.epoch
            case EngineLost() | EngineLeaving() if event.epoch == books.epochs.get(event.name):
                books.drop(event.name)
            case EngineReady() if event.engine_epoch == books.epochs.get(event.engine):
                books.locations.setdefault(event.engine, event.passes_on_at)
            case WeightsApplied() if event.engine_epoch == books.epochs.get(event.engine):
                books.had.setdefault(event.engine, set()).add(event.publish)
            case WeightsFetched() if event.engine_epoch == books.epochs.get(event.engine):
                told = books.told.get(event.engine)
                if told is not None and told.publish == event.publish:
                    del books.told[event.engine]
                self.num_detours += len(event.detours)
            case _:
                pass


def _assert_no_circle(books: _Books, name: str) -> None:
    seen: set[str] = set()
    ahead = list(books.waits_for(name))
    while ahead:
        other = ahead.pop()
        assert other != name, f"{name} waits for {sorted(seen)} and at last for itself"
        if other not in seen:
            seen.add(other)
            ahead += books.waits_for(other)
