"""Engines whose GPUs come with nodes that join a Ray while the run goes on; the GPUs are declared, not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from host_growing import growing
from host_launched import HERE
from live_run import LiveRun
from test_elastic_run import CHAOS, await_state, penstock, recorded_engines, trained_by

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.ledger import EngineNoted
from penstock.runtime.observability.operations import Scaling, read_operations

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

DEADLINE_S = 60.0
GPU_TIMEOUT_S = 40
OPTIONS = (
    "runtime.host=ray",
    "runtime.heartbeat_s=0.5",
    "engines.count=1",
    "engines.min=1",
    "engines.max=3",
    f"engines.gpu_timeout_s={GPU_TIMEOUT_S}",
    "learner.groups_per_batch=4",
    "learner.warm_start=null",
    "sampling.max_response_tokens=64",
    "run.num_steps=100000",
)


def test_groups_of_gpus_are_asked_for_wait_for_nodes_and_go_back() -> None:
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    own = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {"PYTHONPATH": path}
    command = [sys.executable, str(HERE / "host_late_gpus.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=own)
    assert done.stdout.endswith("all is well\n"), done.stdout + done.stderr


def test_a_run_begins_with_what_it_needs_and_an_engine_joins_with_a_node(tmp_path: Path) -> None:
    """The head has two GPUs, for the learner and the first engine."""
    with growing(num_gpus=2) as nodes:
        options = (*OPTIONS, f"runtime.ray_address={nodes.address}")
        with LiveRun(CHAOS / "torch.yaml", tmp_path, options) as run:
            run.await_steps(2)
            folder = run.folder
            penstock("scale", str(folder), "engines=+1")
            waits = "waits for a node with 1 GPU"
            run.await_log(f"engine/1: it {waits}, {GPU_TIMEOUT_S} s at most")
            run.await_steps(more=2)  # nobody waits for it
            wait_for(lambda: f"engine/1 {waits}, for " in penstock("status", str(folder)))  # written once a second
            node_id = nodes.add(1)
            run.await_log("engine/1 1: up")
            wait_for(lambda: waits not in penstock("status", str(folder)))
            assert node_id.startswith(node_of(run, "engine/1"))
            wait_for(lambda: num_devices(folder, "engine-1-1") == 1)
            step = await_state(run, lambda: "engine/1" in trained_by(folder), 4)
            penstock("scale", str(folder), "engine/1")
            await_state(run, lambda: "engine/1 has left, with nothing left to do" in run.output, step)
            wait_for(lambda: nodes.free()[node_id] == 1 and nodes.num_actors(node_id) == 0)
            penstock("scale", str(folder), "engines=+2")  # there is room for one of them
            run.await_log(r"the run goes on without engine/[12]: a node with 1 GPU has not come")
            await_state(run, lambda: len(recorded_engines(folder)[-1]) == 2, step)
            run.await_steps(more=2)
            run.interrupt()
    scalings = [each for each in read_operations(folder) if isinstance(each, Scaling)]
    assert scalings[-1].reason == f"a node with 1 GPU has not come within engines.gpu_timeout_s = {GPU_TIMEOUT_S}"
    with closing(SqliteReader(folder / LEDGER_FILE)) as ledger:
        noted = [entry for entry in ledger.entries() if isinstance(entry, EngineNoted)]
    told = [(each.engine, re.sub(r"after \d+ s", "after N s", each.text)) for each in noted]
    waited = f"it {waits}, {GPU_TIMEOUT_S} s at most"
    assert told[:2] == [("engine/1", waited), ("engine/1", "its GPUs have come, after N s")]
    assert audit_ledger(folder / LEDGER_FILE).is_clean


@pytest.mark.slow
def test_an_autoscaler_brings_the_node_of_an_engine_and_takes_it_back_when_that_has_left(tmp_path: Path) -> None:
    with growing(num_gpus=2, gpus_of_a_node=1) as nodes:
        options = (*OPTIONS, "engines.gpu_timeout_s=100", f"runtime.ray_address={nodes.address}")
        with LiveRun(CHAOS / "torch.yaml", tmp_path, options) as run:
            run.await_steps(2)
            folder, first = run.folder, set(nodes.free())
            penstock("scale", str(folder), "engines=+1")
            step = await_state(run, lambda: "engine/1" in trained_by(folder), 2)
            [second] = set(nodes.free()) - first
            assert second.startswith(node_of(run, "engine/1"))
            penstock("scale", str(folder), "engines=-1")
            step = await_state(run, lambda: set(nodes.free()) == first, step)
            run.await_steps(step + 2)
            summary = run.interrupt()
    assert summary.restarts == ()
    assert audit_ledger(folder / LEDGER_FILE).is_clean


def node_of(run: LiveRun, name: str) -> str:
    return str(re.findall(rf"{name} \d+ is process \d+ on node (\w+)", run.log)[-1])


def num_devices(folder: Path, log: str) -> int:
    """That its process sees, as its log says."""
    found = re.findall(r"CUDA_VISIBLE_DEVICES: (\S+)", (folder / "logs" / f"{log}.log").read_text())
    return len(found[0].split(",")) if found else 0


def wait_for(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.1)
