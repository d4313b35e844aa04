"""A guardian and what it guards: real processes, quick ones in place of a server."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from penstock.backends.processes.guardian import (
    Exited,
    GuardianJob,
    GuardianWord,
    LogLine,
    Started,
    decode_word,
    start_guardian,
)
from penstock.backends.processes.process_facts import environment_of, kill, marked_processes

if TYPE_CHECKING:
    from collections.abc import Collection, Generator
    from pathlib import Path

PYTHON = (sys.executable, "-I", "-S", "-c")
FAMILY = """
import os, signal, sys
def sleep():
    signal.pause()
    os._exit(0)
if os.fork() == 0:  # a child that asks nobody
    os.setsid()
    if os.fork() == 0:  # and one whose parent has gone
        os.write(1, b"orphan\\n")
        sleep()
    os._exit(0)
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
    sleep()
os.wait()
os.write(1, b"all here\\n")
sleep()
"""
"""A server with an orphan in a session of its own and a child that is stopped."""
LAUNCHER = """
import os, signal, sys
from penstock.backends.processes.guardian import GuardianJob, start_guardian
guardian = start_guardian(GuardianJob((sys.argv[1], "-I", "-S", "-c", sys.argv[2]), os.getpid(), sys.argv[3], 1000),
                          dict(os.environ))
for line in guardian.stdout:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
"""
WAIT_S = 30.0


MARK = f"TEST_MARK_{secrets.token_hex(8)}"
"""The variable that marks what this module starts, in this process: others run the same tests at the same time."""


class Guarded(NamedTuple):
    guardian: subprocess.Popen[bytes]
    mark: str
    log: Path

    def words(self) -> Generator[GuardianWord]:
        assert self.guardian.stdout is not None
        for line in self.guardian.stdout:
            yield decode_word(line)

    def until_line(self, text: str) -> list[GuardianWord]:
        """What it says until the server has written this."""
        said: list[GuardianWord] = []
        for word in self.words():
            said.append(word)
            if word == LogLine(text):
                return said
        pytest.fail(f"the guardian ended after {said}")


def mark_of(mark: str) -> bytes:
    return f"{MARK}={mark}".encode()


def guard(tmp_path: Path, code: str, *, max_log_bytes: int = 1 << 20, secret: str = "") -> Guarded:
    mark = secrets.token_hex(8)
    log = tmp_path / "server.log"
    job = GuardianJob((*PYTHON, code), os.getpid(), str(log), max_log_bytes, (secret,) if secret else ())
    return Guarded(start_guardian(job, {**os.environ, MARK: mark}), mark, log)


def wait_until_gone(processes: Collection[int]) -> None:
    """Until each of these has ended, by the kernel's word."""
    deadline_s = time.monotonic() + WAIT_S
    for pid in processes:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ready, _, _ = select.select([handle], [], [], max(deadline_s - time.monotonic(), 0))
            assert ready, f"process {pid} is still there"
        finally:
            os.close(handle)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Generator[None]:
    """Whatever a test has started is gone after it, also when it fails."""
    yield
    for pid, start_ticks in marked_processes([]).items():
        if any(variable.startswith(mark_of("")) for variable in environment_of(pid)):
            kill(pid, start_ticks)


def test_an_order_ends_every_process(tmp_path: Path) -> None:
    guarded = guard(tmp_path, FAMILY)
    guarded.until_line("all here")
    assert len(marked_processes([mark_of(guarded.mark)])) == 4  # guardian, server, orphan and stopped child
    assert guarded.guardian.stdin is not None
    guarded.guardian.stdin.close()
    assert guarded.guardian.wait(WAIT_S) == 0
    assert not marked_processes([mark_of(guarded.mark)])


def test_a_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, sys.executable, FAMILY, str(tmp_path / "server.log")],
        stdout=subprocess.PIPE, env={**os.environ, MARK: mark},
    )  # fmt: skip
    assert launcher.stdout is not None
    assert any(line == b"L all here\n" for line in launcher.stdout)
    processes = marked_processes([mark_of(mark)])
    assert len(processes) == 5
    launcher.kill()
    launcher.wait(WAIT_S)
    wait_until_gone(processes)
    assert not marked_processes([mark_of(mark)])


def test_a_killed_guardian_takes_the_main_process_with_it(tmp_path: Path) -> None:
    guarded = guard(tmp_path, "import signal; print('here', flush=True); signal.pause()")
    said = guarded.until_line("here")
    assert isinstance(said[0], Started)
    processes = marked_processes([mark_of(guarded.mark)])
    assert said[0].pid in processes
    guarded.guardian.kill()
    wait_until_gone(processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_guardian_is_an_order(tmp_path: Path, number: signal.Signals) -> None:
    guarded = guard(tmp_path, FAMILY)
    guarded.until_line("all here")
    guarded.guardian.send_signal(number)
    assert guarded.guardian.wait(WAIT_S) == 0
    assert not marked_processes([mark_of(guarded.mark)])


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)]
)
def test_the_end_of_the_main_process_is_told_and_ends_the_rest(tmp_path: Path, code: str, exit_code: int) -> None:
    guarded = guard(tmp_path, FAMILY[: FAMILY.rindex("sleep()")] + code)
    assert Exited(exit_code) in list(guarded.words())
    assert guarded.guardian.wait(WAIT_S) == 0
    assert not marked_processes([mark_of(guarded.mark)])


def test_a_launcher_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    guarded = guard(tmp_path, "for n in range(40000): print(f'{n:060d}')", max_log_bytes=1 << 30)
    started = next(guarded.words())
    assert isinstance(started, Started)
    wait_until_gone([started.pid])  # with more to tell than a pipe holds, and nobody who listens
    words = list(guarded.words())
    assert guarded.guardian.wait(WAIT_S) == 0
    assert words[-1] == Exited(0)
    assert guarded.log.read_text().splitlines() == [f"{n:060d}" for n in range(40000)]


def test_the_log_keeps_one_older_file_and_no_secret(tmp_path: Path) -> None:
    guarded = guard(tmp_path, "for n in range(100): print('key=hush', n)", max_log_bytes=500, secret="hush")
    words = list(guarded.words())
    assert guarded.guardian.wait(WAIT_S) == 0
    assert LogLine("key=(secret) 99") in words
    assert guarded.log.stat().st_mode & 0o777 == 0o600
    both = [guarded.log, guarded.log.with_name("server.log.1")]
    assert all(file.stat().st_size < 600 for file in both)
    text = "".join(file.read_text() for file in both)
    assert "hush" not in text
    assert "key=(secret) 99\n" in text


def test_a_progress_bar_is_lines(tmp_path: Path) -> None:
    guarded = guard(tmp_path, "import sys; sys.stderr.write('10%\\r50%\\r100%\\ndone')")
    assert [word.text for word in guarded.words() if isinstance(word, LogLine)] == ["10%", "50%", "100%", "done"]
    guarded.guardian.wait(WAIT_S)
