"""``penstock list``: a line for each run of a folder."""

from __future__ import annotations

import os
from io import StringIO
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.messages.errors import UserFault
from penstock.messages.training import Balance
from penstock.runtime.cli.app import app
from penstock.runtime.cli.listing import show_runs
from penstock.runtime.launch.runs import RECORD_NAME, RunRecord, close_record, open_record, read_record
from penstock.runtime.observability.trackers import METRICS_FILE, StepRow

if TYPE_CHECKING:
    from pathlib import Path


def listed(parent: Path) -> list[str]:
    out = StringIO()
    show_runs(parent, Console(file=out, width=1000))
    return out.getvalue().splitlines()


def opened(folder: Path, began_at: float, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    folder.mkdir()
    monkeypatch.setattr("time.time", lambda: began_at)
    return open_record(folder, "x")


def test_runs_are_listed_newest_first_with_what_became_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_record(tmp_path / "old", opened(tmp_path / "old", 1_000.0, monkeypatch), 0)
    opened(tmp_path / "living", 3_000.0, monkeypatch)
    close_record(tmp_path / "failed", opened(tmp_path / "failed", 2_000.0, monkeypatch), 1)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / RECORD_NAME).write_text("{")
    (tmp_path / "no run").mkdir()
    head, *lines = listed(tmp_path)
    assert head.split() == ["run", "state", "began", "took", "step", "reward"]
    assert [line.split()[:2] for line in lines[:3]] == [
        ["living", "running"], ["failed", "failed"], ["old", "completed"]
    ]  # fmt: skip
    assert [line.endswith("none yet") for line in lines[:3]] == [True, False, False], (
        "an evaluation that is over has none"
    )
    assert "cannot read it" in "".join(lines[3:])


def test_a_run_whose_process_is_gone_has_vanished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = os.getpid() + (1 << 22)  # beyond what the kernel gives out
    monkeypatch.setattr("os.getpid", lambda: nobody)
    opened(tmp_path / "gone", 1_000.0, monkeypatch)
    assert listed(tmp_path)[1].split()[:2] == ["gone", "vanished"]


def test_the_time_between_two_drives_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, before = tmp_path / "resumed", opened(tmp_path / "resumed", 1_000.0, monkeypatch)
    monkeypatch.setattr("time.time", lambda: 1_060.0)
    close_record(folder, before, 143)
    monkeypatch.setattr("time.time", lambda: 9_000.0)
    open_record(folder, "resumed", before=read_record(folder))  # vanishes: its last step came after ten seconds
    balance = Balance(issued=0, in_system=0, ended=(), generated_tokens=0)
    step = StepRow(version=1, at_s=8_010.0, num_steps=9, metrics={}, staleness_counts=(), response_lengths=(),
                   group_ids=(), balance=balance)  # fmt: skip
    (folder / METRICS_FILE).write_bytes(msgspec.json.encode(step) + b"\n")
    monkeypatch.setattr("time.time", lambda: 20_000.0)
    last = open_record(folder, "resumed", before=read_record(folder))
    monkeypatch.setattr("time.time", lambda: 20_002.0)
    assert " 1 min 12 s " in listed(tmp_path)[1], "it goes on"
    close_record(folder, last, 0)
    monkeypatch.setattr("time.time", lambda: 30_000.0)
    assert " 1 min 12 s " in listed(tmp_path)[1]


def test_where_no_run_is_there_yet_it_says_where_it_looked_and_how_to_begin_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(app, ["list"])
    told = f"{tmp_path}/runs: no run is there yet; begin one with: penstock run quickstart\n"
    assert (first.exit_code, first.output) == (0, told), "runs/ comes with the first run"
    (tmp_path / "my runs").mkdir()
    named = CliRunner().invoke(app, ["list", "my runs"])
    told = f"{tmp_path}/my runs: no run is there yet; begin one with: penstock run quickstart 'run.folder=my runs'\n"
    assert (named.exit_code, named.output) == (0, told)


def test_a_folder_that_is_named_and_holds_no_runs_by_mistake_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(parent: Path) -> str:
        with pytest.raises(UserFault) as refused:
            show_runs(parent, Console(file=StringIO()))
        return str(refused.value)

    run = tmp_path / "x"
    close_record(run, opened(run, 1_000.0, monkeypatch), 0)
    assert refusal(run) == f"{run}: the folder of one run; look at it with: penstock status {run}"
    assert refusal(tmp_path / "absent").startswith(
        f"{tmp_path}/absent: no such folder; name the folder that runs are in"
    )
    assert refusal(run / RECORD_NAME).startswith(f"{run / RECORD_NAME}: a file; ")


def test_names_are_whole_on_a_narrow_terminal_and_lines_in_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "evaluate-mine-20261128-003122-20261128-004808"
    close_record(tmp_path / name, opened(tmp_path / name, 1_000.0, monkeypatch), 0)
    terminal, pipe = StringIO(), StringIO()
    show_runs(tmp_path, Console(file=terminal, width=80, force_terminal=True, no_color=True, color_system=None))
    show_runs(tmp_path, Console(file=pipe, width=80))
    _, head, first, second = terminal.getvalue().splitlines()
    assert (first, second.split()[0]) == (name, "completed")
    assert max(map(len, (head, first, second))) <= 80
    assert pipe.getvalue().splitlines()[1].split()[:2] == [name, "completed"]
