"""What every actor of a run was built with, heard and asked for: enough for ``penstock replay`` to go through it again.

Invariants:

* The first line of a file says what one incarnation was built with; each further one is an event that it handled,
  whole, with the commands that it returned. A short command is written whole, of a long one the checksum.
* A file is whole from its start to some moment. What exceeds the budget is not removed from its beginning, it is not
  written any more: a history without its beginning cannot be replayed.
* A process that is killed loses what it handled since its last heartbeat, and of this most often the last tenth of a
  second alone.
"""

from __future__ import annotations

from binascii import crc32
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import __version__, actors, messages
from penstock.messages.base import Value
from penstock.messages.books import BooksSnapshot, KeptBooks
from penstock.messages.commands import Send
from penstock.messages.ledger import LedgerEntry
from penstock.runtime.observability.segments import SegmentFile
from penstock.runtime.observability.subjects import subject_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header

RECORDING_FOLDER: Final = "recording"
FULL_FILE: Final = "full"
"""In that folder, once the recording has come to its share of the disk: nobody writes any more of it."""
FORM: Final = 1
WHOLE_BYTES: Final = 2048
"""A command of more bytes is written as its checksum."""
FLUSH_BYTES: Final = 256 << 10
MAX_DELAY_S: Final = 0.1
"""An event is in its file when another one follows it so much later, if not before, or at the next heartbeat."""

_packer: Final = msgspec.msgpack.Encoder()


