"""What the tests of users' mistakes share: a folder in which everything is right, one change to it, and a command.

Of each mistake it is asked that the command ends with its exit code and one message, without a stack trace, and that
nothing was started and no run's folder is left.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest

from penstock.backends.checkpoint.make import make_model
from penstock.runtime.cli.app import main

if TYPE_CHECKING:
    from pathlib import Path

SCENARIO = """\
run: {name: mine, num_steps: 2}
model: {path: model, max_context: 128}
data: {path: rows.jsonl}
reward: {function: rewards.py:reward}
sampling: {max_response_tokens: 32}
learner: {groups_per_batch: 2}
"""
ROWS = "".join(json.dumps({"prompt": f"{number}+1=", "label": str(number + 1)}) + "\n" for number in range(8))
REWARDS = "def reward(response, label):\n    return float(response.strip() == label)\n"
PRINTS = "import sys\nsys.stderr.write('x' * 100000)\n"
CPU_LIMIT_S = 20.0
"""Far above what a check may take: this is CPU time, of a machine that may be slow."""


Files = Mapping[str, str | bytes | dict[str, Any] | None]


class Mistake(NamedTuple):
    """One of them."""

    name: str
    command: str
    """Words with blanks between; ``RUN`` is a run of the scenario."""
    says: tuple[str, ...]
    """What the message has: where, what was found, what to do."""
    files: Files = {}  # noqa: RUF012 - never written to
    """Written over those that are right; None removes one, a mapping changes the keys of a JSON file."""
    code: int = 2
    lines: int = 1
    """Of the message."""


class Place:
    """A folder in which everything is right."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_model("xs", folder / "model", seed=0)
        for name, text in {"s.yaml": SCENARIO, "rows.jsonl": ROWS, "rewards.py": REWARDS}.items():
            (folder / name).write_text(text)

    def copied(self, folder: Path, files: Files) -> Path:
        """As somebody has it who made a mistake."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink(missing_ok=True)
            elif isinstance(content, dict):
                path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return folder


def words_of(command: str) -> list[str]:
    """Of the command line."""
    return [word for part in command.split() for word in (("run", "s.yaml") if part == "RUN" else (part,))]


def check(mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Make it, and look at what the user sees."""
    before = set(folder.rglob("*"))
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for module in ("launch", "resume"):
        monkeypatch.setattr(f"penstock.runtime.launch.{module}.drive", _never)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100000")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "argv", ["penstock", *words_of(mistake.command)])
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115 - its end is the process's
    start_s = sum(os.times()[:4])
    with pytest.raises(SystemExit) as end:
        main()
    cpu_s = sum(os.times()[:4]) - start_s
    out, err = capsys.readouterr()
    message = err or out
    assert end.value.code == mistake.code, message
    for part in mistake.says:
        assert part in message, f"{part!r} is not in: {message}"
    assert "Traceback" not in out + err
    assert not err.startswith("penstock: ") or err.count("\n") == mistake.lines, err
    assert set(folder.rglob("*")) - before <= set(folder.rglob("__pycache__*")), "something was written"
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children, "something was left running"
    assert "ray" not in sys.modules or not sys.modules["ray"].is_initialized()
    assert cpu_s < CPU_LIMIT_S


def _never(*_: object, **__: object) -> int:
    raise AssertionError("a run was started")
