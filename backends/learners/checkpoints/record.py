"""What a checkpoint says about itself: ``trainer_state/state.json``, and the check of a folder against it.

Invariants:

* The record names every other file of the checkpoint with its size and digest, and it has a digest of its own: what
  was read is what was written, or it is refused.
* It is read and checked before anything else of the checkpoint. Where several ranks read, each checks its share of the
  files.
* It is JSON beside safetensors; nothing in a checkpoint is unpickled.
* ``format_version`` is read before anything else, so that an older penstock refuses what a newer one wrote.
"""

from __future__ import annotations

import hashlib
import mmap
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from penstock.backends.weights.digest import digest_of
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from pathlib import Path

FORMAT_VERSION: Final = 1
STATE_FOLDER: Final = "trainer_state"
RECORD_FILE: Final = f"{STATE_FOLDER}/state.json"

_REMEDY: Final = (
    "put the folder back as it was written, or start a new run from an older checkpoint beside it (model.path)"
)


class CheckpointError(UserFault):
    """A model folder that cannot be trained from."""


class FileRecord(msgspec.Struct, frozen=True):
    """One file as it was written."""

    size_bytes: int
    digest: str
    """SHA-256 over the SHA-256 of each 8 MiB."""


class ReferenceRecord(msgspec.Struct, frozen=True):
    """The model that the KL term pulls to, or that adapters belong to. It lies beside the checkpoints, once for all of
    them that have it."""

    folder: str
    """Its name, in the folder that the checkpoint lies in."""
    files: dict[str, FileRecord]
    version: int = 0
    """Version of the policy that the reference is."""


class LearnerFacts(NamedTuple):
    """What a learner says of its state at one version, beside its tensors."""

    version: int
    dtype: str
    """Type that the model computes in."""
    trained_tokens: int
    """Tokens that the whole run has trained so far."""
    canary: tuple[int, ...]
    """Token ids of the text whose log-probs are compared after a publish."""
    reference_version: int | None = 0
    """Which policy the reference is; None without one."""


class MegatronRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the Megatron learner says of a checkpoint beyond that."""

    layout: str
    """Layout of the ranks that wrote it, in words."""
    distributed_optimizer: bool
    optimizer_steps: dict[str, int]
    """How many steps the optimizer of each model that is trained had made; empty where there is no state of one."""


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds beside its tensors; see :class:`LearnerFacts`."""

    version: int
    epoch: int
    """The incarnation that wrote it."""
    dtype: str
    trained_tokens: int
    canary: tuple[int, ...]
    reference: ReferenceRecord | None
    files: dict[str, FileRecord]
    """Path in the checkpoint → file."""
    backend: Literal["torch", "megatron"] = "torch"
    """The learner that wrote it."""
    megatron: MegatronRecord | None = None
    """Of a checkpoint that the Megatron learner wrote."""


def record_of(
    facts: LearnerFacts,
    megatron: MegatronRecord | None,
    *,
    epoch: int,
    reference: ReferenceRecord | None,
    files: dict[str, FileRecord],
) -> CheckpointRecord:
    """Of a checkpoint with these files; ``reference``: the one on disk, if the learner has any."""
    return CheckpointRecord(
        version=facts.version,
        epoch=epoch,
        dtype=facts.dtype,
        trained_tokens=facts.trained_tokens,
        canary=facts.canary,
        reference=None if facts.reference_version is None else reference,
        files=files,
        backend="torch" if megatron is None else "megatron",
        megatron=megatron,
    )


class _Versioned(msgspec.Struct):
    format_version: int


class _Envelope(msgspec.Struct):
    format_version: int
    digest: str
    """SHA-256 of the bytes of ``record``."""
    record: msgspec.Raw


def write_record(folder: Path, record: CheckpointRecord) -> None:
    """Write the record of the checkpoint in ``folder``; everything else is there already."""
    body = msgspec.json.encode(record)
    envelope = _Envelope(FORMAT_VERSION, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
    (folder / RECORD_FILE).write_bytes(msgspec.json.encode(envelope))


def read_record(folder: Path, *, version: int | None = None, rank: int = 0, num_ranks: int = 1) -> CheckpointRecord:
    """Read the record of a checkpoint and check every file of it, the reference's too.

    Args:
        folder: of the checkpoint.
        version: that it has to be of.
        rank: of who reads.
        num_ranks: who read it together; each checks every so many files.

    Raises:
        CheckpointError: it is not there, not whole, of another version or of a newer format.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: the checkpoint of version {version} is not there, and the run goes on from this one; put the "
            "folder back, or the whole run's folder if that was moved"
        )
    path = folder / RECORD_FILE
    record = open_record(path)
    if version is not None and record.version != version:
        raise CheckpointError(
            f"{path}: expected version {version}, found {record.version}; was a checkpoint renamed? {_REMEDY}"
        )
    check_files(folder, _share(record.files, rank, num_ranks))
    if record.reference is not None:
        check_files(folder.parent / record.reference.folder, _share(record.reference.files, rank, num_ranks))
    return record


def check_dtype(folder: Path, record: CheckpointRecord, dtype: str) -> None:
    """
    Raises:
        CheckpointError: the checkpoint is of a model that computes in another type than ``model.dtype`` says.
    """
    if record.dtype != dtype:
        raise CheckpointError(
            f"{folder}: expected a model of {dtype}, as model.dtype says, found {record.dtype}; resume with "
            f"model.dtype: {record.dtype}"
        )


def files_of(folder: Path, *, but: Container[str] = ()) -> dict[str, FileRecord]:
    """Every file below ``folder``, by its path in it, those in ``but`` left out."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: file_record(path) for name, path in paths.items() if name not in but}


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """
    Raises:
        CheckpointError: a file is missing or is not as it was written.
    """
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is not whole; {_REMEDY}")
        if (size_bytes := path.stat().st_size) != expected.size_bytes:
            raise CheckpointError(
                f"{path} is damaged: expected {expected.size_bytes:,} bytes, found {size_bytes:,}; {_REMEDY}"
            )
        if file_record(path) != expected:
            raise CheckpointError(f"{path} is damaged: its bytes do not have the recorded digest; {_REMEDY}")


def _share(files: Mapping[str, FileRecord], rank: int, num_ranks: int) -> dict[str, FileRecord]:
    return dict(sorted(files.items())[rank::num_ranks])


def open_record(path: Path) -> CheckpointRecord:
    """Read the record of a checkpoint, and check that alone.

    Raises:
        CheckpointError: it is not there, damaged, or of a newer format.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: expected a checkpoint that penstock wrote, found a folder without the state of a "
            f"trainer; {_REMEDY}"
        ) from None
    try:
        found = msgspec.json.decode(data, type=_Versioned).format_version
        if found != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: written in format {found}, and this penstock reads format {FORMAT_VERSION}; go on with the "
                "version of penstock that wrote it"
            )
        envelope = msgspec.json.decode(data, type=_Envelope)
        if hashlib.sha256(envelope.record).hexdigest() != envelope.digest:
            raise CheckpointError(f"{path} is damaged: its record does not have the recorded digest; {_REMEDY}")
        return msgspec.json.decode(envelope.record, type=CheckpointRecord)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is damaged: {error}; {_REMEDY}") from error


def file_record(path: Path) -> FileRecord:
    """Size and digest of a file as it is now."""
    with path.open("rb") as file:
        size_bytes = path.stat().st_size
        if not size_bytes:  # mmap refuses it
            return FileRecord(0, digest_of(memoryview(b"")))
        with mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as data:
            return FileRecord(size_bytes, digest_of(data))
