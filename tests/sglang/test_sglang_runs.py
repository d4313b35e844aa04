"""Whole runs on stock servers, one for each staleness policy, in which one server is killed and another is stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from live_run import LiveRun

from penstock.backends.engines.decode_passes import bands_in
from penstock.backends.engines.served.base.log_passes import UNREADABLE
from penstock.backends.engines.served.base.settings import OWNER_VARIABLE
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.processes.process_facts import marked_processes, title_of
from penstock.messages.ledger import BatchLeased, EngineNoted
from penstock.runtime.observability.actors_file import read_actors
from penstock.runtime.observability.jsonl import read_rows
from penstock.runtime.observability.segments import files_in
from penstock.runtime.observability.trackers import EVENTS_FOLDER, EventRow, read_run_events, read_steps
from penstock.runtime.prediction.calibrate import calibrate
from penstock.runtime.prediction.passes_fit import FEWEST_PASSES
from penstock.runtime.prediction.recorded import read_recording

if TYPE_CHECKING:
    from penstock.backends.engines.served.sglang.environment import SglangEnvironment
    from penstock.messages.samples import Group

pytestmark = [pytest.mark.sglang, pytest.mark.ray]

SERVING_S = 240.0
RUN_S = 520.0
"""Two starts of servers one after the other, on a machine that may be busy; alone it takes two minutes."""
MADE, NUM_MADE = "GenerationEnded", 32
NUM_STEPS = 6
"""Batches trained after both servers were lost."""
ENDLESS = "run.num_steps=100000"
"""How long a server takes to start is unknown: the test says when there has been enough, not the number of steps."""
SMALL = (
    ENDLESS,
    "run.seed=3",
    "learner.groups_per_batch=8",
    "learner.warm_start.num_steps=120",
    "sampling.max_response_tokens=64",
    "learner.save_every=100000",  # samples are kept for as long as no checkpoint has them behind it
    "runtime.heartbeat_timeout_s=30",
)
OFTEN = "engines.sglang.decode_log_interval=2"
"""Responses are so short that somebody comes in most stretches of the usual length."""
BESIDE = 'engines.more=[{"backend": "torch", "count": 1, "slots": 1, "device": "cpu"}]'
"""An embedded engine beside the servers; it serves long before them."""


def processes_of(run: LiveRun, engine: str, title: str) -> list[int]:
    """The processes of an engine's server with this in their title."""
    marks = [f"{OWNER_VARIABLE}={engine}".encode(), f"PENSTOCK_RUN_FOLDER={run.folder}".encode()]
    return [pid for pid in marked_processes(marks) if title in title_of(pid)]


def events_of(run: LiveRun, engine: str, *words: str) -> list[EventRow]:
    """These events of an engine, its incarnations one after the other. No other line is decoded: servers start
    meanwhile, and want the cores."""
    marks = [f'"{word}"'.encode() for word in words]
    prefix = f"{engine.replace('/', '-')}-"
    logs = [path for path in files_in(run.folder / EVENTS_FOLDER) if path.name.startswith(prefix)]

    def is_meant(line: bytes) -> bool:
        return any(mark in line for mark in marks)

    return [row for path in logs for row in read_rows(path, EventRow, is_row=is_meant) if row.event in words]


def await_samples(run: LiveRun, engine: str, *, incarnation: int = 1) -> None:
    """Until so many incarnations of this engine have made some."""
    deadline_s = time.monotonic() + SERVING_S
    while True:
        made = Counter(row.epoch for row in events_of(run, engine, MADE))
        if sum(count >= NUM_MADE for count in made.values()) >= incarnation:
            return
        assert run.process.poll() is None, f"the run has ended; {engine} made {made}\n{run.output}"
        assert time.monotonic() < deadline_s, f"{engine} made {made}\n{run.output}"
        time.sleep(0.5)  # between two looks at a file; nothing is timed by it


def serving_scheduler(run: LiveRun, engine: str) -> int:
    """The scheduler of an engine's server, once it has made some samples."""
    await_samples(run, engine)
    schedulers = processes_of(run, engine, "scheduler")
    assert schedulers, run.output
    return min(schedulers)  # a child that it has just forked bears its name until it has one of its own


def groups_trained(folder: Path) -> list[Group]:
    """In the order in which they were."""
    ledger = SqliteReader(folder / LEDGER_FILE)
    try:
        leases = [entry for entry in ledger.entries() if isinstance(entry, BatchLeased)]
        assert [lease.version for lease in leases] == list(range(1, len(leases) + 1))
        return [group for lease in leases for group in ledger.payloads(lease.group_ids)]
    finally:
        ledger.close()


