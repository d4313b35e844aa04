"""Engines that join and leave a run of real processes, told from another process."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_run import LiveRun
from short_runs import NO_EVALUATION
from typer.testing import CliRunner

from penstock import open_run
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.runtime.chaos.throughput import Throughput
from penstock.runtime.cli.app import app
from penstock.runtime.observability.operations import Scaling, read_operations
from penstock.runtime.observability.trackers import read_activity, read_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

pytestmark = pytest.mark.timeout(540)

CHAOS = Path(__file__).parents[1] / "chaos"
FOLLOWS_S = 20
"""In which a run is as quick as its engines are many."""
WINDOW_S = 5.0
ALONE = 10
"""Steps after an engine has left: three batches may still have samples that it made."""


def penstock(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, f"{words}: {done.output}"
    return " ".join(done.stdout.split())


def rows(folder: Path, query: str) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        return list(database.execute(query))


def recorded_engines(folder: Path) -> list[list[str]]:
    return [json.loads(names) for (names,) in rows(folder, "SELECT names FROM engines ORDER BY sequence")]


def trained_by(folder: Path) -> set[str]:
    return {engine for (engine,) in rows(folder, "SELECT DISTINCT engine FROM samples WHERE state = 'trained'")}


def slept(folder: Path) -> set[str]:
    """Who has given a device up for a while."""
    return {name for name, rows in read_activity(folder).items() if any(row.activity == "asleep" for row in rows)}


def await_state(run: LiveRun, holds: Callable[[], bool], first_step: int) -> int:
    """Until this holds; the step by which it does."""
    step = first_step
    while not holds():
        step += 1
        run.await_steps(step)
    return step


def await_later(run: LiveRun, seconds: float) -> None:
    """Until a step so much later, by the run's clock, than the last one."""
    until_s = read_steps(run.folder)[-1].at_s + seconds
    while read_steps(run.folder)[-1].at_s < until_s:
        run.await_steps(more=1)


def has_left(run: LiveRun, name: str) -> bool:
    return f"{name} has left, with nothing left to do" in run.output


@pytest.mark.both_hosts
def test_one_engine_two_engines_one_engine_with_real_models(tmp_path: Path) -> None:
    options = (
        "engines.count=1",
        "engines.max=2",
        "learner.groups_per_batch=4",
        "learner.warm_start=null",
        "sampling.max_response_tokens=64",
        "run.num_steps=100000",
    )
    with LiveRun(CHAOS / "torch.yaml", tmp_path, options) as run:
        run.await_steps(3)
        folder = run.folder
        assert "the engines are engine/0, engine/1 from here on" in penstock("scale", str(folder), "engines=+1")
        step = await_state(run, lambda: "engine/1" in trained_by(folder), 3)
        assert "the engines are engine/1 from here on" in penstock("scale", str(folder), "engine/0")
        await_state(run, lambda: has_left(run, "engine/0"), step)
        told = open_run(folder)
        with pytest.raises(UserFault, match=r"engines\.min is 1"):
            told.scale_engines(-1)
        with pytest.raises(UserFault, match=r"engines\.max allows, which is 2"):
            told.scale_engines(2)
        with pytest.raises(UserFault, match="engine/0 cannot leave: the engines of the run are engine/1"):
            told.scale_engines(leaving=("engine/0",))
        run.await_steps(more=ALONE)
        summary = run.interrupt()
    assert summary.restarts == (), "who leaves is not replaced, and no loss"
    assert recorded_engines(folder) == [["engine/0"], ["engine/0", "engine/1"], ["engine/1"]]
    query = f"SELECT DISTINCT engine FROM samples WHERE state = 'trained' AND version > {summary.version - 4}"
    last = rows(folder, query)
    assert last == [("engine/1",)]
    assert audit_ledger(folder / LEDGER_FILE).is_clean


