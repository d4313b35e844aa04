"""Runs that a Python program begins through ``penstock.api``, on the local host: to the end, stopped, left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import api
from penstock.messages.errors import UserFault
from penstock.runtime.launch.runs import has_ended, read_record

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(280)

WAIT_S = 120.0
SMALL: dict[str, object] = {
    "run": {"name": "small", "num_steps": 2},
    "data": {"path": "lines:100"},
    "sampling": {"samples_per_group": 2},
    "engines": {"backend": "simulated", "simulated": {"response_tokens_median": 4, "token_s": 0.001}},
    "learner": {"backend": "simulated", "groups_per_batch": 2, "simulated": {"step_s": 0.01, "publish_s": 0.01}},
    "runtime": {"host": "local"},
    "observability": {"report": False},
}
ENDLESS = {"run.num_steps": 100_000}

PROGRAM = """
import sys
from penstock import run

SMALL = {small}
made = run(SMALL, {{"run.folder": sys.argv[1], "run.num_steps": 100000}}, wait=False, progress=False)
next(made.steps())
print(made.folder, flush=True)
sys.stdin.read()
{end}
"""

INTERRUPTED = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit that it is ignored
from penstock import run

run({small}, {{"run.folder": sys.argv[1], "run.num_steps": 100000}}, progress=False)
"""


def small(parent: Path, **overrides: object) -> dict[str, object]:
    return {"run.folder": parent, **overrides}


@pytest.mark.long_run
def test_a_run_is_followed_to_its_end_stopped_and_gone_on_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = api.run(SMALL, small(tmp_path, **ENDLESS), wait=False, progress=False)
    with pytest.raises(UserFault, match="is running, driven by process"):
        api.resume(run, progress=False)
    followed = run.steps()
    assert [next(followed).version for _ in range(2)] == [1, 2]
    assert run.status.state == "running"
    assert run.stop(timeout_s=WAIT_S).status.state == "stopped"
    versions = [row.version for row in followed]
    assert versions == list(range(3, 3 + len(versions))), "what came before the stop, and then the end"
    assert api.audit(run).is_clean

    begun = max(versions, default=2)
    again = api.resume(run.folder, {"run.num_steps": begun + 20}, progress=False)
    assert again.folder == run.folder
    assert (again.status.state, again.status.version) == ("completed", begun + 20)
    assert again.summary is not None
    assert again.summary.completed
    assert api.audit(again).is_clean
    assert capfd.readouterr() == ("", "")


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"reward\.function: .*there is no file"):
        api.run(SMALL, small(tmp_path, **{"reward.function": tmp_path / "mine.py:reward"}), progress=False)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_stops_the_run_and_is_raised(tmp_path: Path) -> None:
    """In a program of its own, which can be interrupted and this one not."""
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(small=SMALL), str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    pause = threading.Event()
    while not list(tmp_path.glob("*/run.json")):
        assert program.poll() is None
        pause.wait(0.02)  # between two looks at a file; nothing is timed by it
    program.send_signal(signal.SIGINT)
    said = program.communicate(timeout=WAIT_S)[1]
    assert said.rstrip().endswith("KeyboardInterrupt"), said
    (run,) = api.list_runs(tmp_path)
    assert run.status.state == "stopped"


@pytest.mark.long_run
def test_a_run_begins_outside_of_the_main_thread(tmp_path: Path) -> None:
    runs: list[api.Run] = []
    thread = threading.Thread(target=lambda: runs.append(api.run(SMALL, small(tmp_path), progress=False)))
    thread.start()
    thread.join(WAIT_S)
    assert [run.status.state for run in runs] == ["completed"]


@pytest.mark.long_run
@pytest.mark.parametrize("kill", [None, signal.SIGKILL])
def test_a_run_ends_with_its_program(kill: signal.Signals | None, tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(small=SMALL, end=""), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    folder = Path(program.stdout.readline().strip())
    record = read_record(folder)
    end: Callable[[], object] = program.stdin.close if kill is None else program.kill
    end()
    program.wait(WAIT_S)
    assert has_ended(folder, record, WAIT_S)
    assert read_record(folder).state == "stopped"
    assert api.audit(folder).is_clean
    program.stdout.close()