def versions_of(groups: list[Group]) -> set[int]:
    """In the spans of all their samples."""
    parts = [part for group in groups for sample in group.samples for part in sample.parts]
    return {span.version for part in parts for span in part.spans if span.num_tokens}


def engines_of(groups: list[Group]) -> set[str]:
    """Those that made a sample."""
    return {sample.engine for group in groups for sample in group.samples}


def versions_announced(folder: Path) -> set[int]:
    """As the Buffer heard of them."""
    rows = [row for row in read_run_events(folder) if row.actor == "buffer" and row.event == "VersionAnnounced"]
    return {int(row.summary.split()[1]) for row in rows}


@pytest.mark.timeout(580)
@pytest.mark.parametrize(
    ("policy", "max_staleness", "transport"),
    [
        # A policy knows of no engine: tests/integration/test_runs.py has them all with embedded ones. Servers take
        # weights over each transport in test_conformance.py and test_weights_push.py, where one dies amid a push.
        pytest.param("sync", 0, "disk", marks=pytest.mark.slow),
        pytest.param("one_step_off", 1, "distributed", marks=pytest.mark.slow),
        pytest.param("fully_async", 2, "shared_memory", marks=pytest.mark.slow),
        ("fully_async", 2, "network"),
    ],
)
def test_a_run_survives_the_loss_of_its_servers_under_every_policy(
    environment: SglangEnvironment,
    tmp_path: Path,
    policy: str,
    max_staleness: int,
    transport: str,
) -> None:
    assert environment.is_cpu
    overrides = (
        *SMALL,
        f"staleness.policy={policy}",
        f"staleness.max_staleness={max_staleness}",
        f"weights.transport={transport}",
    )
    with LiveRun("sglang_cpu.yaml", tmp_path, overrides, timeout_s=RUN_S) as run:
        run.await_steps(2)
        os.kill(serving_scheduler(run, "engine/0"), signal.SIGKILL)
        os.kill(serving_scheduler(run, "engine/1"), signal.SIGSTOP)
        for engine in ("engine/0", "engine/1"):
            await_samples(run, engine, incarnation=2)
        run.await_steps(len(read_steps(run.folder)) + NUM_STEPS)
        summary = run.interrupt()
        folder = run.folder
        passed_on = [step.metrics.get("engine/weights_passed_on_bytes") or 0.0 for step in read_steps(folder)]
    assert (passed_on[-1] > 0) == (transport == "network"), "from server to server, what can be"
    assert {"engine/0", "engine/1"} <= {restarts.name for restarts in summary.restarts}
    assert audit_ledger(folder / LEDGER_FILE).is_clean
    groups = groups_trained(folder)
    versions = versions_of(groups)
    assert versions <= versions_announced(folder)
    assert len(versions) > NUM_STEPS // 2
    assert engines_of(groups) == {"engine/0", "engine/1"}
    assert not processes_of(run, "engine/0", "sglang") + processes_of(run, "engine/1", "sglang")


# Both kinds keep one contract, in test_conformance.py, and the rest of a run does not ask of which kind an engine is;
# where several are placed is in tests/integration/test_host_placement.py.
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_servers_and_an_embedded_engine_serve_one_run(environment: SglangEnvironment, tmp_path: Path) -> None:
    assert environment.is_cpu
    with LiveRun("sglang_cpu.yaml", tmp_path, (*SMALL, "engines.count=1", BESIDE), timeout_s=RUN_S) as run:
        run.await_steps(1)
        for engine in ("engine/0", "engine/1"):
            await_samples(run, engine)
        run.interrupt()
        folder = run.folder
    assert audit_ledger(folder / LEDGER_FILE).is_clean


FLOAT16 = (
    "run.num_steps=4",
    "run.seed=3",
    "model.dtype=float16",
    "engines.count=1",
    "reward.function=random",
    "staleness.policy=sync",  # so that every token is trained by the weights that made it
    "staleness.max_staleness=0",
    "sampling.max_response_tokens=32",
    "learner.groups_per_batch=4",
    "learner.warm_start=null",
    "runtime.heartbeat_timeout_s=30",
)