@pytest.mark.slow  # a minute by the clock
def test_speed_follows_from_one_engine_to_three_and_back(tmp_path: Path) -> None:
    options = (
        "engines.count=1",
        "engines.max=3",
        "engines.slots=8",
        "engines.simulated.token_s=0.008",  # modelled, so how quick an engine is does not depend on the machine
        "learner.simulated.step_s=0.05",
        "run.num_steps=100000",
        *NO_EVALUATION,
    )
    with LiveRun(CHAOS / "modelled.yaml", tmp_path, options) as run:
        run.await_steps(8)
        folder = run.folder
        for words in ("engines=+2", "engines=-2"):
            penstock("scale", str(folder), words)
            await_later(run, FOLLOWS_S + 2 * WINDOW_S)
        summary = run.interrupt()
    steps = read_steps(folder)
    speed = Throughput([(step.at_s, float(sum(step.response_lengths))) for step in steps], window_s=WINDOW_S)
    at_s = {step.version: step.at_s for step in steps}  # of the last step before it
    _, joined, left = [each.version for each in read_operations(folder) if isinstance(each, Scaling)]
    joined_s, left_s = at_s[joined], at_s[left]
    alone = speed.median_rate(steps[2].at_s, joined_s)
    assert alone is not None
    assert max(speed.rate(joined_s + after_s) for after_s in range(FOLLOWS_S)) > 0.8 * 3 * alone
    last = speed.median_rate(left_s + FOLLOWS_S, steps[-1].at_s)
    assert last is not None
    assert 0.7 * alone < last < 1.4 * alone
    assert [len(names) for names in recorded_engines(folder)] == [1, 3, 1]
    assert summary.max_staleness <= 2
    assert summary.tokens_lost_estimate == 0
    assert steps[-1].metrics["prompt_source/lost_tokens"] == 0, "none is made twice"
    assert audit_ledger(folder / LEDGER_FILE).is_clean


@pytest.mark.nightly_on_ray
def test_an_engine_that_is_lent_the_learners_device_generates_while_it_waits(tmp_path: Path) -> None:
    options = (
        "engines.count=1",
        "engines.max=2",
        "engines.lent=1",
        "engines.lend_after_s=0.05",
        "engines.slots=1",  # so the learner waits for nearly all of a step, however quick the machine
        "engines.device=cpu",
        "learner.device=cpu",
        "learner.groups_per_batch=4",
        "learner.warm_start=null",
        "sampling.max_response_tokens=128",
        "run.num_steps=100000",
    )
    with LiveRun(CHAOS / "torch.yaml", tmp_path, options) as run:
        run.await_steps(2)
        folder = run.folder
        penstock("scale", str(folder), "engines=+1")
        await_state(run, lambda: "engine/1" in trained_by(folder), 3)
        run.interrupt()
    assert recorded_engines(folder) == [["engine/0"], ["engine/0", "engine/1"]]
    assert audit_ledger(folder / LEDGER_FILE).is_clean
    assert slept(folder) >= {"learner", "engine/1"}
    assert "engine/0" not in slept(folder)


@pytest.mark.long_run
@pytest.mark.nightly_on_ray
def test_an_engine_joins_where_generation_binds_and_says_why(tmp_path: Path) -> None:
    options = (
        "engines.count=1",
        "engines.max=2",
        "engines.slots=4",
        "engines.scale=by_bound",
        "engines.scale_hold_s=2",
        "learner.groups_per_batch=4",
        "learner.warm_start=null",
        "sampling.max_response_tokens=128",
        "runtime.heartbeat_s=0.5",
        "run.num_steps=100000",
    )
    with LiveRun(CHAOS / "torch.yaml", tmp_path, options) as run:
        run.await_steps(3)
        folder = run.folder
        await_state(run, lambda: "engine/1" in trained_by(folder), 3)
        run.interrupt()
        output = run.output
    assert "the engines are engine/0, engine/1 from here on" in output
    assert "generation binds: in " in output
    assert recorded_engines(folder)[:2] == [["engine/0"], ["engine/0", "engine/1"]]
    scalings = [each for each in read_operations(folder) if isinstance(each, Scaling)]
    assert scalings[0].reason == ""
    assert scalings[1].reason.startswith("generation binds: in ")
    assert "1 → 2 engines" in penstock("explain", str(folder))
    assert audit_ledger(folder / LEDGER_FILE).is_clean


