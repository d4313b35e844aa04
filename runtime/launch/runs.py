"""The record that a run leaves in its folder: which process drives it, what became of it, and who drove it before.

Invariants:

* ``run.json`` is replaced whole, so a reader never sees half of it.
* Who writes it holds the run's lock, from before the first write to the end of its process.
* A process is named by its pid *and* its start time. A pid that was given to another process since is never
  signalled, and never taken for a living run.
* A folder that was copied while its run went on names a process that drives another folder, as the lock says that it
  holds. The copy is no living run, and nothing that is told to it reaches that process.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.backends.learners.checkpoints.names import CHECKPOINT, CHECKPOINTS
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.processes.process_facts import await_exit, facts_of, is_running, pinned
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault
from penstock.runtime.run_folder import file_of_run

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.backends.ledger.audit import AuditReport

RECORD_NAME = "run.json"
SCENARIO_NAME = "scenario.yaml"
LOCK_NAME = "run.lock"
LOCK_PAUSE_S: Final = 0.02
_DELETED: Final = " (deleted)"
"""Behind the name of an open file that is gone."""

State = Literal["running", "completed", "failed", "stopped", "diverged"]


class Drive(msgspec.Struct, frozen=True, kw_only=True):
    """One process's part in a run."""

    started_at: float
    """Unix time, seconds."""
    ended_at: float | None
    """None for one that vanished: it was killed, or the machine went down."""
    state: State
    exit_code: int | None
    overrides: tuple[str, ...] = ()


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What ``run.json`` holds."""

    name: str
    pid: int
    """Of the process that drives the run and takes its signals."""
    start_ticks: int
    """When that process started, in clock ticks since the machine did."""
    boot_id: str
    """Of the machine's current uptime; ticks of another one mean nothing."""
    started_at: float
    """Unix time, seconds; as the following, of the present drive."""
    host: str = ""
    """Name of the machine; empty where an earlier version has written the record."""
    state: State = "running"
    exit_code: int | None = None
    ended_at: float | None = None
    overrides: tuple[str, ...] = ()
    """That ``penstock resume`` was given."""
    temp_folder: str = ""
    """Of an embedded Ray; goes with the drive."""
    earlier: tuple[Drive, ...] = ()
    """The drives before this one, oldest first."""

    @property
    def began_at(self) -> float:
        """When the first drive began; times of the run count from here."""
        return self.earlier[0].started_at if self.earlier else self.started_at


def make_run_folder(parent: Path, name: str) -> Path:
    """Create and return ``parent/name-<time>``, made unique with a number where that is taken.

    Raises:
        UserFault: it cannot be created.
    """
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(mode=0o700, parents=True)  # prompts, answers, keys and logs are nobody else's
        except FileExistsError:
            continue
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise UserFault(f"{folder}: cannot create the run's folder: {why}") from None
        return folder
    raise UserFault(f"{parent}: a thousand runs of this second are there already")