# Loss scale and overflows are in tests/backends/test_torch_learner_float16.py, and how weights of two types travel in
# tests/backends/test_contracts.py: what is left is that a server computes in it.
@pytest.mark.slow
@pytest.mark.timeout(580)
def test_a_server_and_the_learner_agree_in_float16(environment: SglangEnvironment, tmp_path: Path) -> None:
    assert environment.is_cpu
    with LiveRun("sglang_cpu.yaml", tmp_path, FLOAT16, timeout_s=RUN_S) as run:
        summary = run.finish()
        steps = read_steps(run.folder)
        assert [step.version for step in steps] == [1, 2, 3, 4]
        assert all(step.metrics["train/loss_scale"] for step in steps)
        for step in steps:  # as far apart as float16 rounds, and not as bfloat16 does
            assert 1e-6 < (step.metrics["train/train_rollout_logprob_abs_diff"] or 0.0) < 2.5e-3
        assert summary.restarts == ()
        assert audit_ledger(run.folder / LEDGER_FILE).is_clean


def await_swap(run: LiveRun, engine: str, incarnation: int) -> None:
    """Until this incarnation has taken weights. It may be taking others already."""
    deadline_s = time.monotonic() + SERVING_S
    while all(row.epoch != incarnation for row in events_of(run, engine, "WeightsSwapped")):
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline_s, f"{engine} took no weights\n{run.output}"
        time.sleep(0.05)  # between two looks at a file; nothing is timed by it


def noted_engines(folder: Path) -> list[EngineNoted]:
    ledger = SqliteReader(folder / LEDGER_FILE)
    try:
        return [entry for entry in ledger.entries() if isinstance(entry, EngineNoted)]
    finally:
        ledger.close()


# Which servers are not taken over, and why, is in test_taking_over.py.
@pytest.mark.both_hosts
@pytest.mark.timeout(580)
def test_a_replaced_engine_takes_its_running_server_over(environment: SglangEnvironment, tmp_path: Path) -> None:
    assert environment.is_cpu
    with LiveRun("sglang_cpu.yaml", tmp_path, (*SMALL, "engines.count=1", OFTEN), timeout_s=RUN_S) as run:
        run.await_steps(1)
        serving_scheduler(run, "engine/0")
        before = set(processes_of(run, "engine/0", "sglang::"))
        await_swap(run, "engine/0", 1)
        os.kill(run.pid_of("engine/0"), signal.SIGSTOP)
        await_samples(run, "engine/0", incarnation=2)
        await_swap(run, "engine/0", 2)
        os.kill(run.pid_of("engine/0"), signal.SIGKILL)
        await_samples(run, "engine/0", incarnation=3)
        assert set(processes_of(run, "engine/0", "sglang::")) == before, run.output
        run.await_steps(len(read_steps(run.folder)) + NUM_STEPS)
        await_passes(run)
        summary = run.interrupt()
        folder, output = run.folder, run.output
    assert [(each.name, each.count) for each in summary.restarts] == [("engine/0", 2)]
    noted = noted_engines(folder)
    assert [entry.engine_epoch for entry in noted] == [2, 3]
    assert all("has taken over its running SGLang server" in entry.text for entry in noted)
    assert output.count("has taken over its running SGLang server") == 2
    assert audit_ledger(folder / LEDGER_FILE).is_clean
    assert versions_of(groups_trained(folder)) <= versions_announced(folder)
    assert not processes_of(run, "engine/0", "sglang"), "no server outlives its run"
    check_passes(folder)


def metrics_of(folder: Path) -> dict[str, float | None]:
    """What the newest incarnation of the only engine has said last."""
    said = read_actors(folder)
    assert said is not None
    [metrics] = [actor.metrics for actor in said.actors if actor.name == "engine/0"]
    return metrics


def await_passes(run: LiveRun) -> None:
    """Until there are passes with few requests, and with twice as many, that tell something: how many run together is
    up to the machine."""
    deadline_s = time.monotonic() + SERVING_S
    while True:
        told = [band.least for band in bands_in(metrics_of(run.folder)) if band.passes >= FEWEST_PASSES]
        if len(told) > 1:
            return
        assert run.process.poll() is None, run.output
        assert time.monotonic() < deadline_s, f"passes were told of with {told} requests\n{run.output}"
        time.sleep(0.2)  # between two looks at a file; nothing is timed by it


def check_passes(folder: Path) -> None:
    """The last engine, which has not started its server, has timed its passes, and calibration goes by that."""
    metrics = metrics_of(folder)
    assert metrics[UNREADABLE] == 0
    bands = bands_in(metrics)
    for band in bands:
        assert band.least * band.passes <= band.requests < 2 * band.least * band.passes
        assert band.context_tokens > band.requests
        assert 1e-4 < band.seconds / band.passes < 1.0
    models = calibrate([read_recording(folder)])
    [fit] = [fit for fit in models.fits if fit.what == "decode passes by their requests"]
    assert fit.count == sum(band.passes for band in bands if band.passes >= FEWEST_PASSES)
    assert any(text.startswith("decode.passes: servers on a CPU") for text in models.unknown)
