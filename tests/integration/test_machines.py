"""Runs over machines that share nothing but a file system and a network, of which one is cut off, slowed or killed."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from machines import cluster, refusal

from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from machines import Cluster

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(refusal()), reason=refusal()),
]

SETTINGS = (
    "runtime.host=ray",
    "model.make=xs",
    "learner.groups_per_batch=8",
    "learner.warm_start.num_steps=10",
    "learner.save_every=2",
    "filter.drop_zero_spread=false",  # so short a warm start earns few rewards
    "runtime.heartbeat_s=0.5",
    "runtime.heartbeat_timeout_s=6",
)
STOP_S = 60.0
WHOLE_S = 800.0
GOOD_REWARD = 0.8
TWO_ENGINES = (*SETTINGS, "engines.count=2")  # Ray spreads them
SEATED = """
from dataclasses import replace

from penstock.backends.engines.spec import ONE_GPU
from penstock.backends.simulated.spec import SIMULATED_ENGINE

SPEC = replace(SIMULATED_ENGINE, size=lambda options: ONE_GPU)
"""
"""Modelled engines, of a package of somebody's: each has a speed that it is told, and takes a GPU from Ray."""
MODELLED = """
run: {name: seated, num_steps: 100000}
data: {path: "lines:2000"}
sampling: {samples_per_group: 4, max_response_tokens: 64}
reward: {function: lines, timeout_s: 10}
filter: {drop_zero_spread: false}
staleness: {policy: fully_async, max_staleness: 2}
engines:
  backend: seated
  count: 2
  slots: 8
  simulated: {response_tokens_median: 64, response_tokens_sigma: 0, prefill_s: 0, token_s: 0.02, token_load_s: 0,
              fetch_weights_s: 0.02, apply_weights_s: 0.02}
learner: {backend: simulated, groups_per_batch: 4, save_every: 4, simulated: {step_s: 0.1, publish_s: 0.02}}
runtime: {heartbeat_s: 0.5, heartbeat_timeout_s: 6}
"""
"""A step takes the time of 16 responses, which two engines with all their slots make at once."""
SEATED_ENGINES = ("engine/0", "engine/1")
FEW_STEPS = 4
MEASURED_STEPS = 12
LEAST_RATIO = 0.75
"""With one engine of the two it would be a half."""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Cluster]:
    """A node ``near`` with the driver, and one ``far``."""
    with cluster(tmp_path) as machines:
        machines.add("near", "head")
        machines.add("far", "worker")
        yield machines


def test_engines_of_two_machines_get_every_version_and_one_machine_is_killed(two: Cluster, tmp_path: Path) -> None:
    with endless(two, 2, TWO_ENGINES, tmp_path) as run:
        run.await_steps(4)
        far = engine_of(run, two, "far")
        assert num_versions_of(run, far) >= 2  # nothing of the learner's machine but the file system is there
        two.machines["far"].kill()
        await_back(run, far)
        stop(run, two)
    assert node_of(run, far) == node_of(run, "learner")  # the only one that is left


@pytest.mark.slow
def test_when_their_node_is_back_all_of_its_engines_serve_again_and_the_run_has_the_speed_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{seated_package(tmp_path)}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    scenario = tmp_path / "seated.yaml"
    scenario.write_text(MODELLED)
    with cluster(tmp_path) as machines:
        machines.add("near", "head")
        machines.add("far", "worker", num_gpus=2)
        with LiveRun(scenario, tmp_path, ("runtime.host=ray",), through=machines.command("near", 2)) as run:
            run.await_steps(FEW_STEPS)
            run.await_steps(more=MEASURED_STEPS)
            first = {node_of(run, name) for name in SEATED_ENGINES}
            machines.machines["far"].kill()
            before = steps_per_s(run, FEW_STEPS)
            machines.add("back", "worker", num_gpus=2)
            for name in SEATED_ENGINES:
                run.await_log(f"{name} [2-9]: up")
            run.await_steps(more=FEW_STEPS)
            since = read_steps(run.folder)[-1].version
            run.await_steps(more=MEASURED_STEPS)
            after = steps_per_s(run, since)
            stop(run, machines)
    second = {node_of(run, name) for name in SEATED_ENGINES}
    assert len(first) == len(second) == len(first | second | {node_of(run, "buffer")}) - 2 == 1
    assert after > LEAST_RATIO * before, f"{before:.2f} steps a second before, {after:.2f} after"
    made = samples_made(run, since)
    assert made.keys() == set(SEATED_ENGINES)
    assert min(made.values()) > LEAST_RATIO * max(made.values()), made


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "tbf rate 1mbit burst 64kb latency 400ms", "netem delay 50ms loss 1%"])
def test_a_machine_that_is_cut_off_comes_back_to_a_run_that_went_on_without_it(
    two: Cluster, tmp_path: Path, how: str
) -> None:
    if how and (complaint := two.slow("far", how)):
        pytest.skip(f"this kernel cannot: {complaint}")
    with endless(two, 2, TWO_ENGINES, tmp_path) as run:
        run.await_steps(4)
        far = engine_of(run, two, "far")
        two.cut("far")
        run.await_log(f"{far} 1 is lost: it was not heard")
        two.mend("far")
        await_back(run, far)
        stop(run, two)


