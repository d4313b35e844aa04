"""Who gets which GPUs on a Ray cluster: two nodes on this machine, each with four GPUs that are declared, not there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from host_echo import RunPlan
from host_launched import HERE, Launched
from host_two_nodes import two_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ENDLESS = RunPlan(num_groups=1_000_000, tick_s=0.02)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes(num_gpus=4) as started:
        yield started


def blocks(address: str, engines: dict[str, Any]) -> str:
    runtime = {"host": "ray", "ray_address": address, "heartbeat_s": 0.5, "heartbeat_timeout_s": 10.0}
    learner = {"backend": "torch", "num_ranks": engines.pop("num_ranks", 1)}
    scenario = {"runtime": runtime, "learner": learner, "engines": {"backend": "sglang", **engines}}
    return msgspec.json.encode(scenario).decode()


def test_every_process_sees_its_gpus_and_keeps_them(launched: Callable[..., Launched], address: str) -> None:
    """A learner of two ranks over two engines of one GPU, two more of these, one of four over two nodes: all eight."""
    more = [
        {"backend": "sglang", "count": 2},
        {"backend": "sglang", "sglang": {"tp_size": 4, "nnodes": 2}},
    ]
    engines = {"placement": "colocate", "num_ranks": 2, "count": 2, "more": more}
    run = launched(ENDLESS, blocks(address, engines))
    run.wait_for_steps()
    names = ["engine/0", "engine/1", "engine/2", "engine/3", "engine/4"]
    sizes = [1, 1, 1, 1, 2]  # of the last one the other two are on the other node
    seen = {name: devices_of(run, name) for name in names}
    assert [len(devices) for devices in seen.values()] == sizes
    assert devices_of(run, "learner") == seen["engine/0"] + seen["engine/1"]
    assert node_of(run, "learner", 1) == node_of(run, "engine/0", 1) == node_of(run, "engine/1", 1)
    taken = Counter((node_of(run, name, 1), device) for name in names for device in seen[name])
    assert taken.most_common(1)[0][1] == 1, taken
    wait_for(lambda: "engine/1 1 is process" in driver_log(run))
    [pid] = re.findall(r"engine/1 1 is process (\d+)", driver_log(run))
    os.kill(int(pid), signal.SIGKILL)
    assert devices_of(run, "engine/1", epoch=2) == seen["engine/1"]
    assert node_of(run, "engine/1", 2) == node_of(run, "engine/1", 1)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (130, "penstock: stopped by SIGINT\n")


def test_more_than_the_cluster_has_is_refused_before_anything_starts(
    launched: Callable[..., Launched], address: str
) -> None:
    run = launched(ENDLESS, blocks(address, {"count": 4, "sglang": {"tp_size": 2}}))
    assert run.end() == (
        2,
        "penstock: engines: learner asked for 1 GPU; engine/0 … engine/3 asked for 2 GPUs each. 8 are free, 4 + 4 on "
        "2 nodes. The nearest that fits is engines.count=3\n",
    )
    assert not list((run.folder / "logs").glob("engine*"))


def test_an_engine_over_two_nodes_has_its_second_process_on_the_other_one(address: str, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "host_node_ranks.py"), address, str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {"PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.stdout.endswith("all is well\n"), done.stdout + done.stderr


def devices_of(run: Launched, name: str, *, epoch: int = 1) -> list[str]:
    """What its process sees, as its log says."""
    log = run.folder / "logs" / f"{name.replace('/', '-')}-{epoch}.log"
    found: list[str] = []

    def is_there() -> bool:
        found[:] = re.findall(r"CUDA_VISIBLE_DEVICES: (\S+)", log.read_text() if log.exists() else "")
        return bool(found)

    wait_for(is_there)
    return found[0].split(",")


def node_of(run: Launched, name: str, epoch: int) -> str:
    wait_for(lambda: f"{name} {epoch} is process" in driver_log(run))
    [node] = re.findall(rf"{name} {epoch} is process \d+ on node (\w+)", driver_log(run))
    return str(node)


def driver_log(run: Launched) -> str:
    return (run.folder / "logs" / "driver.log").read_text()


def wait_for(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)
