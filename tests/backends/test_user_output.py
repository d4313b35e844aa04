"""What users' functions print: it reaches our log within bounds, and never holds up the function."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

import pytest

from penstock.backends.processes import user_output
from penstock.backends.processes.function_process import FunctionProcess
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards.functions import REWARD
from penstock.backends.rewards.process import WorkerProcess
from penstock.backends.rewards.wire import SAID, Answer, RewardCall
from penstock.runtime.preflight.function_trial import NamedFunction, check_loads

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 60.0


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of our standard error."""
    path = tmp_path / "scorer-1.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    monkeypatch.setattr(user_output, "STREAMS", (descriptor, descriptor))
    monkeypatch.setattr(user_output, "_SPENT", [0])
    return path


def answered(process: WorkerProcess) -> list[str]:
    """What it says next, by kind."""
    was_ready = process.ready is not None
    while not process.is_gone:
        assert select.select([process.socket], [], [], TIMEOUT_S)[0]
        said = [type(each).__name__ for each in process.heard()]
        if not was_ready and process.ready is not None:
            return ["Ready", *said]
        if said:
            return said
    return []


def call(number: int) -> RewardCall:
    return RewardCall(
        id=number, timeout_s=TIMEOUT_S, prompt="", response="", conversation="", label="", metadata=b"",
        truncated=False, tokens=b"", prompt_tokens=b"", row=0, group_id=0, index=0,
    )  # fmt: skip


def play(tmp_path: Path, body: str, *, num_calls: int) -> None:
    """Call a reward function so often, one call after the other."""
    file = tmp_path / "mine.py"
    file.write_text(f"import sys, os\ndef reward(row):\n    {body}\n    return 1.0\n")
    process = WorkerProcess(REWARD, f"{file}:reward", None)
    try:
        assert answered(process) == ["Ready"]
        for number in range(num_calls):
            process.call([call(number)])
            assert answered(process) == ["Judged"]
    finally:
        process.end()


def test_a_megabyte_a_call_is_cut_and_what_was_cut_is_said(tmp_path: Path, log: Path) -> None:
    play(tmp_path, "print('x' * 1_000_000, flush=True)", num_calls=4)
    text = log.read_text()
    assert 0 < text.count("x") <= 5 * user_output.STRETCH_BYTES
    assert "more bytes that" in text
    assert "mine.py:reward printed are left out" in text


def test_what_a_function_prints_within_bounds_is_kept_whole(tmp_path: Path, log: Path) -> None:
    play(tmp_path, "print('a line of mine', flush=True); os.write(2, b'and of C\\n')", num_calls=3)
    assert sorted(log.read_text().splitlines()) == ["a line of mine"] * 3 + ["and of C"] * 3


def test_a_log_has_an_end(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_output, "TOTAL_BYTES", 100)
    play(tmp_path, "print('x' * 60, flush=True)", num_calls=5)
    text = log.read_text()
    assert text.count("x") == 100 - text[:100].count("\n")
    assert text.rstrip().endswith("of a log are kept]")


def test_a_log_that_cannot_be_written_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(user_output, "STREAMS", (full, full))
    play(tmp_path, "print('x' * 200_000, flush=True)", num_calls=2)
    os.close(full)


def test_a_silent_process_prints_nowhere(log: Path) -> None:
    process = FunctionProcess[Answer]("this", said=SAID, is_silent=True)
    assert select.select([process.socket], [], [], TIMEOUT_S)[0]
    process.end()
    assert log.read_text() == ""


def test_a_function_that_never_loads_is_told_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("def reward(response): return 1\n")
    (tmp_path / "hangs.py").write_text("import threading\nthreading.Event().wait()\n")
    functions = [
        NamedFunction("reward.function", REWARD, f"{tmp_path}/good.py:reward"),
        NamedFunction("filter.function", "filter", f"{tmp_path}/hangs.py:keep"),
    ]
    check_loads(functions[:1], TIMEOUT_S)
    with pytest.raises(UserCodeError, match=r"^(filter|reward)\.function: .* did not load within 3 s"):
        check_loads(functions, 3.0)
