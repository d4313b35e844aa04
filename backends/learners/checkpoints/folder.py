"""Checkpoints of a run on disk: a model with the trainer's state beside it, whole or not there.

``version-0000020/`` is what the first incarnation of the learner wrote at version 20, ``version-0000020-e3/`` what the
incarnation with epoch 3 did. What lies in one is the learner's business (:class:`Snapshot`): the torch learner's is a
folder that transformers loads. What training needs beyond the model lies in ``trainer_state/``, the record of all of it
too.

Invariants:

* A folder is written beside its name and renamed to it when every byte is on disk: whoever sees the name sees a whole
  checkpoint, also after a crash. It loses its name before its first byte is removed.
* Several ranks write into one folder, which all of them have to see; the first rank names it when all are done. Of
  :meth:`CheckpointFolder.write` every rank has the same outcome.
* No folder is written twice. An incarnation touches nothing that a later one wrote, except that what lies below a
  version that the run still needs may go, whoever wrote it.
* What a crash or a full disk left unfinished is removed by the next write, at the latest.
* A link is never followed when something is removed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from penstock.backends.checkpoint.layers_beyond import keep_layers_beyond
from penstock.backends.checkpoint.tokenizer_files import copy_tokenizer
from penstock.backends.durable import publish, sync
from penstock.backends.learners.checkpoints.channel import CheckpointChannel
from penstock.backends.learners.checkpoints.names import CHECKPOINT
from penstock.backends.learners.checkpoints.record import (
    STATE_FOLDER,
    FileRecord,
    LearnerFacts,
    MegatronRecord,
    ReferenceRecord,
    file_record,
    files_of,
    record_of,
    write_record,
)
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path


ALONE: Final = CheckpointChannel(SOLO)

_REFERENCE: Final = re.compile(r"reference(-(?P<version>\d+))?(-e\d+)?")
_LEFTOVER: Final = re.compile(r"\.(version-\d+|reference(-\d+)?)(-e(?P<epoch>\d+))?\.(?P<kind>partial|deleted)")

_log: Final = logging.getLogger(__name__)


class Snapshot(Protocol):
    """A learner's state at one version, in memory of its own. Every rank has one; what it is asked to write, every
    rank is asked at the same time."""

    @property
    def facts(self) -> LearnerFacts: ...
    @property
    def megatron(self) -> MegatronRecord | None:
        """What the Megatron learner says beyond these; None of another."""
        ...

    @property
    def size_bytes(self) -> int:
        """Of what this rank has copied."""
        ...

    def write(self, folder: Path, channel: CheckpointChannel, reference: str) -> Sequence[Path]:
        """Fill a folder, in which ``trainer_state/`` is there already; the files that only this rank knows.

        Args:
            folder: that all ranks see.
            channel: to the other ranks.
            reference: name of the reference's folder; empty if there is none.
        """
        ...

    def write_reference(self, folder: Path, channel: CheckpointChannel) -> None:
        """Fill another folder with the reference alone."""
        ...


class CheckpointFolder:
    """The checkpoints of a run, as one incarnation of its learner writes them. Of each rank one thread at a time calls
    it."""

    def __init__(self, folder: Path, *, epoch: int, tokenizer_source: Path, channel: CheckpointChannel = ALONE) -> None:
        """
        Args:
            folder: of all checkpoints of the run; made when it is missing.
            epoch: of this incarnation.
            tokenizer_source: the model's folder, whose tokenizer every checkpoint gets, and whose layers beyond those
                that are trained the run keeps.
            channel: to the other ranks.
        """
        self._folder = folder.absolute()
        self._epoch = epoch
        self._tokenizer_source = tokenizer_source
        self._channel = channel
        self.reference: ReferenceRecord | None = None
        """The reference that lies on disk already; a write whose checkpoint has another one puts it there before."""

    def path_of(self, version: int) -> Path:
        """Where this incarnation writes a version; names sort as versions do."""
        return self._folder / f"version-{version:07d}{self._suffix}"

    def write(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, and its reference before it if need be; durable when this returns. Every rank calls it.

        Raises:
            UserFault: a disk refuses, or the folder is there already. Nothing else has changed.
        """
        target, version = self.path_of(snapshot.facts.version), snapshot.facts.reference_version
        try:
            self._channel.first(self._make_room)
            if version is not None and not self.has_reference(version):
                self.reference = self._write_reference(snapshot, version)
            with self._written_beside(target) as partial:
                self._fill(partial, snapshot)
        except UserFault as error:
            raise UserFault(self._story(target, snapshot.size_bytes, error)) from error
        return target

    def has_reference(self, version: int | None) -> bool:
        """Whether the reference that lies on disk is the policy of this version."""
        return self.reference is not None and self.reference.version == version

    def delete_below(self, version: int) -> None:
        """Remove the checkpoints of lower versions, whichever incarnation wrote them, and the references that none of
        the others has: of a version no higher than this the newest stays, as checkpoints from here on may have it."""
        references = {path: int(match["version"] or 0) for path, match in self._matching(_REFERENCE)}
        needed = max((found for found in references.values() if found <= version), default=0)
        old = [path for path, match in self._matching(CHECKPOINT) if int(match["version"]) < version]
        for path in (*old, *(path for path, found in references.items() if found < needed)):
            deleted = path.with_name(f".{path.name}.deleted")
            try:
                path.rename(deleted)
                _remove(deleted)
            except OSError as error:
                # Training need not end because an old folder stays: the next removal finds it again.
                _log.warning("%s is not needed any more and cannot be removed: %s", path, error)

    @property
    def _suffix(self) -> str:
        return f"-e{self._epoch}" if self._epoch > 1 else ""

    def _make_room(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        sync(self._folder.parent)
        self._remove_leftovers()
        keep_layers_beyond(self._tokenizer_source, self._folder)

    def _fill(self, folder: Path, snapshot: Snapshot) -> None:
        channel = self._channel
        channel.first((folder / STATE_FOLDER).mkdir)
        reference = "" if self.reference is None else self.reference.folder
        own = snapshot.write(folder, channel, reference)
        parts = channel.each(lambda: {str(path.relative_to(folder)): file_record(path) for path in own})
        channel.first(lambda: self._seal(folder, snapshot, parts))

    def _seal(self, folder: Path, snapshot: Snapshot, parts: list[dict[str, FileRecord]]) -> None:
        """Add what lies there once, and the record of everything; ``parts`` are the files of each rank."""
        files = {name: record for of_rank in parts for name, record in of_rank.items()}
        _check_all_are_here(folder, files)
        copy_tokenizer(self._tokenizer_source, folder)
        files = dict(sorted((files | files_of(folder, but=files)).items()))
        write_record(
            folder,
            record_of(snapshot.facts, snapshot.megatron, epoch=self._epoch, reference=self.reference, files=files),
        )

    def _write_reference(self, snapshot: Snapshot, version: int) -> ReferenceRecord:
        name = f"reference-{version:07d}" if version else "reference"
        target = self._folder / f"{name}{self._suffix}"
        with self._written_beside(target) as partial:
            snapshot.write_reference(partial, self._channel)

            def finish() -> dict[str, FileRecord]:
                copy_tokenizer(self._tokenizer_source, partial)
                return files_of(partial)

            files = self._channel.first(finish)
        return ReferenceRecord(target.name, files, version)

    @contextmanager
    def _written_beside(self, target: Path) -> Generator[Path]:
        """A new folder to fill, by all ranks. It appears as ``target``, durable, when the block is done, and goes when
        it raises."""
        partial = target.with_name(f".{target.name}.partial")
        self._channel.first(lambda: _begin(target, partial))
        try:
            yield partial
            self._channel.first(lambda: publish(partial, target))
        except BaseException:
            if self._channel.is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _remove_leftovers(self) -> None:
        for path in self._entries():
            match = _LEFTOVER.fullmatch(path.name)
            # A partial folder of a later incarnation may be in the writing.
            if match and (match["kind"] == "deleted" or int(match["epoch"] or 0) <= self._epoch):
                _remove(path)

    def _matching(self, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
        """Folders of this name; no links to such."""
        found = ((path, pattern.fullmatch(path.name)) for path in self._entries())
        return [(path, match) for path, match in found if match and path.is_dir() and not path.is_symlink()]

    def _entries(self) -> list[Path]:
        return sorted(self._folder.iterdir()) if self._folder.is_dir() else []

    def _story(self, target: Path, size_bytes: int, error: Exception) -> str:
        existing = next(path for path in (self._folder, *self._folder.parents) if path.is_dir())
        free = os.statvfs(existing)
        return (
            f"{target}: the checkpoint ({size_bytes:,} bytes) cannot be written: {error}; "
            f"{free.f_bavail * free.f_frsize:,} bytes are free there. Make room and resume the run: "
            "the checkpoints before this one are whole"
        )


def _begin(target: Path, partial: Path) -> None:
    if os.path.lexists(target):
        raise UserFault(f"{target} is there already, and no checkpoint is written twice; move it away")
    partial.mkdir()


def _check_all_are_here(folder: Path, files: Mapping[str, FileRecord]) -> None:
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise UserFault(
            f"{len(missing)} files that other ranks wrote cannot be seen from the first one, {missing[0]} first; the "
            "run folder has to be on a file system that all machines of the learner share"
        )


def _remove(folder: Path) -> None:
    # rmtree refuses a link and follows none inside.
    shutil.rmtree(folder, ignore_errors=True)
