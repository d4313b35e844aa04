"""Watches whom PromptSource sends samples whose weights come late, with books of its own.

Invariants:

* A sample goes to an engine that has said that it serves what the sample needs; or to one that should, by how many
  versions had been announced when it swapped last, a version before the sample's deadline. One that is to avoid an
  engine may wait elsewhere for whatever weights.
* None waits for weights while an engine that serves what it needs has a free slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.actors.prompt_source.machine import PromptSource
from penstock.messages.commands import Send
from penstock.messages.flow import SampleIssued
from penstock.messages.membership import EngineJoined
from penstock.messages.weights import EngineReady, VersionAnnounced
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


class _Known(msgspec.Struct):
    """An engine, as a PromptSource was told."""

    epoch: int
    version: int = -1
    late_by: int = 0
    """Versions."""
    most_asked: int = -1
    """The highest version that a sample which went there has needed."""

    def hear(self, version: int, announced: int) -> None:
        if version >= 0 and version != self.version:
            passed = max(0, announced - version)
            self.late_by = passed if self.most_asked <= self.version else max(passed, self.late_by)
        self.version = version


class LateWatch(IdleWatcher):
    """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(self) -> None:
        self.num_waiting = 0
        """Samples that were sent to an engine that did not serve what they need."""
        self._announced: dict[Process, int] = {}
        """By incarnation of PromptSource."""
        self._engines: dict[Process, dict[str, _Known]] = {}

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        machine = process.shell.machine
        if not isinstance(machine, PromptSource):
            return
        engines = self._engines.setdefault(process, {})
        announced = self._announced.get(process, -1)
        match event:
            case VersionAnnounced():
                self._announced[process] = max(announced, event.version)
            case EngineJoined():
                if event.name not in engines or engines[event.name].epoch < event.epoch:
                    engines[event.name] = _Known(event.epoch)
            case EngineReady():
                known = engines.get(event.engine)
                view = machine.table.router.engines.get(event.engine)
                if known is not None and known.epoch == event.engine_epoch and view is not None and not view.is_leaving:
                    known.hear(event.version, announced)
            case _:
                pass
        for command in commands:
            if isinstance(command, Send) and isinstance(command.event, SampleIssued):
                self._check(machine, engines, command.to, command.event)

    def _check(self, machine: PromptSource, engines: dict[str, _Known], name: str, issued: SampleIssued) -> None:
        known, needed = engines[name], issued.min_version
        lease = machine.table.lease(issued.key)
        known.most_asked = max(known.most_asked, needed)
        if known.version >= needed or lease is None or lease.avoids:
            return
        self.num_waiting += 1
        where = f"{issued.key}, which needs version {needed} and is due at {issued.deadline_version}, goes to {name}"
        assert known.late_by <= issued.deadline_version - needed - 1, (
            f"{where}, which serves {known.version} and was {known.late_by} versions late"
        )
        recorded = machine.settings.recorded_engines
        free = [
            view.name
            for view in machine.table.router.engines.values()
            if view.has_free_slot and view.version >= needed and (view.name in recorded) == (name in recorded)
        ]
        assert not free, f"{where}, which serves {known.version}, though {free[0]} has a free slot"
