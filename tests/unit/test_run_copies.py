"""A folder that was copied while its run went on: nothing that is told to it reaches the run's process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.api import Run
from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.cli.status import show_status
from penstock.runtime.launch.launch import write_scenario
from penstock.runtime.launch.runs import (
    LOCK_NAME,
    RECORD_NAME,
    check_own,
    driven_instead,
    is_alive,
    open_record,
    read_record,
    start_ticks,
)
from penstock.runtime.launch.status import state_of
from penstock.runtime.scenario.load import load_scenario
from penstock.runtime.scenario.shipped import find_scenario

if TYPE_CHECKING:
    from collections.abc import Generator

Child = subprocess.Popen[bytes]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The folder of a run."""
    folder = tmp_path / "own"
    folder.mkdir()
    write_scenario(folder, load_scenario(find_scenario(Path("quickstart"))))
    return folder


@pytest.fixture
def driver(own: Path) -> Generator[Child]:
    """A process that drives this run: it holds the lock, and the record names it. SIGTERM would end it."""
    with (own / LOCK_NAME).open("ab") as lock:
        process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),)
        )  # fmt: skip
    ticks = start_ticks(process.pid)
    assert ticks is not None
    record = msgspec.structs.replace(open_record(own, "own"), pid=process.pid, start_ticks=ticks)
    (own / RECORD_NAME).write_bytes(msgspec.json.encode(record))
    yield process
    process.kill()
    process.wait(10)
    assert process.stdin is not None
    process.stdin.close()


@pytest.fixture
def copy(own: Path, driver: Child) -> Path:
    """Made while the run went on."""
    return Path(shutil.copytree(own, own.with_name("copy")))


@pytest.mark.parametrize(
    "words",
    [
        ("stop", "RUN"),
        ("save", "RUN"),
        ("pause", "RUN"),
        ("pause", "RUN", "--off"),
        ("policy", "RUN", "sync"),
        ("scale", "RUN", "engines=+1"),
        ("engine", "join", "RUN", "http://127.0.0.1:1"),
        ("gateway", "RUN"),
        ("resume", "RUN"),
    ],
    ids=" ".join,
)
def test_no_command_reaches_the_process_of_the_original(words: tuple[str, ...], copy: Path, driver: Child) -> None:
    given = [str(copy) if word == "RUN" else word for word in words]
    with pytest.raises(UserFault, match=f"copy: is a copy of a run that goes on: process {driver.pid} drives .*/own"):
        CliRunner().invoke(app, given, catch_exceptions=False)
    assert driver.poll() is None


def test_nor_does_a_python_program(copy: Path, driver: Child) -> None:
    for tell in (Run(copy).stop, Run(copy).save, Run(copy).pause_grants):
        with pytest.raises(UserFault, match="is a copy of a run that goes on"):
            tell()
    assert driver.poll() is None


def test_a_copy_is_no_living_run_and_its_status_says_what_it_is(copy: Path, own: Path, driver: Child) -> None:
    assert state_of(own, read_record(own)) == "running"
    assert state_of(copy, read_record(copy)) == "vanished"
    out = StringIO()
    assert show_status(copy, Console(file=out, width=1000)) == 1
    assert f"a copy of a run that goes on: process {driver.pid} drives {own}" in out.getvalue()
    assert "penstock resume" not in out.getvalue()


def test_a_copy_whose_original_has_ended_is_a_run_that_vanished(copy: Path, driver: Child) -> None:
    driver.kill()
    driver.wait(10)
    check_own(copy, read_record(copy))
    assert state_of(copy, read_record(copy)) == "vanished"


def test_a_folder_that_is_moved_stays_the_runs_own(own: Path, driver: Child) -> None:
    moved = own.rename(own.with_name("moved"))
    assert is_alive(moved, read_record(moved))
    own.symlink_to(moved)
    assert is_alive(own, read_record(own))


def test_so_does_one_whose_lock_was_removed_and_a_copy_of_one_that_was_removed_does_not(
    own: Path, copy: Path, driver: Child
) -> None:
    (own / LOCK_NAME).unlink()
    assert is_alive(own, read_record(own))
    shutil.rmtree(own)
    assert driven_instead(copy, read_record(copy)) == own
