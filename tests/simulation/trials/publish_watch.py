"""Watches what the Learner has its backend do with weights and checkpoints, beside what it says of that.

Invariants:

* From when a version is to be published until the backend has copied or published it, nothing else is asked of the
  backend that changes its weights or gives their memory up.
* Engines are told of exactly what the backend has published, once, in its order, and not before it has looked at all of
  its copy. A Learner that takes turns with them tells at the end of its turn, and then of the last alone.
* The backend lets exports go only of versions older than one that engines were told of.
* A checkpoint that was let go is not loaded again.
* A version that is due for a checkpoint is not trained away before its state is to be copied.
* No incarnation writes the checkpoint of a version twice, nor the one that it has loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.learner.machine import Learner
from penstock.messages.commands import (
    DeleteCheckpoints,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
    Send,
    SleepLearner,
    Train,
)
from penstock.messages.local import BatchTrained, CheckpointWritten, WeightsCopied, WeightsPublished
from penstock.messages.names import LEARNER, WEIGHT_PUBLISHER
from penstock.messages.weights import VersionAnnounced, WeightsExported
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


class PublishWatch(IdleWatcher):
    """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def __init__(self) -> None:
        self.num_beside = 0
        """Batches whose training began while a copy was looked at."""
        self.num_beside_saves = 0
        """Likewise while a checkpoint was written."""
        self._trained: dict[Process, int] = {}
        """By incarnation of the Learner: the version that it made last, or loaded."""
        self._saving: dict[Process, tuple[int, bool]] = {}
        """The version that was saved last, or loaded, and whether it is written still."""
        self._publishing: dict[Process, int] = {}
        """By incarnation of the Learner: the version that the backend needs its weights for."""
        self._copied: dict[Process, int] = {}
        self._untold: dict[Process, list[int]] = {}
        """Publishes that the backend has finished, and engines were not told of."""
        self._announced = -1
        self._oldest_checkpoint = 0

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if process.name == WEIGHT_PUBLISHER:
            for command in commands:
                if isinstance(command, Send) and isinstance(command.event, VersionAnnounced):
                    self._announced = max(self._announced, command.event.version)
        elif process.name == LEARNER:
            if isinstance(event, WeightsCopied):
                assert self._publishing.pop(process) == event.version
                self._copied[process] = event.version
            elif isinstance(event, WeightsPublished):
                self._copied.pop(process, None) if process in self._copied else self._publishing.pop(process)
                self._untold.setdefault(process, []).append(event.manifest.publish)
            elif isinstance(event, BatchTrained):
                self._trained[process] = event.version
            elif isinstance(event, CheckpointWritten):
                self._saving[process] = event.version, False
            for command in commands:
                self._asked(process, command)

    def _asked(self, process: Process, command: AnyCommand) -> None:
        match command:
            case PublishWeights():
                assert process not in self._publishing, "one version is to be published while another is copied"
                self._publishing[process] = command.version
            case Train() | SleepLearner():
                kind, version = type(command).__name__, self._publishing.get(process)
                assert version is None, f"{kind}, and version {version} is not copied yet"
                self.num_beside += isinstance(command, Train) and process in self._copied
                if isinstance(command, Train):
                    self._trains_on(process)
            case SaveCheckpoint():
                saved, is_written_still = self._saving.get(process, (-1, False))
                assert not is_written_still, "a checkpoint is asked for beside another"
                assert command.version > saved, f"checkpoint {command.version} is written again"
                self._saving[process] = command.version, True
            case Send(event=WeightsExported() as exported):
                publish, untold = exported.manifest.publish, self._untold.get(process, [])
                machine = process.shell.machine
                assert isinstance(machine, Learner)
                if machine.settings.shares_with and machine.settings.lend_after_s is None:
                    del untold[:-1]
                assert untold[:1] == [publish], f"engines are told of publish {publish}, and are to be told of {untold}"
                del untold[0]
            case ReleaseWeights():
                assert command.below_version <= self._announced, (
                    f"what is older than version {command.below_version} is let go, and engines know {self._announced}"
                )
            case DeleteCheckpoints():
                self._oldest_checkpoint = max(self._oldest_checkpoint, command.below_version)
            case OpenLearner():
                assert not command.path or command.version >= self._oldest_checkpoint, (
                    f"checkpoint {command.version} is loaded, and was let go with all before {self._oldest_checkpoint}"
                )
                if command.path:
                    self._trained[process], self._saving[process] = command.version, (command.version, False)
            case _:
                pass

    def _trains_on(self, process: Process) -> None:
        machine = process.shell.machine
        assert isinstance(machine, Learner)
        saved, is_written_still = self._saving.get(process, (0, False))
        trained = self._trained.get(process, 0)
        is_due = trained % machine.settings.save_every == 0
        assert not is_due or saved == trained, f"version {trained} is trained away, and is due for a checkpoint"
        self.num_beside_saves += is_written_still