@pytest.mark.slow
@pytest.mark.timeout(WHOLE_S + 100)
def test_the_quickstart_learns_over_two_machines_what_it_learns_on_one(two: Cluster, tmp_path: Path) -> None:
    settings = ("runtime.host=ray", "engines.count=2")
    with LiveRun("quickstart.yaml", tmp_path, settings, timeout_s=WHOLE_S, through=two.command("near", 2)) as run:
        summary = run.finish()
    assert len({node_of(run, f"engine/{index}") for index in range(2)}) == 2
    assert summary.restarts == ()
    rewards = [step.metrics[REWARD] or 0.0 for step in read_steps(run.folder)]
    assert sum(rewards[-10:]) / 10 > GOOD_REWARD  # on one it ends at 0.87 to 0.89


@pytest.mark.slow
def test_the_learner_goes_on_from_its_checkpoint_on_another_machine(tmp_path: Path) -> None:
    with cluster(tmp_path) as machines:
        machines.add("near", "head")
        machines.add("first", "worker", num_gpus=1)
        with endless(machines, 2, (*SETTINGS, "engines.device=cpu"), tmp_path) as run:
            run.await_steps(4)
            first = node_of(run, "learner")
            assert first != node_of(run, "buffer")
            machines.machines["first"].kill()
            machines.add("second", "worker", num_gpus=1)
            run.await_log("learner [2-9]: up")
            run.await_steps(more=4)
            stop(run, machines)
    assert node_of(run, "learner") not in (first, node_of(run, "buffer"))


def seated_package(folder: Path) -> Path:
    """What is on the path of a run that has such engines: a module, and the entry point that names it."""
    site = folder / "site"
    (site / "seated-1.dist-info").mkdir(parents=True)
    (site / "seated.py").write_text(SEATED)
    (site / "seated-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: seated\nVersion: 1\n")
    (site / "seated-1.dist-info" / "entry_points.txt").write_text("[penstock.engines]\nseated = seated:SPEC\n")
    return site


def steps_per_s(run: LiveRun, since: int) -> float:
    """From this version to the newest."""
    steps = [step for step in read_steps(run.folder) if step.version >= since]
    return (steps[-1].version - steps[0].version) / (steps[-1].at_s - steps[0].at_s)


def samples_made(run: LiveRun, since: int) -> dict[str, int]:
    """By engine: samples with tokens of a version after this one."""
    query = "SELECT engine, count(*) FROM samples WHERE newest_version > ? GROUP BY engine"
    with closing(sqlite3.connect(f"file:{run.folder / LEDGER_FILE}?mode=ro", uri=True)) as ledger:
        return dict(ledger.execute(query, (since,)).fetchall())


def endless(machines: Cluster, num_nodes: int, settings: Sequence[str], folder: Path) -> LiveRun:
    """A run from the machine ``near``, which is stopped by the test."""
    through = machines.command("near", num_nodes)
    return LiveRun("fully_async.yaml", folder, (*settings, "run.num_steps=100000"), through=through)


def await_back(run: LiveRun, engine: str) -> None:
    """Until it is replaced and has answered."""
    run.await_log(f"{engine} [2-9]: up")  # Ray may place it on the lost machine once more
    run.await_steps(more=4)


def stop(run: LiveRun, machines: Cluster) -> None:
    """End it, and look whether anything was lost."""
    command = [sys.executable, "-m", "penstock.runtime.cli", "stop", str(run.folder)]
    stopped = machines.machines["near"].start(command, run.parent / "stop.log")
    assert stopped.wait(STOP_S) == 0
    run.process.wait(STOP_S)
    steps = [step.version for step in read_steps(run.folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert audit_ledger(run.folder / LEDGER_FILE).findings == ()


def engine_of(run: LiveRun, machines: Cluster, name: str) -> str:
    """The engine that is on this machine."""
    [found] = [f"engine/{index}" for index in range(2) if machines.host(name) in line_of(run, f"engine/{index}")]
    return found


def node_of(run: LiveRun, actor: str) -> str:
    return line_of(run, actor).partition(" on node ")[2].partition(",")[0]


def line_of(run: LiveRun, actor: str) -> str:
    """Of the driver's log, about its newest incarnation."""
    return [line for line in run.log.splitlines() if f" {actor} " in line and " is process " in line][-1]


def num_versions_of(run: LiveRun, engine: str) -> int:
    """Versions of weights that it has made tokens with."""
    query = "SELECT count(DISTINCT newest_version) FROM samples WHERE engine = ?"
    with closing(sqlite3.connect(f"file:{run.folder / LEDGER_FILE}?mode=ro", uri=True)) as ledger:
        return int(ledger.execute(query, (engine,)).fetchone()[0])
