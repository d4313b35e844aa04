"""The local host: what is forked, what is not, and what becomes of a process that cannot be."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from host_echo import ENGINE, NAMES, RunPlan
from host_harness import EchoRun, start_host

from penstock.backends.processes.process_facts import environment_of
from penstock.messages.errors import UserFault
from penstock.messages.names import LEARNER, SCORER
from penstock.runtime.hosts.local.local_host import LocalHost, devices_of
from penstock.runtime.hosts.local.warm import Modules, modules_of
from penstock.runtime.hosts.local.wire import ChildKind, memory_file
from penstock.runtime.hosts.processes.job import DriverJob
from penstock.runtime.hosts.processes.ports import OutcomeKind
from penstock.runtime.hosts.processes.prepare_process import PreparationError
from penstock.runtime.run.placement import Block, Placement
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 60.0
NO_ROWS = """
run: {name: none}
model: {make: xs}
data: {path: rows.jsonl}
reward: {function: random}
learner: {groups_per_batch: 2}
"""


@pytest.fixture
def local() -> Iterator[LocalHost]:
    host = start_host("local")
    assert isinstance(host, LocalHost)
    yield host
    host.stop()


def job_of(folder: Path) -> DriverJob:
    """A job whose rows are there, and of which none can be used."""
    (folder / "scenario.yaml").write_text(NO_ROWS)
    (folder / "rows.jsonl").write_text("[]\n")
    scenario = load_scenario(folder / "scenario.yaml")
    return DriverJob(run_id=folder.name, run_folder=str(folder), temp_folder="", scenario=scenario)


def test_actors_are_copies_of_one_process_and_show_their_names(local: LocalHost, tmp_path: Path) -> None:
    run = EchoRun(local, tmp_path, RunPlan(num_groups=100))
    seen: dict[str, tuple[str, list[bytes]]] = {}

    def act(run: EchoRun) -> None:
        for name in NAMES:
            if (process := run.process(name, 1)) is not None and name not in seen:
                with open(f"/proc/{process.pid}/comm") as comm:
                    seen[name] = comm.read().strip(), environment_of(process.pid)

    assert run.play(act).kind is OutcomeKind.COMPLETED
    assert {name: title for name, (title, _) in seen.items()} == {name: name[:15] for name in NAMES}
    assert len({tuple(environment) for _, environment in seen.values()}) == 1


def test_an_actor_with_gpus_is_an_interpreter_of_its_own_that_sees_them_alone(
    local: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [node.num_gpus for node in local.nodes()] == [2]
    placement = Placement((Block((LEARNER,), 1, ("local",)), Block((ENGINE,), 1, ("local",))))
    run = EchoRun(local, tmp_path, RunPlan(num_groups=100), launcher=local.launcher(placement))
    seen: dict[str, bool] = {}

    def act(run: EchoRun) -> None:
        for name, devices in ((LEARNER, b"3"), (ENGINE, b"5"), (SCORER, b"")):
            if (process := run.process(name, 1)) is not None and name not in seen:
                seen[name] = b"CUDA_VISIBLE_DEVICES=" + devices in environment_of(process.pid)

    assert run.play(act).kind is OutcomeKind.COMPLETED
    assert seen == {LEARNER: True, ENGINE: True, SCORER: False}
    assert run.witness.losses == []


def test_who_shares_a_block_sees_its_devices() -> None:
    blocks = (Block(("engine/0", LEARNER), 2, ("local",)), Block(("engine/1",), 1, ("local",)))
    devices = devices_of(Placement(blocks, num_learner_ranks=1), ("0", "1", "2"))
    assert devices == {"engine/0": "0,1", LEARNER: "0", "engine/1": "2"}
    over_two = Block(("engine/0", "engine/1", LEARNER), 4, ("local",), (2, 2))
    devices = devices_of(Placement((over_two,), num_learner_ranks=3), ("4", "5", "6", "7"))
    assert devices == {"engine/0": "4,5", "engine/1": "6,7", LEARNER: "4,5,6"}


def test_a_thread_before_the_fork_ends_the_host_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    host = LocalHost(Modules(("host_with_thread",)))
    reader, writer = os.pipe()
    try:
        host.kill(1)  # nobody, so nothing happens
        host.fork(ChildKind.ACTOR, "nobody", RunPlan(), writer)
        end_s = time.monotonic() + DEADLINE_S
        while not host.broken():
            assert time.monotonic() < end_s, "it goes on"
            time.sleep(0.01)  # between two looks at a process; nothing is timed by it
        assert host.broken() == "the process that actors are forked from ended with exit code 1"
    finally:
        os.close(reader)
        os.close(writer)
        host.stop()
    assert "has 2 threads: ['" in capfd.readouterr().err


def test_what_needs_little_is_forked_before_the_rest_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(here))
    monkeypatch.setenv("PENSTOCK_TEST_GATES", str(tmp_path))
    for gate in ("first", "later"):
        os.mkfifo(tmp_path / gate)
    job = job_of(tmp_path)
    model = msgspec.structs.replace(job.scenario.model, make=None, path=str(tmp_path))
    job = msgspec.structs.replace(job, scenario=msgspec.structs.replace(job.scenario, model=model))
    host = LocalHost(Modules(("host_gate_first",), ("host_gate_later",), prepares_early=True))
    answer = memory_file()
    try:
        waits, killed = (host.fork(ChildKind.ACTOR, "waits", RunPlan(), answer) for _ in range(2))
        host.kill(killed)
        early = host.prepare(job)
        (tmp_path / "first").write_bytes(b"")
        with pytest.raises(UserFault):  # its model is none
            early.finish(lambda _: None)
        assert gone_of(host, 1) == {killed}
        (tmp_path / "later").write_bytes(b"")
        assert gone_of(host, 2) == {waits, killed + 1}
    finally:
        os.close(answer)
        host.stop()


def gone_of(host: LocalHost, count: int) -> set[int]:
    """The numbers of the next processes that are gone."""
    gone: set[int] = set()
    while len(gone) < count:
        readable, _, _ = select.select([host], [], [], DEADLINE_S)
        assert readable, f"only {gone} are gone"
        gone |= set(host.gone())
        assert not host.broken()
    return gone


def test_a_job_that_cannot_be_prepared_says_what_to_mend(local: LocalHost, tmp_path: Path) -> None:
    phases: list[str] = []
    with pytest.raises(UserFault, match=r"rows\.jsonl"):
        local.prepare(job_of(tmp_path)).finish(phases.append)
    assert phases[0] == "making the model"


def test_a_preparation_that_dies_is_told(local: LocalHost, tmp_path: Path) -> None:
    preparation = local.prepare(job_of(tmp_path))
    local.kill(1)
    with pytest.raises(PreparationError, match="its process is gone"):
        preparation.finish(lambda _: None)


def test_nothing_that_the_zygote_imports_starts_a_thread(tmp_path: Path) -> None:
    modules = modules_of(job_of(tmp_path).scenario, "penstock.runtime.run.wiring")
    code = (
        "import importlib, os, sys\n"
        f"for module in {(*modules.first, *modules.later)!r}: importlib.import_module(module)\n"
        "print(len(os.listdir('/proc/self/task')), 'ray' in sys.modules)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=environment)
    assert done.stdout == "1 False\n", done.stderr


def test_a_last_word_of_any_length_arrives(local: LocalHost, tmp_path: Path) -> None:
    """More than a pipe holds, which nobody empties while the process ends."""
    story = "no" * 500_000
    outcome = EchoRun(local, tmp_path, RunPlan(user_error="filter", story=story)).play()
    assert outcome.kind is OutcomeKind.USER_ERROR
    assert outcome.story == story