@contextmanager
def hold_run(folder: Path, timeout_s: float = 0.0) -> Generator[None]:
    """Be the only one who drives this run, within the block. The kernel lets go when the process ends, however.

    Raises:
        UserFault: somebody else is, for longer than ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    with (folder / LOCK_NAME).open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise UserFault(f"{folder}: another penstock drives this run") from None
                time.sleep(LOCK_PAUSE_S)
        yield


def open_record(
    folder: Path,
    name: str,
    *,
    before: RunRecord | None = None,
    overrides: tuple[str, ...] = (),
    temp_folder: str = "",
) -> RunRecord:
    """Write and return the record of a run that this process begins to drive.

    Args:
        folder: of the run.
        name: of the run.
        before: the record that the last drive left.
        overrides: that change the scenario from here on.
        temp_folder: of an embedded Ray.
    """
    record = RunRecord(
        name=name,
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        boot_id=_boot_id(),
        host=socket.gethostname(),
        started_at=time.time(),
        overrides=overrides,
        temp_folder=temp_folder,
        earlier=() if before is None else (*before.earlier, _drive(before)),
    )
    _write(folder, record)
    return record


def close_record(folder: Path, record: RunRecord, exit_code: int, *, has_diverged: bool = False) -> None:
    """Write down how the run ended."""
    by_signal = exit_code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    state: State = "stopped" if by_signal else "failed" if exit_code else "completed"
    state = "diverged" if has_diverged else state
    _write(folder, msgspec.structs.replace(record, state=state, exit_code=exit_code, ended_at=time.time()))


def read_record(folder: Path) -> RunRecord:
    """The record in a run's folder.

    Raises:
        UserFault: the folder is not there, or holds no run.
    """
    file = folder / RECORD_NAME
    try:
        return msgspec.json.decode(file_of_run(folder, RECORD_NAME).read_bytes(), type=RunRecord)
    except (OSError, *UNREADABLE) as error:
        raise UserFault(f"{file}: cannot read it: {error}") from None


def newest_run(parent: Path) -> Path:
    """The run under ``parent`` that was begun last.

    Raises:
        UserFault: there is none.
    """
    records = [file for file in parent.glob(f"*/{RECORD_NAME}") if file.is_file()]
    if not records:
        raise UserFault(f"{parent}: no run is there; name the run's folder")
    return max(records, key=lambda file: read_record(file.parent).started_at).parent


def ledger_file(folder: Path) -> Path:
    """The ledger in a run's folder.

    Raises:
        UserFault: there is none.
    """
    file = folder / LEDGER_FILE
    if not file.is_file():
        read_record(folder)  # says so when this is no run at all
        raise UserFault(f"{folder}: the run has no {LEDGER_FILE}: its Buffer has not started yet, or the file is gone")
    return file


def audit_run(folder: Path) -> AuditReport:
    """Audit the ledger of a run; also of one that goes on.

    Raises:
        UserFault: the folder has no ledger, or it cannot be read.
    """
    from penstock.backends.ledger.audit import audit_ledger
    from penstock.backends.ledger.protocol import LedgerStoreError

    try:
        return audit_ledger(ledger_file(folder))
    except LedgerStoreError as error:
        raise UserFault(str(error)) from None


def model_folder(source: Path, version: int | None) -> Path:
    """The folder of the model that is meant: of a run its newest checkpoint, or that of a version.

    Raises:
        UserFault: there is none.
    """
    checkpoints = source / CHECKPOINTS if (source / CHECKPOINTS).is_dir() else source
    found = _checkpoints_in(checkpoints)
    if not found:
        if version is not None:
            raise UserFault(f"{source}: has no checkpoints, so --version {version} names nothing; leave it out")
        if not source.is_dir():
            what = "a file" if source.exists() else "there is no such folder"
            raise UserFault(f"{source}: {what}; expected the folder of a run, a checkpoint or a model")
        if checkpoints != source or (source / RECORD_NAME).is_file():
            raise UserFault(f"{source}: the run has written no checkpoint yet")
        return source
    wanted = [path for path in found if version is None or found[path][0] == version]
    if not wanted:
        there = ", ".join(str(number) for number in sorted({number for number, _ in found.values()}))
        raise UserFault(f"{checkpoints}: has no checkpoint of version {version}; there are {there}")
    return max(wanted, key=lambda path: found[path])


def _checkpoints_in(folder: Path) -> dict[Path, tuple[int, int]]:
    """Path → version, and epoch of the incarnation that wrote it."""
    if not folder.is_dir():
        return {}
    matches = ((path, CHECKPOINT.fullmatch(path.name)) for path in folder.iterdir() if path.is_dir())
    return {path: (int(match["version"]), int(match["epoch"] or 1)) for path, match in matches if match}


def other_host(record: RunRecord) -> str:
    """The machine that a run was driven on when its record was written, where that is another one, whose processes
    cannot be seen from here; empty otherwise."""
    is_elsewhere = record.ended_at is None and record.boot_id != _boot_id() and record.host != socket.gethostname()
    return record.host if is_elsewhere else ""


def is_alive(folder: Path, record: RunRecord) -> bool:
    """Whether the very process that began the run still exists, and drives this folder."""
    return _exists(record) and driven_instead(folder, record) is None


def driven_instead(folder: Path, record: RunRecord) -> Path | None:
    """The folder that the run's process drives, where that is another one than this, which is a copy then, made while
    the run went on; None where it drives this one, or is gone."""
    locks: list[Path] = []
    if _exists(record):
        with suppress(OSError):  # it ends, or is somebody else's, who can only read here
            for entry in os.scandir(f"/proc/{record.pid}/fd"):
                with suppress(OSError):
                    locks.append(Path(entry.path).readlink())
    locks = [lock for lock in locks if lock.name.removesuffix(_DELETED) == LOCK_NAME]
    if any(_may_be_in(folder, lock) for lock in locks):
        return None
    return locks[0].parent if locks else None


def _may_be_in(folder: Path, lock: Path) -> bool:
    """Whether this lock of a process is the folder's. One that cannot be seen from here is in mounts of its own."""
    return lock.parent.samefile(folder) if lock.parent.is_dir() else not lock.name.endswith(_DELETED)


def check_own(folder: Path, record: RunRecord) -> None:
    """
    Raises:
        UserFault: the folder is a copy of a run that goes on.
    """
    if other := driven_instead(folder, record):
        raise UserFault(
            f"{folder}: is a copy of a run that goes on: process {record.pid} drives {other}. What is meant for that "
            "run needs that folder; the copy can be resumed when that run has ended"
        )


def _exists(record: RunRecord) -> bool:
    return record.boot_id == _boot_id() and is_running(record.pid, record.start_ticks)


@contextmanager
def process_handle(folder: Path, record: RunRecord) -> Generator[int | None]:
    """A pidfd of the run's process, which turns readable when that ends; None when it is gone, or drives another
    folder."""
    with pinned(record.pid, record.start_ticks) as handle:
        yield handle if is_alive(folder, record) else None


def stop_run(folder: Path, record: RunRecord, timeout_s: float) -> bool:
    """Ask the run's process to end (SIGTERM) and wait for it; False when it is still there after ``timeout_s``.

    Raises:
        UserFault: the folder is a copy of a run that goes on.
    """
    check_own(folder, record)
    with process_handle(folder, record) as handle:
        if handle is None:
            return True
        try:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        except ProcessLookupError:
            return True
        return await_exit(handle, timeout_s)


def has_ended(folder: Path, record: RunRecord, timeout_s: float = 0.0) -> bool:
    """Whether the run's process is gone, or ends within this time."""
    with process_handle(folder, record) as handle:
        return handle is None or await_exit(handle, timeout_s)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None when it is gone or a zombie."""
    facts = facts_of(pid)
    return None if facts is None or facts.state in "ZX" else facts.start_ticks


def _drive(record: RunRecord) -> Drive:
    return Drive(
        started_at=record.started_at,
        ended_at=record.ended_at,
        state=record.state,
        exit_code=record.exit_code,
        overrides=record.overrides,
    )


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _write(folder: Path, record: RunRecord) -> None:
    scratch = folder / f".{RECORD_NAME}.{os.getpid()}"
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    scratch.replace(folder / RECORD_NAME)
