"""The record of a run: who drives it, and that nobody else is ever taken for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.messages.errors import UserFault
from penstock.messages.training import Balance, CauseCount
from penstock.runtime.cli.app import app
from penstock.runtime.cli.status import duration, show_status
from penstock.runtime.launch.runs import (
    RunRecord,
    close_record,
    is_alive,
    make_run_folder,
    newest_run,
    open_record,
    other_host,
    read_record,
    start_ticks,
    stop_run,
)
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.trackers import MetricsLog, StepRow

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

Child = subprocess.Popen[bytes]


@pytest.fixture
def child() -> Generator[Child]:
    """A process that waits for its standard input to end, and ends at once on SIGTERM."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(10)
    assert process.stdin is not None
    process.stdin.close()


def driven_by(child: Child, folder: Path) -> RunRecord:
    """A record that names the child as its driver."""
    ticks = start_ticks(child.pid)
    assert ticks is not None
    return msgspec.structs.replace(open_record(folder, "x"), pid=child.pid, start_ticks=ticks)


def status_of(folder: Path) -> tuple[int, str]:
    out = StringIO()
    code = show_status(folder, Console(file=out, width=200))
    return code, out.getvalue()


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    record = open_record(tmp_path, "example")
    assert read_record(tmp_path) == record
    assert (record.pid, record.state) == (os.getpid(), "running")
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("code", "state"), [(0, "completed"), (1, "failed"), (2, "failed"), (130, "stopped"), (143, "stopped")]
)
def test_the_end_of_a_run_is_written_down(tmp_path: Path, code: int, state: str) -> None:
    close_record(tmp_path, open_record(tmp_path, "example"), code)
    record = read_record(tmp_path)
    assert (record.state, record.exit_code) == (state, code)
    assert record.ended_at is not None
    assert status_of(tmp_path)[0] == (0 if code == 0 else 1)


def test_a_living_run_is_alive_and_its_status_says_so(tmp_path: Path) -> None:
    assert is_alive(tmp_path, open_record(tmp_path, "example"))
    code, text = status_of(tmp_path)
    assert code == 0
    assert f"process {os.getpid()}" in text


def test_a_run_that_another_machine_drives_is_neither_vanished_nor_stopped_here(tmp_path: Path) -> None:
    record = msgspec.structs.replace(open_record(tmp_path, "x"), boot_id="another", host="node-7")
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(record))
    text = status_of(tmp_path)[1]
    assert "on node-7, by what stands here; its process cannot be seen from this machine" in text
    assert "penstock resume" not in text, "somebody drives it, as far as can be known"
    with pytest.raises(UserFault, match=r"is driven on node-7, by process \d+; end it there"):
        CliRunner().invoke(app, ["stop", str(tmp_path)], catch_exceptions=False)
    here = msgspec.structs.replace(record, host=socket.gethostname())
    assert other_host(here) == "", "this machine has started anew since"
    assert other_host(msgspec.structs.replace(record, ended_at=1.0, state="stopped")) == ""


def test_a_run_whose_process_is_gone_has_vanished(tmp_path: Path, child: Child) -> None:
    record = driven_by(child, tmp_path)
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(record))
    child.kill()
    child.wait(10)
    assert not is_alive(tmp_path, record)
    code, text = status_of(tmp_path)
    assert code == 1
    assert "vanished" in text


def test_a_zombie_is_not_alive(tmp_path: Path, child: Child) -> None:
    record = driven_by(child, tmp_path)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped
    assert not is_alive(tmp_path, record)


def test_a_pid_that_was_given_to_another_process_is_never_signalled(tmp_path: Path, child: Child) -> None:
    record = driven_by(child, tmp_path)
    for stranger in (
        msgspec.structs.replace(record, start_ticks=record.start_ticks - 1),
        msgspec.structs.replace(record, boot_id="of another uptime"),
    ):
        assert not is_alive(tmp_path, stranger)
        assert stop_run(tmp_path, stranger, timeout_s=10)
        assert child.poll() is None


@contextmanager
def process_with(handler: str) -> Generator[Child]:
    """A process with this handler of SIGTERM, which is in place when the context is entered."""
    code = f"import os, signal, sys; signal.signal(signal.SIGTERM, {handler}); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_stopping_sends_sigterm_and_waits_for_the_end(tmp_path: Path) -> None:
    with process_with("lambda *_: (os.write(1, b'asked to end'), os._exit(0))") as process:
        assert stop_run(tmp_path, driven_by(process, tmp_path), timeout_s=30)
        assert start_ticks(process.pid) is None
        assert process.stdout is not None
        assert process.stdout.read() == b"asked to end"


def test_stopping_gives_up_at_its_deadline(tmp_path: Path) -> None:
    with process_with("signal.SIG_IGN") as deaf:
        assert not stop_run(tmp_path, driven_by(deaf, tmp_path), timeout_s=0.05)


def test_run_folders_of_one_second_do_not_collide(tmp_path: Path) -> None:
    folders = {make_run_folder(tmp_path / "runs", "x") for _ in range(5)}
    assert len(folders) == 5


def test_only_its_user_can_look_into_the_folder_of_a_run(tmp_path: Path) -> None:
    assert make_run_folder(tmp_path / "runs", "x").stat().st_mode & 0o777 == 0o700


def test_a_place_where_no_folder_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for parent in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserFault, match="cannot create the run's folder: not a directory"):
            make_run_folder(parent, "x")


def test_the_newest_run_is_the_one_that_was_begun_last(tmp_path: Path) -> None:
    for name, started_at in (("a", 2.0), ("b", 3.0), ("c", 1.0)):
        (tmp_path / name).mkdir()
        record = msgspec.structs.replace(open_record(tmp_path / name, name), started_at=started_at)
        (tmp_path / name / "run.json").write_bytes(msgspec.json.encode(record))
    assert newest_run(tmp_path).name == "b"


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match="no such folder"):
        read_record(tmp_path / "absent")
    with pytest.raises(UserFault, match=r"it has no run\.json"):
        read_record(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserFault, match="cannot read it"):
        read_record(tmp_path)


def test_status_shows_how_far_a_run_is_and_whether_its_ledger_balances(tmp_path: Path) -> None:
    open_record(tmp_path, "example")
    assert "no step yet" in status_of(tmp_path)[1]
    trained = CauseCount(state="trained", cause="", num_samples=24, num_tokens=900)
    row = StepRow(
        version=3,
        at_s=9.0,
        num_steps=20,
        metrics={REWARD: 0.25},
        staleness_counts=(4, 4),
        response_lengths=(5,) * 8,
        group_ids=(1, 2),
        balance=Balance(issued=30, in_system=6, ended=(trained,)),
    )
    log = MetricsLog(tmp_path)
    log.append(row)
    log.close()
    text = status_of(tmp_path)[1]
    assert "step 3 of 20, reward 0.250, mean staleness 0.50" in text
    assert "30 samples issued, 6 in the system: balanced" in text
    (tmp_path / "metrics.jsonl").write_text("{\n{\n")
    with pytest.raises(UserFault, match=r"metrics\.jsonl"):
        status_of(tmp_path)


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59.6, "1 min"), (3725, "1 h 2 min 5 s")])
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
