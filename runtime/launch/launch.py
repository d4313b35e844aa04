"""A new run, and what it shares with one that goes on: the run's folder, its lock, its record, one drive.

Invariants:

* Whoever drives a run holds its lock and has claimed its ledger before anything is started. So the epochs of a drive
  are above all earlier ones, and a process that is left of an earlier drive writes nothing any more.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape

from penstock.backends.learners.checkpoints.names import CHECKPOINTS, version_of
from penstock.backends.ledger.protocol import LedgerStoreError
from penstock.backends.ledger.sqlite import SqliteReader, open_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import DivergedError, UserFault
from penstock.messages.ledger import EPOCHS_PER_DRIVE
from penstock.runtime.launch.hub import with_hub
from penstock.runtime.launch.parts import recorded_batches
from penstock.runtime.launch.runs import SCENARIO_NAME, close_record, hold_run, make_run_folder, open_record
from penstock.runtime.preflight.machine import check_machine
from penstock.runtime.safe_text import terminal_lines
from penstock.runtime.scenario import dump_scenario
from penstock.runtime.scenario.rules import idle_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from rich.console import Console

    from penstock.backends.ledger.sqlite import SqliteStore
    from penstock.messages.ledger import LedgerEntry
    from penstock.runtime.launch.runs import RunRecord
    from penstock.runtime.scenario import Scenario


class Ended(NamedTuple):
    """How a drive of a run ended."""

    folder: Path
    exit_code: int
    story: str = ""
    """Why, in a sentence; empty where there was nothing to do."""


def launch(
    scenario: Scenario,
    origin: Path | None,
    console: Console,
    *,
    folder: Path | None = None,
    beside: Callable[[Path], AbstractContextManager[object]] = nullcontext,
) -> Ended:
    """Run a scenario in a folder of its own.

    Args:
        scenario: resolved.
        origin: the file it came from, for the log; None: what stands in the run's folder.
        console: the terminal.
        folder: absolute, that was made for this run already; None makes one once everything is found to be there.
        beside: what is there while the run is driven, made with its folder, in which its record is by then.

    Raises:
        UserFault: something that the scenario needs is missing here. Nothing was started, and no folder was made.
    """
    scenario = with_hub(scenario, console)
    parent = Path(scenario.run.folder).expanduser().absolute()
    check(scenario, parent, console)
    with recorded_batches(scenario, console) as recorded:
        folder = folder or make_run_folder(parent, scenario.run.name)
        write_scenario(folder, scenario)
        console.print(f"run folder: {escape(str(folder))}", soft_wrap=True)
        with hold_run(folder):
            path = origin or folder / SCENARIO_NAME
            return drive(folder, scenario, path, console, first_entries=recorded, beside=beside)


def check(scenario: Scenario, parent: Path, console: Console) -> None:
    """Whether everything is there. What has no effect in a run that was begun earlier is told.

    Raises:
        UserFault: something is missing.
    """
    for text in idle_keys(scenario):
        console.print(f"[yellow]warning[/] {escape(text)}", soft_wrap=True)
    with console.status("checking that everything is there …"):
        check_machine(scenario, parent)


def write_scenario(folder: Path, scenario: Scenario) -> None:
    """Write the scenario into the run's folder, whole or not at all."""
    scratch = folder / f".{SCENARIO_NAME}.{os.getpid()}"
    scratch.write_text(dump_scenario(scenario), encoding="utf-8")
    scratch.replace(folder / SCENARIO_NAME)


def drive(
    folder: Path,
    scenario: Scenario,
    scenario_path: Path,
    console: Console,
    *,
    before: RunRecord | None = None,
    overrides: tuple[str, ...] = (),
    first_entries: Iterable[Sequence[LedgerEntry]] = (),
    beside: Callable[[Path], AbstractContextManager[object]] = nullcontext,
) -> Ended:
    """Drive a run to its end, or as far as it comes. Call it with the run's lock held.

    Args:
        folder: of the run, absolute.
        scenario: resolved.
        scenario_path: where it came from, for the log.
        console: the terminal.
        before: the record that the last drive left.
        overrides: that changed the scenario since.
        first_entries: what a new ledger begins with, in the parts in which it is written.
        beside: as for :func:`launch`.

    Raises:
        UserFault: something that the user gave cannot be used.
    """
    from penstock.runtime.hosts.driver.launcher import run_job
    from penstock.runtime.hosts.processes.job import DriverJob
    from penstock.runtime.hosts.ray.cluster import make_temp_folder
    from penstock.runtime.observability.facts import command_line

    first_epoch = claim_drive(folder, first_entries) + 1
    temp_folder = str(make_temp_folder())
    record = open_record(folder, scenario.run.name, before=before, overrides=overrides, temp_folder=temp_folder)
    job = DriverJob(
        run_id=folder.name,
        run_folder=str(folder),
        temp_folder=temp_folder,
        scenario=scenario,
        scenario_path=str(scenario_path),
        first_epoch=first_epoch,
        started_unix_s=record.began_at,
        command=command_line(),
    )
    exit_code, has_diverged = 1, False
    try:
        with beside(folder):
            end = run_job(job, console)
        exit_code = end.exit_code
    except KeyboardInterrupt:
        exit_code = 130
        raise
    except UserFault as error:
        exit_code, has_diverged = 2, isinstance(error, DivergedError)
        raise with_remedy(error, folder, scenario) from None
    finally:
        _close_record(folder, record, exit_code, has_diverged=has_diverged)
    return Ended(folder, end.exit_code, end.story)