@pytest.mark.nightly_on_ray
def test_a_run_that_is_resumed_has_the_engines_that_it_had(tmp_path: Path) -> None:
    options = ("engines.count=1", "engines.min=1", "engines.max=3", "run.num_steps=100000", *NO_EVALUATION)
    with LiveRun(CHAOS / "modelled.yaml", tmp_path, options) as run:
        run.await_steps(2)
        folder = run.folder
        open_run(folder).scale_engines(2)
        step = await_state(run, lambda: trained_by(folder) >= {"engine/1", "engine/2"}, 2)
        penstock("scale", str(folder), "engine/0")
        await_state(run, lambda: has_left(run, "engine/0"), step)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(20)
    last_step = read_steps(folder)[-1].version + ALONE
    with LiveRun.resumed(folder, [f"run.num_steps={last_step}"]) as run:
        assert run.finish().version == last_step
    assert recorded_engines(folder)[-1] == ["engine/1", "engine/2"]
    query = f"SELECT DISTINCT engine FROM samples WHERE state = 'trained' AND version > {last_step - 2} ORDER BY engine"
    last = rows(folder, query)
    assert last == [("engine/1",), ("engine/2",)]
    assert audit_ledger(folder / LEDGER_FILE).is_clean


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("SIGTERM", marks=pytest.mark.both_hosts),
        # The same word from elsewhere: where it comes from is in tests/unit/test_machine_notice.py.
        pytest.param("file", marks=[pytest.mark.slow, pytest.mark.both_hosts]),
        pytest.param("url", marks=[pytest.mark.slow, pytest.mark.both_hosts]),
    ],
)
def test_an_engine_whose_machine_is_taken_hands_back_every_token_and_comes_back(tmp_path: Path, how: str) -> None:
    file = tmp_path / "notice"
    with served(tmp_path) as address:
        url = f"{address}/{file.name}"  # there is nothing under it before the file is
        word = f"engines.notice_url={url}" if how == "url" else f"engines.notice_file={file}"
        options = ("engines.notice_s=5", word, "run.num_steps=100000", "learner.warm_start=null")
        told = {"SIGTERM": "SIGTERM", "file": f"the file {file}", "url": f"the notice service {url}"}[how]
        _machine_is_taken(tmp_path, options, told)


@contextmanager
def served(folder: Path) -> Generator[str]:
    """A folder over HTTP; gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _machine_is_taken(folder: Path, options: Sequence[str], told: str) -> None:
    file, is_told_by_signal = folder / "notice", told == "SIGTERM"
    with LiveRun(CHAOS / "torch.yaml", folder, options) as run:
        run.await_steps(3)
        folder, names = run.folder, {"engine/1"} if is_told_by_signal else {"engine/0", "engine/1"}
        pids = {name: run.pid_of(name) for name in names}
        if is_told_by_signal:
            os.kill(run.pid_of("engine/1"), signal.SIGTERM)
        else:
            file.touch()
        if "notice_url" in options[1]:
            for name in names:
                run.await_log(f"the machine of {name} is taken")
            file.unlink()  # the engines that come are on another machine, of which there is no such word
        step = await_state(run, lambda: all(run.pid_of(name) != pid for name, pid in pids.items()), 3)
        version = read_steps(folder)[-1].version
        query = f"SELECT DISTINCT engine FROM samples WHERE state = 'trained' AND version > {version + 2}"
        await_state(run, lambda: {engine for (engine,) in rows(folder, query)} >= names, step)
        summary = run.interrupt()
        output, steps = run.output, read_steps(folder)
    for name in names:
        assert f"the machine of {name} is taken in 5.0 s, as {told} says" in output
        assert f"{name} has left, with nothing left to do" in output
    assert summary.restarts == (), "who leaves with its machine is no loss"
    assert [step.metrics.get("prompt_source/lost_tokens") for step in steps][-1] in (0, None)
    assert summary.tokens_lost_estimate == 0
    assert audit_ledger(folder / LEDGER_FILE).is_clean


@pytest.mark.both_hosts
def test_a_joined_engine_that_dies_again_and_again_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    options = ("engines.count=1", "engines.max=2", "runtime.max_restarts=2", "run.num_steps=100000", *NO_EVALUATION)
    with LiveRun(CHAOS / "modelled.yaml", tmp_path, options) as run:
        run.await_steps(2)
        folder = run.folder
        penstock("scale", str(folder), "engines=+1")
        step = await_state(run, lambda: "engine/1" in trained_by(folder), 2)
        killed: set[int] = set()

        def is_given_up() -> bool:
            with suppress(KeyError, ProcessLookupError):
                pid = run.pid_of("engine/1")
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            return recorded_engines(folder)[-1] == ["engine/0"]

        step = await_state(run, is_given_up, step)
        run.await_steps(step + 5)
        assert len(killed) == 3
        told = penstock("explain", str(folder))
        summary = run.interrupt()
        output = " ".join(run.output.split())
    story = (
        "engine/1 was lost 3 times within 10 minutes, the last time because of this: its process was killed. "
        "The limit is runtime.max_restarts = 2"
    )
    assert f"the run goes on without engine/1: {story}" in output
    assert f"2 → 1 engine, {story}" in told
    assert any(story in text for text in summary.warnings)
    scalings = [each for each in read_operations(folder) if isinstance(each, Scaling)]
    assert scalings[-1].reason == story
    assert summary.version > step
    assert audit_ledger(folder / LEDGER_FILE).is_clean
