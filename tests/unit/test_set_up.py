"""What the set-up says on the terminal when pip cannot find anything, and when somebody interrupts it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HOUSE = Path(__file__).parents[2]
NEEDED = (".ci/set_up", ".ci/python", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")


def test_a_set_up_that_fails_shows_the_end_of_its_log_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    for name in NEEDED:
        shutil.copy(HOUSE / name, tmp_path / name)
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PYTHON": sys.executable}
    done = subprocess.run(
        [".ci/set_up", "run"],
        cwd=tmp_path,
        env={**os.environ, **offline},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[0].startswith("Setting up in .venv with Python 3.")
    assert "The set-up failed (environment)" in done.stdout
    assert "    ERROR: No matching distribution found for pip>=25.1" in lines
    assert f"All of it: {tmp_path}/.venv/set-up.log" in lines
    assert "give the same command again" in done.stdout
    assert len(lines) <= 40
    assert "No matching distribution found" in (tmp_path / ".venv" / "set-up.log").read_text()
    assert not (tmp_path / ".venv" / ".ready-run").exists()


def test_a_set_up_that_is_interrupted_says_so_and_blames_nothing(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(HOUSE / ".ci/set_up", tmp_path / ".ci/set_up")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for fifo in ("begun", "never"):
        os.mkfifo(tmp_path / fifo)
    pip = tmp_path / ".venv/bin/python"
    pip.write_text("#!/bin/sh\necho begun >begun\nread -r _ <never\n")
    pip.chmod(0o755)
    heeded = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv('.ci/set_up', ['set_up', 'test'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", heeded],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert (tmp_path / "begun").read_text() == "begun\n"
        os.killpg(process.pid, signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted. The same command goes on from here" in told
    assert "failed" not in told
    assert not (tmp_path / ".venv/.ready-test").exists()
