"""``penstock run``, and what it shares with ``penstock resume``: the run's folder, its lock, its record, one drive.

Invariants:

* Whoever drives a run holds its lock and has claimed its ledger before anything is started. So the epochs of a drive
  are above all earlier ones, and a process that is left of an earlier drive writes nothing any more.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.backends.learners.checkpoints.names import CHECKPOINTS, version_of
from penstock.backends.stores.archived_groups import ArchiveError
from penstock.backends.stores.protocol import LedgerStoreError
from penstock.backends.stores.recorded_batches import RecordedError
from penstock.backends.stores.sqlite import open_ledger
from penstock.backends.stores.tables import LEDGER_FILE
from penstock.messages.ledger import EPOCHS_PER_DRIVE
from penstock.runtime.cli.hub import with_hub
from penstock.runtime.cli.parts import recorded_batches, show_collected
from penstock.runtime.cli.runs import SCENARIO_NAME, close_record, hold_run, make_run_folder, open_record
from penstock.runtime.errors import RunFolderError, UserError
from penstock.runtime.safe_text import terminal_lines
from penstock.runtime.scenario import dump_scenario
from penstock.runtime.scenario.preflight import check_machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from penstock.backends.stores.sqlite import SqliteStore
    from penstock.messages.ledger import LedgerEntry
    from penstock.runtime.cli.runs import RunRecord
    from penstock.runtime.scenario import Scenario


def launch(scenario: Scenario, scenario_path: Path, console: Console) -> int:
    """Run a scenario in a folder of its own; the exit code of the run.

    Raises:
        UserError: something that the scenario needs is missing here. Nothing was started and no folder is left.
    """
    scenario = with_hub(scenario, console)
    parent = Path(scenario.run.folder).expanduser().absolute()
    check(scenario, parent, console)
    with recorded_batches(scenario, console) as recorded:
        folder = make_run_folder(parent, scenario.run.name)
        write_scenario(folder, scenario)
        console.print(f"run folder: {escape(str(folder))}")
        with hold_run(folder):
            exit_code = drive(folder, scenario, scenario_path, console, first_entries=recorded)
    if scenario.run.only == "rollout" and not exit_code:
        show_collected(folder, console)
    return exit_code


def check(scenario: Scenario, parent: Path, console: Console) -> None:
    """Whether everything is there.

    Raises:
        PreflightError: something is missing.
    """
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
) -> int:
    """Drive a run to its end, or as far as it comes; the exit code. Call it with the run's lock held.

    Args:
        folder: of the run, absolute.
        scenario: resolved.
        scenario_path: where it came from, for the log.
        console: the terminal.
        before: the record that the last drive left.
        overrides: that changed the scenario since.
        first_entries: what a new ledger begins with, in the parts in which it is written.

    Raises:
        UserError: something that the user gave cannot be used.
    """
    from penstock.runtime.hosts.ray.cluster import make_temp_folder
    from penstock.runtime.hosts.ray.driver import run_job
    from penstock.runtime.hosts.ray.job import DriverJob
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
    exit_code = 1
    try:
        exit_code = run_job(job, console)
    except KeyboardInterrupt:
        exit_code = 130
        raise
    except UserError as error:
        exit_code = 2
        if has_entries(folder):
            raise UserError(f"{error}\nwhen that is mended: {resume_command(folder)}") from None
        raise
    finally:
        _close_record(folder, record, exit_code)
    if exit_code:
        sys.stderr.write(terminal_lines(f"{what_is_left(folder)}\n"))
    return exit_code


def what_is_left(folder: Path) -> str:
    """Of a run that has not come to its end: what is saved, and how to go on."""
    if not has_entries(folder):
        return "nothing was recorded yet, so there is nothing to resume: begin anew"
    saved = ""
    if not any(version_of(each.name) is not None for each in folder.glob(f"{CHECKPOINTS}/*")):
        saved = "no checkpoint was written yet: the prompts that were drawn are recorded, the model begins as it was\n"
    return f"{saved}to go on: {resume_command(folder)}"


def _close_record(folder: Path, record: RunRecord, exit_code: int) -> None:
    try:
        close_record(folder, record, exit_code)
    except OSError as error:  # a full disk, above all; the run itself has told its story by now
        sys.stderr.write(terminal_lines(f"penstock: {folder}: cannot write down how the run ended: {error}\n"))


def claim_drive(folder: Path, first_entries: Iterable[Sequence[LedgerEntry]] = ()) -> int:
    """Claim the ledger for a new drive; the epoch that it was claimed with.

    Args:
        folder: of the run.
        first_entries: are written first.

    Raises:
        RunFolderError: the ledger cannot be used.
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
    except (LedgerStoreError, ArchiveError, RecordedError) as error:
        raise RunFolderError(str(error)) from None
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
    """Whether the run's ledger holds anything to go on from."""
    try:
        store = open_ledger(folder)
        try:
            return any(True for _ in store.entries())
        finally:
            store.close()
    except LedgerStoreError:
        return False


def resume_command(folder: Path) -> str:
    """What to type to go on with a run."""
    here = Path.cwd()
    path = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return shlex.join(("penstock", "resume", str(path)))
