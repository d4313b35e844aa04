"""A run on a Ray cluster that is there already, with an engine on a node that is not the driver's."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING

import msgspec
import pytest
from host_echo import RunPlan
from host_two_nodes import two_nodes

from penstock.backends.processes.process_facts import is_running, start_ticks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from host_launched import Launched

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ENDLESS = RunPlan(num_groups=1_000_000, tick_s=0.02)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two Ray nodes on this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with two_nodes() as started:
        yield started


def test_a_stopped_actor_on_another_node_is_killed_there_and_replaced(
    launched: Callable[..., Launched], address: str
) -> None:
    blocks = {
        "runtime": {"host": "ray", "ray_address": address, "heartbeat_s": 0.5, "heartbeat_timeout_s": 10.0},
        "engines": {"backend": "simulated", "count": 2},
    }
    run = launched(ENDLESS, msgspec.json.encode(blocks).decode())
    run.wait_for_steps()
    wait_for(lambda: "engine/1 1 is process" in log_of(run))
    driver_node = node_of(run, "buffer")
    assert node_of(run, "filter") == driver_node  # the control plane stays together
    far, *_ = [name for name in ("engine/0", "engine/1") if node_of(run, name) != driver_node]
    pid = pid_of(run, far, 1)
    ticks = start_ticks_of(pid)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: f"{far} 2 is process" in log_of(run))
    wait_for(lambda: not is_running(pid, ticks))
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (130, "penstock: stopped by SIGINT\n")
    wait_for(lambda: not [command for command in run.members().values() if "ray::" in command])
    run.assert_nothing_is_left()


def log_of(run: Launched) -> str:
    return (run.folder / "logs" / "driver.log").read_text()


def node_of(run: Launched, name: str) -> str:
    [node] = re.findall(rf"{name} 1 is process \d+ on node (\w+)", log_of(run))
    return str(node)


def pid_of(run: Launched, name: str, epoch: int) -> int:
    [pid] = re.findall(rf"{name} {epoch} is process (\d+)", log_of(run))
    return int(pid)


def wait_for(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)
