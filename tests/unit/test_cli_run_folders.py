"""Every command that takes a run, given what is none, or a run whose ledger is damaged: one message, and no trace."""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Final

import pytest
from sample_runs import small_run
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typer._click.core import Command

RUN: Final = "RUN"
OTHER: Final = "OTHER"
"""A run with which nothing is wrong."""
COMMANDS: Final = {
    "audit": (RUN,),
    "calibrate": (RUN,),
    "compare": (OTHER, RUN),
    "convert": (RUN, "out"),
    "dashboard": (RUN, "--port", "0"),
    "diff-steps": (RUN, OTHER),
    "engine join": (RUN, "http://10.0.0.7:30000"),
    "evaluate": (RUN,),
    "explain": (RUN,),
    "gateway": (RUN,),
    "ledger": (RUN, "--sql", "SELECT count(*) FROM samples"),
    "pause": (RUN,),
    "policy": (RUN, "sync"),
    "replay": (RUN,),
    "report": (RUN,),
    "resume": (RUN, "run.num_steps=100"),
    "run": ("quickstart", "--only", "learner", "--from", RUN),
    "samples": (RUN,),
    "save": (RUN,),
    "scale": (RUN, "engines=+1"),
    "status": (RUN,),
    "stop": (RUN,),
    "trace": (RUN,),
}
READ_THE_LEDGER: Final = (
    "audit", "calibrate", "compare", "explain", "ledger", "report", "resume", "run", "samples", "status", "trace"
)  # fmt: skip
"""What the others have to say about a run that has ended stands in its other files; the dashboard shows what it can."""


def commands(group: TyperGroup, before: str = "") -> Iterator[tuple[str, Command]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, f"{name} ")
        else:
            yield before + name, command


def test_these_are_all_commands_that_take_a_run() -> None:
    program = get_command(app)
    assert isinstance(program, TyperGroup)
    takes = {
        name
        for name, command in commands(program)
        if any(re.search(rf"\b{RUN}\b", str(parameter.metavar)) for parameter in command.params)
    }
    assert takes | {"evaluate"} == set(COMMANDS), "evaluate takes a run or another folder with a model"


def refusal(command: str, run: Path, other: Path) -> str:
    """What the command says; that it is for the user to mend is in its exit code."""
    words = [{RUN: str(run), OTHER: str(other)}.get(word, word) for word in COMMANDS[command]]
    done = CliRunner().invoke(app, [*command.split(), *words], catch_exceptions=True)
    assert isinstance(done.exception, UserFault), (done.output, done.exception)
    said = str(done.exception)
    assert "\n" not in said
    return said


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("other"))


@pytest.fixture(autouse=True)
def nothing_is_driven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: object, **__: object) -> int:
        raise AssertionError("a run was started")

    for module in ("launch", "resume"):
        monkeypatch.setattr(f"penstock.runtime.launch.{module}.drive", never)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_run_s_folder_is_named(command: str, other: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, told in (
        ("nosuch", r"no such folder"),
        ("file", r"a file"),
        ("empty", r"not a run's folder|nothing was recorded|has written no steps|config\.json"),
    ):
        said = refusal(command, tmp_path / name, other)
        assert f"{tmp_path / name}" in said
        assert re.search(told, said), said
        assert "scenario.yaml: cannot read" not in said


@pytest.mark.parametrize("command", READ_THE_LEDGER)
@pytest.mark.parametrize("damage", ["emptied", "cut off", "overwritten"])
def test_a_damaged_ledger_is_named_with_what_to_do(command: str, damage: str, other: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(other, run)
    ledger = run / LEDGER_FILE
    with closing(sqlite3.connect(ledger)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert not list(run.glob(f"{LEDGER_FILE}-*"))
    whole = ledger.read_bytes()
    ledger.write_bytes({"emptied": b"", "cut off": whole[: len(whole) // 3], "overwritten": b"x" * len(whole)}[damage])
    said = refusal(command, run, other)
    assert str(ledger) in said
    assert "restore it from a copy" in said