class LedgerRead(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What a Buffer has read of its ledger when it was built, with the payloads that it got."""

    snapshot: BooksSnapshot | None = None
    later: tuple[LedgerEntry, ...] = ()
    """The entries since the snapshot."""
    records: tuple[LedgerEntry, ...] = ()
    """All entries, where no snapshot could be used."""
    problem: str = ""
    """Why none could."""


class Began(msgspec.Struct, frozen=True, array_like=True, tag="began"):
    """The first line of a recording: what one incarnation was built with."""

    form: int
    at_s: float
    """Seconds since the start of the run, here and below."""
    actor: str
    epoch: int
    version: str
    """Of Penstock."""
    rules: str
    """Digest of the code of actors and messages."""
    plan: bytes
    """The ``RunPlan``, as msgpack."""
    ledger: bytes
    """A :class:`LedgerRead` as msgpack; empty of all but the Buffer."""


class AskedCommand(msgspec.Struct, frozen=True, array_like=True):
    """A command that an actor has returned."""

    size_bytes: int
    """Of its msgpack."""
    checksum: int
    """CRC-32 of that."""
    body: bytes
    """That itself; empty where it is long."""
    label: str
    """What it is, of one without its body."""


class Handled(msgspec.Struct, frozen=True, array_like=True, tag="handled"):
    """An event that reached an actor, and what it asked for."""

    number: int
    """Counted from 1 within the incarnation."""
    at_s: float
    event: str
    """Its class."""
    subject: str
    """What it is about, as in the event log."""
    sender: str
    """Empty: it came from the actor's own process."""
    sender_epoch: int
    message_id: int
    body: bytes
    """The event as msgpack."""
    commands: tuple[AskedCommand, ...]
    error: str = ""
    """Class and message of what the actor raised, which is the last that it did; empty: nothing."""


class LedgerTee:
    """Hands a Buffer its ledger, and notes what it reads of it."""

    def __init__(self, kept: KeptBooks, entries: Iterable[LedgerEntry]) -> None:
        self._snapshot, self._problem = kept.snapshot, kept.problem
        self._records: list[LedgerEntry] = []
        self._later: list[LedgerEntry] = []
        self.records = _noted(entries, self._records)
        self.kept = KeptBooks(kept.snapshot, _noted(kept.later, self._later), kept.problem)

    def read(self) -> LedgerRead:
        """What was read so far."""
        return LedgerRead(
            snapshot=self._snapshot, later=tuple(self._later), records=tuple(self._records), problem=self._problem
        )


def _noted(entries: Iterable[LedgerEntry], into: list[LedgerEntry]) -> Iterator[LedgerEntry]:
    for entry in entries:
        into.append(entry)
        yield entry


class Recording:
    """Records one incarnation of one actor. For one thread."""

    def __init__(
        self, run_folder: Path, actor: str, epoch: int, *, now_s: Callable[[], float], segment_bytes: int = 0
    ) -> None:
        """
        Args:
            run_folder: of the run.
            actor: who is recorded.
            epoch: its incarnation.
            now_s: seconds since the start of the run.
            segment_bytes: from what size on the file is closed and the next one begun; 0: never.

        Raises:
            OSError: the file cannot be made.
        """
        path = recording_file(run_folder, actor, epoch)
        self._actor, self._epoch, self._now_s = actor, epoch, now_s
        self._full = path.with_name(FULL_FILE)
        self._file = None if self._full.exists() else SegmentFile(path, max_bytes=segment_bytes, anew=True)
        self._rows: list[Began | Handled] = []
        self._num_bytes = 0
        """Of the events in them."""
        self._encoder = msgspec.json.Encoder()
        self._due_s = 0.0
        self._number = 0

    def begin(self, plan: bytes, ledger: LedgerRead | None = None) -> None:
        """The actor is built, from this plan and, of a Buffer, this ledger."""
        at_s, read = self._now_s(), b"" if ledger is None else _packer.encode(ledger)
        self._rows.append(Began(FORM, at_s, self._actor, self._epoch, __version__, rules_digest(), plan, read))
        self._due_s = at_s + MAX_DELAY_S

    def add(
        self, event: Event, header: Header | None, commands: Sequence[AnyCommand], error: Exception | None = None
    ) -> None:
        """The actor has handled an event, or raised on it.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is None:
            return
        self._number += 1
        at_s = self._now_s()
        sender, epoch, message_id = ("", 0, 0) if header is None else (header.sender, header.epoch, header.message_id)
        asked = tuple(map(asked_command, commands))
        kind, subject, body = type(event).__name__, subject_text(event), _packer.encode(event)
        raised = "" if error is None else error_text(error)
        self._rows.append(Handled(self._number, at_s, kind, subject, sender, epoch, message_id, body, asked, raised))
        self._num_bytes += len(body)
        if self._num_bytes >= FLUSH_BYTES or at_s >= self._due_s:
            self._due_s = at_s + MAX_DELAY_S
            self.flush()

    def flush(self) -> None:
        """Hand what was collected to the operating system; the last time when the recording has become too large."""
        rows, self._rows, self._num_bytes = self._rows, [], 0
        if self._file is not None and rows:
            self._file.write(self._encoder.encode_lines(rows))
            if self._full.exists():
                self.close()

    def close(self) -> None:
        """Flush and close the file; a second time does nothing."""
        if self._file is not None and not self._file.closed:
            rows, self._rows = self._rows, []
            self._file.write(self._encoder.encode_lines(rows))
            self._file.close()
            self._file = None


def asked_command(command: AnyCommand) -> AskedCommand:
    """As it is recorded, and compared."""
    body = _packer.encode(command)
    if len(body) <= WHOLE_BYTES:
        return AskedCommand(len(body), 0, body, "")
    return AskedCommand(len(body), crc32(body), b"", command_label(command))


def command_label(command: AnyCommand) -> str:
    """What a command is, in some words."""
    name = type(command).__name__
    if isinstance(command, Send):
        event = command.event
        return f"{name} {type(event).__name__} {subject_text(event)}".rstrip() + f" to {command.to}"
    return name


def error_text(error: Exception) -> str:
    """Class and message on one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")


def recording_file(run_folder: Path, actor: str, epoch: int) -> Path:
    """Where one incarnation of an actor is recorded."""
    return run_folder / RECORDING_FOLDER / f"{actor.replace('/', '-')}-{epoch}.jsonl"


def rules_digest() -> str:
    """Digest of the code of the actors and of what they say, 16 hexadecimal digits: with another one a replay may part
    from the run."""
    found = blake2b(digest_size=8)
    for package in (actors, messages):
        (folder,) = map(Path, package.__path__)
        for path in sorted(folder.rglob("*.py")):
            found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()