def with_remedy(error: UserFault, folder: Path, scenario: Scenario) -> UserFault:
    """The error, with how to go on when what the user has to change is changed."""
    if isinstance(error, DivergedError):
        return UserFault(f"{error}\n{begin_again(folder, scenario)}")
    try:
        goes_on = has_entries(folder)
    except UserFault as unread:
        return error if str(unread) in str(error) else UserFault(f"{error}\n{unread}")
    return UserFault(f"{error}\nwhen that is mended: {resume_command(folder)}") if goes_on else error


def what_is_left(folder: Path) -> str:
    """Of a run that has not come to its end: what is saved, and how to go on."""
    saved = ""
    try:
        is_empty = not has_entries(folder)
    except UserFault as unread:
        return f"{unread}\nwhen that is mended: {resume_command(folder)}"
    if is_empty:
        saved = "nothing was recorded yet: resumed, it begins from the start\n"
    elif not any(version_of(each.name) is not None for each in folder.glob(f"{CHECKPOINTS}/*")):
        saved = "no checkpoint was written yet: the prompts that were drawn are recorded, the model begins as it was\n"
    return f"{saved}to go on: {resume_command(folder)}"


def begin_again(folder: Path, scenario: Scenario) -> str:
    """Of a run whose training has diverged: what to change first, and the command that goes on from a checkpoint."""
    checkpoints = sorted({path.parent for path in folder.glob(f"{CHECKPOINTS}/version-*/*.safetensors")})
    rates = {"learner.learning_rate": scenario.learner.learning_rate}
    if scenario.learner.warm_start is not None and not checkpoints:
        rates["learner.warm_start.learning_rate"] = scenario.learner.warm_start.learning_rate
    words = ["penstock", "run", str(_from_here(folder / SCENARIO_NAME))]
    words += [f"{key}={rate / 2:g}" for key, rate in rates.items()]
    start = "the model that this one began with"
    if checkpoints:
        start = f"a checkpoint of before it went wrong (there are {', '.join(path.name for path in checkpoints)})"
        words += [f"model.path={checkpoints[-1]}", *(["model.make=null"] if scenario.model.make else [])]
    were = ", ".join(f"{key} (it was {rate:g})" for key, rate in rates.items())
    return (
        f"resumed, it would train the same batches with the same options. Change first {were}, learner.warmup_steps or "
        f"learner.max_grad_norm, and begin a new run from {start}:\n{shlex.join(words)}"
    )


def _close_record(folder: Path, record: RunRecord, exit_code: int, *, has_diverged: bool) -> None:
    try:
        close_record(folder, record, exit_code, has_diverged=has_diverged)
    except OSError as error:  # a full disk, above all; the run itself has told its story by now
        sys.stderr.write(terminal_lines(f"penstock: {folder}: cannot write down how the run ended: {error}\n"))


def claim_drive(folder: Path, first_entries: Iterable[Sequence[LedgerEntry]] = ()) -> int:
    """Claim the ledger for a new drive; the epoch that it was claimed with.

    Args:
        folder: of the run.
        first_entries: are written first.

    Raises:
        UserFault: the ledger cannot be used.
    """
    try:
        store = open_ledger(folder)
        try:
            claimed = store.claimed_epoch()
            epoch = 0 if claimed < 0 else (claimed // EPOCHS_PER_DRIVE + 1) * EPOCHS_PER_DRIVE
            store.claim(epoch)
            _begin(store, folder, first_entries)
        finally:
            store.close()
    except LedgerStoreError as error:
        raise UserFault(str(error)) from None
    return epoch


def _begin(store: SqliteStore, folder: Path, entries: Iterable[Sequence[LedgerEntry]]) -> None:
    """Write what the ledger begins with, whole or not at all."""
    try:
        for part in entries:
            store.commit(part)
    except BaseException:
        store.close()
        for file in folder.glob(f"{LEDGER_FILE}*"):
            file.unlink()
        raise


def has_entries(folder: Path) -> bool:
    """Whether the run's ledger holds anything to go on from.

    Raises:
        UserFault: it cannot be read, so nobody knows.
    """
    if not (folder / LEDGER_FILE).is_file():
        return False
    try:
        reader = SqliteReader(folder / LEDGER_FILE)
        try:
            return any(True for _ in reader.entries())
        finally:
            reader.close()
    except LedgerStoreError as error:
        raise UserFault(str(error)) from None


def resume_command(folder: Path) -> str:
    """What to type to go on with a run."""
    return shlex.join(("penstock", "resume", str(_from_here(folder))))


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
