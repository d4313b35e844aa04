"""Checkpoints of a run on disk: a model in Hugging Face format with the trainer's state beside it, whole or not there.

``version-0000020/`` is what the first incarnation of the learner wrote at version 20, ``version-0000020-e3/`` what the
incarnation with epoch 3 did. Each is a folder that transformers loads; what training needs beyond the model lies in its
``trainer_state/``.

Invariants:

* A folder is written beside its name and renamed to it when every byte is on disk: whoever sees the name sees a whole
  checkpoint, also after a crash. It loses its name before its first byte is removed.
* No folder is written twice. An incarnation touches nothing that a later one wrote, except that what lies below a
  version that the run still needs may go, whoever wrote it.
* What a crash or a full disk left unfinished is removed by the next write, at the latest.
* A link is never followed when something is removed.
"""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.backends.durable import sync
from penstock.backends.learners.torch.checkpoint_record import (
    STATE_FOLDER,
    TENSORS_FILE,
    CheckpointRecord,
    ReferenceRecord,
    files_of,
    write_record,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.torch.snapshot import LearnerSnapshot

TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)

_CHECKPOINT: Final = re.compile(r"version-(?P<version>\d+)(-e\d+)?")
_LEFTOVER: Final = re.compile(r"\.(version-\d+|reference)(-e(?P<epoch>\d+))?\.(?P<kind>partial|deleted)")

_log: Final = logging.getLogger(__name__)


class CheckpointWriteError(ValueError):
    """A checkpoint could not be written. Those before it are as they were."""


class CheckpointFolder:
    """The checkpoints of a run, as one incarnation of its learner writes them. One thread at a time calls it."""

    def __init__(self, folder: Path, *, epoch: int, tokenizer_source: Path) -> None:
        """
        Args:
            folder: of all checkpoints of the run; made when it is missing.
            epoch: of this incarnation.
            tokenizer_source: the folder whose tokenizer every checkpoint gets.
        """
        self._folder = folder.absolute()
        self._epoch = epoch
        self._tokenizer_source = tokenizer_source
        self.reference: ReferenceRecord | None = None
        """The reference that lies on disk already; the first write puts one there otherwise."""

    def path_of(self, version: int) -> Path:
        """Where this incarnation writes a version; names sort as versions do."""
        return self._folder / f"version-{version:07d}{self._suffix}"

    def write(self, snapshot: LearnerSnapshot) -> Path:
        """Write a checkpoint, and the reference before the first one; durable when this returns.

        Raises:
            CheckpointWriteError: the disk refuses, or the folder is there already. Nothing else has changed.
        """
        target = self.path_of(snapshot.version)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            sync(self._folder.parent)
            self._remove_leftovers()
            if snapshot.reference is not None and self.reference is None:
                self.reference = self._write_reference(snapshot.reference)
            with _written_beside(target) as partial:
                self._fill(partial, snapshot)
        except (OSError, SafetensorError) as error:
            raise CheckpointWriteError(self._story(target, snapshot.size_bytes, error)) from error
        return target

    def delete_below(self, version: int) -> None:
        """Remove the checkpoints of lower versions, whichever incarnation wrote them. The reference stays."""
        for path in self._entries():
            match = _CHECKPOINT.fullmatch(path.name)
            if match and int(match["version"]) < version and path.is_dir() and not path.is_symlink():
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

    def _fill(self, folder: Path, snapshot: LearnerSnapshot) -> None:
        snapshot.save_model(folder)
        self._copy_tokenizer(folder)
        (folder / STATE_FOLDER).mkdir()
        save_file(snapshot.trainer, folder / TENSORS_FILE, metadata={"format": "pt"})
        record = CheckpointRecord(
            version=snapshot.version,
            epoch=self._epoch,
            dtype=snapshot.dtype,
            trained_tokens=snapshot.trained_tokens,
            canary=snapshot.canary,
            reference=self.reference,
            files=files_of(folder),
        )
        write_record(folder, record)

    def _write_reference(self, model: PackedModel) -> ReferenceRecord:
        target = self._folder / f"reference{self._suffix}"
        with _written_beside(target) as partial:
            model.save(partial)
            self._copy_tokenizer(partial)
            files = files_of(partial)
        return ReferenceRecord(target.name, files)

    def _copy_tokenizer(self, folder: Path) -> None:
        for pattern in TOKENIZER_FILES:
            for path in self._tokenizer_source.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)

    def _remove_leftovers(self) -> None:
        for path in self._entries():
            match = _LEFTOVER.fullmatch(path.name)
            # A partial folder of a later incarnation may be in the writing.
            if match and (match["kind"] == "deleted" or int(match["epoch"] or 0) <= self._epoch):
                _remove(path)

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


@contextmanager
def _written_beside(target: Path) -> Generator[Path]:
    """A new folder to fill. It appears as ``target``, durable, when the block is done, and goes when it raises."""
    if os.path.lexists(target):
        raise CheckpointWriteError(f"{target} is there already, and no checkpoint is written twice; move it away")
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir()
    try:
        yield partial
        for path in sorted(partial.rglob("*")):
            sync(path)
        sync(partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(target.parent)


def _remove(folder: Path) -> None:
    # rmtree refuses a link and follows none inside.
    shutil.rmtree(folder, ignore_errors=True)
