"""Watches what engines make of weights and what the WeightPublisher has them do, with books of its own.

Invariants:

* An engine loads nothing older than what it has served, as long as it has that in its memory. What was loaded wrong it
  has not served.
* From a swap that went wrong until one that did not, an engine is asked to generate nothing, and no token that was made
  since by what is wrong is passed on or reported.
* An engine says that it serves what it has loaded, and nothing where that is wrong.
* It is told to take only what it has said that it fetched whole, and nothing that has failed before.
* One incarnation is given up once by the same WeightPublisher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.weight_publisher.machine import WeightPublisher
from penstock.messages.commands import ApplyWeights, Generate, ReplaceActor, Send
from penstock.messages.flow import GenerationProgressed, SampleGenerated
from penstock.messages.local import WeightsSwapped
from penstock.messages.weights import EngineReady, PublishFailed, WeightsCommitted, WeightsFetched, WeightsStaged
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import Part
    from penstock.messages.weights import WeightManifest
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


class _Loaded(msgspec.Struct):
    """What one engine incarnation has in its memory."""

    version: int = -1
    """That it serves rightly; −1: none."""
    applying: WeightManifest | None = None
    is_wrong: bool = False
    wrong: set[int] = set()
    """Versions that were wrong here, and have not been right since."""


class _Publisher(msgspec.Struct):
    """What one WeightPublisher was told, and what it has said."""

    asked: dict[tuple[str, int], WeightManifest] = {}
    """By engine and publish: what that engine is to fetch."""
    fetched: set[tuple[str, int, int]] = set()
    """Engine, epoch, publish."""
    failed: set[int] = set()
    replaced: set[tuple[str, int]] = set()


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
            self._look_at_publisher(self._publishers.setdefault(process, _Publisher()), event, commands)

    # --- engines ----------------------------------------------------------------------------------------------

    def _look_at_engine(self, process: Process, event: Event, commands: list[AnyCommand]) -> None:
        loaded = self._engines.setdefault(process, _Loaded())
        who, machine = f"{process.name} {process.epoch}", process.shell.machine
        if isinstance(event, WeightsSwapped):
            assert isinstance(machine, EngineWorker)
            self._swapped(loaded, event, machine)
        for command in commands:
            match command:
                case ApplyWeights(manifest=manifest):
                    assert loaded.applying is None, f"{who} swaps twice at once"
                    assert manifest.version >= loaded.version, f"{who} goes back from {loaded.version} to {manifest}"
                    loaded.applying = manifest
                case Generate():
                    assert not loaded.is_wrong, f"{who} generates {command.key} with wrong weights"
                    assert loaded.applying is None, f"{who} begins {command.key} in the middle of a swap"
                case Send(event=SampleGenerated(sample=sample)):
                    _assert_right(loaded, sample.parts, f"{sample.key} of {who}")
                case Send(event=GenerationProgressed(chunk=chunk, key=key)):
                    _assert_right(loaded, [chunk], f"what is reported of {key} of {who}")
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
            loaded.wrong.add(event.version)
            self.num_wrong += 1
            self.num_wrong_in_use += machine.requests.num_running > 0
        else:
            loaded.wrong.discard(event.version)

    # --- the publisher ----------------------------------------------------------------------------------------

    def _look_at_publisher(self, known: _Publisher, event: Event, commands: list[AnyCommand]) -> None:
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
                case _:
                    pass


def _assert_right(loaded: _Loaded, parts: Iterable[Part], what: str) -> None:
    versions = {span.version for part in parts for span in part.spans if span.num_tokens}
    assert not versions & loaded.wrong, f"{what} has tokens of versions {sorted(versions)}, wrong are {loaded.wrong}"
