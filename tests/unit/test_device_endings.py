"""Who shares devices is given up when nothing of it is left: what the supervisor waits for, and what ends that."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

from penstock.backends.processes.process_facts import is_running, start_ticks_of
from penstock.messages.names import LEARNER
from penstock.runtime.hosts.processes.control import Address, ProcessStarted
from penstock.runtime.hosts.processes.endings import TIMEOUT_S, Endings
from penstock.runtime.hosts.processes.incarnations import Incarnation
from penstock.runtime.hosts.processes.job import ACTOR_VARIABLE
from penstock.runtime.hosts.processes.whole_end import end_whole

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.runtime.hosts.processes.ports import Launcher


class TwoMachines:
    """Has two machines end a process, when a test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.futures: list[Future[list[int]]] = []

    def end_whole(self, name: str, process: ProcessStarted) -> list[Future[list[int]]]:
        self.asked.append(name)
        self.futures = [Future(), Future()]
        return self.futures


class Bench:
    """What is ended, and what was said of it."""

    def __init__(self) -> None:
        self.machines = TwoMachines()
        self.failures: list[str] = []
        self.went_on: list[tuple[str, float]] = []
        launcher: Launcher = self.machines  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        self.endings = Endings({"engine/1", LEARNER}, launcher, self.failures.append)

    def end(self, name: str, now_s: float = 0.0, *, why: str = "", has_started: bool = True) -> None:
        incarnation = Incarnation(name, 1, 0.0)
        if has_started:
            address = Address(name, 1, "tcp://127.0.0.1:1", b"")
            incarnation.process = ProcessStarted(address=address, pid=1, start_ticks=1, node_id="here")
        self.endings.end(incarnation, now_s, lambda now_s: self.went_on.append((why or name, now_s)))


def test_who_has_devices_of_its_own_is_not_waited_for() -> None:
    bench = Bench()
    bench.end("engine/0", 3.0)
    assert bench.went_on == [("engine/0", 3.0)]
    assert bench.machines.asked == []


def test_who_has_not_started_yet_holds_nothing() -> None:
    bench = Bench()
    bench.end("engine/1", has_started=False)
    assert bench.went_on == [("engine/1", 0.0)]


def test_it_goes_on_when_the_last_machine_has_nothing_left_and_as_was_said_first() -> None:
    bench = Bench()
    bench.end("engine/1", why="it is to leave")
    bench.end("engine/1", why="it is lost")
    assert bench.machines.asked == ["engine/1"]
    first, second = bench.machines.futures
    first.set_result([])
    bench.endings.look(1.0)
    assert "engine/1" in bench.endings
    assert bench.went_on == []
    second.set_result([])
    bench.endings.look(2.0)
    assert bench.went_on == [("it is to leave", 2.0)]
    assert "engine/1" not in bench.endings


def test_a_process_that_cannot_be_ended_fails_the_run_and_nobody_is_told_that_the_device_is_free() -> None:
    bench = Bench()
    bench.end(LEARNER)
    bench.machines.futures[0].set_result([4711])
    bench.endings.look(1.0)
    [story] = bench.failures
    assert story.startswith("learner 1 was to end, and processes [4711] could not be ended within 60 s")
    assert bench.went_on == []


def test_a_machine_that_does_not_answer_fails_the_run_at_the_deadline_but_not_for_the_supervisors_own_sleep() -> None:
    bench = Bench()
    bench.end(LEARNER)
    bench.machines.futures[0].set_result([])
    bench.endings.look(TIMEOUT_S - 1)
    bench.endings.forgive(TIMEOUT_S + 100)
    bench.endings.look(2 * TIMEOUT_S + 99)
    assert bench.failures == []
    bench.endings.look(2 * TIMEOUT_S + 100)
    assert "on a machine that does not answer could not be ended" in bench.failures[0]
    assert bench.went_on == []


# --- real processes ---------------------------------------------------------------------------------------------------


MARK = f"test-{os.getpid()}"
MARKS = [[f"{ACTOR_VARIABLE}={MARK}".encode()]]


@pytest.fixture
def actor() -> Generator[subprocess.Popen[bytes]]:
    """A process whose own environment says nothing, with a marked one in a session of its own, which has an unmarked
    one below it. They outlive it."""
    below = (
        "import signal, subprocess; subprocess.Popen(['sleep', '600'], env={}); print('up', flush=True); signal.pause()"
    )
    marked = f"[sys.executable, '-c', {below!r}], env={{**os.environ, {ACTOR_VARIABLE!r}: {MARK!r}}}"
    code = f"import os, subprocess, sys; subprocess.Popen({marked}, start_new_session=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()
        end_whole(None, MARKS)


def descendants_with_ticks(pid: int) -> dict[int, int]:
    from penstock.backends.processes.process_facts import descendants_of

    return {each: start_ticks_of(each) for each in descendants_of(pid)}


def test_what_an_actor_has_started_ends_with_it(actor: subprocess.Popen[bytes]) -> None:
    whole = descendants_with_ticks(actor.pid)
    assert len(whole) == 2
    assert end_whole((actor.pid, start_ticks_of(actor.pid)), MARKS) == []
    assert not any(is_running(pid, ticks) for pid, ticks in whole.items())


def test_what_outlives_an_actor_is_found_by_its_mark(actor: subprocess.Popen[bytes]) -> None:
    whole, ticks = descendants_with_ticks(actor.pid), start_ticks_of(actor.pid)
    actor.kill()
    actor.wait(10)
    assert any(is_running(pid, ticks) for pid, ticks in whole.items())
    assert end_whole((actor.pid, ticks), MARKS) == []
    assert not any(is_running(pid, ticks) for pid, ticks in whole.items())


def test_processes_that_do_not_end_in_time_are_named(
    actor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None are killed here, as if they were amid a call of a driver that does not return."""

    def spare(_pid: int, _start_ticks: int) -> bool:
        return True

    monkeypatch.setattr("penstock.runtime.hosts.processes.whole_end.kill", spare)
    whole = descendants_with_ticks(actor.pid)
    began_s = time.monotonic()
    left = end_whole((actor.pid, start_ticks_of(actor.pid)), MARKS, timeout_s=0.2)
    assert set(left) == {actor.pid, *whole}
    assert time.monotonic() - began_s < 60
