"""The log of an actor's process: bounded, with what was printed last in it, and never in the way."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PRINTS = """
import faulthandler, os, sys
from pathlib import Path
from penstock.runtime.hosts.processes import actor_log

actor_log.MAX_BYTES = 10_000
actor_log.open_log(Path(sys.argv[1]))
for number in range(5_000):
    print(f"token {number}")
os.system("echo of a child")
sys.stderr.write("\\ud800 is no character\\n")
faulthandler.dump_traceback(file=sys.stderr)
raise ValueError("the last word")
"""


def printed(path: Path) -> int:
    """The exit code of a process that prints more than the log may hold."""
    done = subprocess.run([sys.executable, "-c", PRINTS, str(path)], capture_output=True, timeout=60, check=False)
    assert not done.stdout
    assert not done.stderr
    return done.returncode


def test_a_hook_that_prints_without_end_keeps_two_files_full_and_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "learner-1.log"
    assert printed(path) == 1
    assert {each.name for each in path.parent.iterdir()} == {"learner-1.log", "learner-1.log.1"}
    last, before = path.read_text(), path.with_name("learner-1.log.1").read_text()
    assert len(last) < 11_000
    assert 10_000 <= len(before) < 10_100
    assert before.endswith("\n")
    numbers = [line for line in (before + last).splitlines() if line.startswith("token ")]
    assert numbers == [f"token {number}" for number in range(5_000 - len(numbers), 5_000)]
    assert "of a child\n\\ud800 is no character\n" in last
    assert "most recent call first" in last
    assert last.endswith("ValueError: the last word\n")


def test_printing_on_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    full = tmp_path / "logs"
    full.mkdir()
    (full / "learner-1.log").symlink_to("/dev/full")
    assert printed(full / "learner-1.log") == 1


@pytest.mark.parametrize("num_before", [0, 3])
def test_what_is_there_stays(tmp_path: Path, num_before: int) -> None:
    path = tmp_path / "learner-1.log"
    path.write_text("before\n" * num_before)
    code = "import sys; from pathlib import Path; from penstock.runtime.hosts.processes.actor_log import open_log; "
    subprocess.run(
        [sys.executable, "-c", code + "open_log(Path(sys.argv[1])); print('after')", str(path)], check=True, timeout=60
    )
    assert path.read_text() == "before\n" * num_before + "after\n"
