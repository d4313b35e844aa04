"""What a run is told while it goes on, from another process: it does it, remembers it, and everything shows it."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from live_run import LiveRun
from short_runs import NO_EVALUATION
from typer.testing import CliRunner

from penstock import open_run
from penstock.backends.ledger.audit import audit_ledger
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.ledger import GroupsGranted, PolicyRecorded
from penstock.messages.training import UpdateMode
from penstock.runtime.cli.app import app
from penstock.runtime.hosts.processes.operator_door import SOCKET_NAME
from penstock.runtime.launch.control import PauseGrants, SaveCheckpoint, SwitchPolicy, send_command
from penstock.runtime.observability.explain import explain
from penstock.runtime.observability.operations import Pause, PolicySwitch, policy_in_force, read_operations
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.timeout(540), pytest.mark.nightly_on_ray]

CHAOS = Path(__file__).parents[1] / "chaos"
NUM_STEPS = 30
NUM_TORCH_STEPS = 200
"""Of 50 ms: what is said at the fourteenth must reach a run that goes on, also on a busy machine."""
SYNC_AT_FIRST = ("staleness.policy=sync", "staleness.max_staleness=null")


class Told(NamedTuple):
    """A run that was told everything, and what it answered."""

    folder: Path
    answers: dict[str, str]
    status_while_paused: str


def penstock(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, f"{words}: {done.output}"
    return done.stdout


def trained_ages(folder: Path) -> Iterator[tuple[int, int]]:
    """Group and age of its oldest token when it was trained, from what the engines stamped."""
    query = "SELECT group_id, max(version - 1 - oldest_version) FROM samples WHERE state = 'trained' GROUP BY group_id"
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as database:
        yield from database.execute(query)


def bounds(folder: Path, first: int) -> dict[int, int]:
    """The bound in force at each group's grant, from the order of the log alone."""
    found: dict[int, int] = {}
    bound = first
    with closing(SqliteReader(folder / LEDGER_FILE)) as reader:
        for entry in reader.entries():
            if isinstance(entry, PolicyRecorded):
                bound = entry.max_staleness
            elif isinstance(entry, GroupsGranted):
                span = entry.span
                found |= dict.fromkeys(range(span.first_group, span.first_group + span.num_groups), bound)
    return found


def tell_all(run: LiveRun) -> Told:
    """sync → fully_async with 4 → one_step_off, with a Buffer that is killed, a pause and a checkpoint on the way."""
    answers: dict[str, str] = {}
    run.await_steps(3)
    folder = run.folder
    answers["fully_async"] = penstock("policy", str(folder), "fully_async", "max_staleness=4")
    run.await_steps(9)
    os.kill(run.pid_of("buffer"), signal.SIGKILL)
    answers["again"] = send_command(folder, SwitchPolicy("fully_async", {"max_staleness": 4}), 60).text
    run.await_steps(14)
    answers["one_step_off"] = open_run(folder).switch_policy("one_step_off", timeout_s=60)
    answers["refused"] = send_command(folder, SwitchPolicy("sync", {"max_staleness": 2}), 60).text
    answers["pause"] = send_command(folder, PauseGrants(), 60).text
    answers["save"] = send_command(folder, SaveCheckpoint(), 60).text
    status = penstock("status", str(folder))
    answers["resume"] = penstock("pause", str(folder), "--off")
    return Told(folder, answers, status)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    options = (
        *SYNC_AT_FIRST,
        f"run.num_steps={NUM_STEPS}",
        *NO_EVALUATION,
        "observability.report=true",
        "observability.tracing=true",
        "observability.trace_fraction=1",
    )
    with LiveRun(CHAOS / "modelled.yaml", tmp_path_factory.mktemp("told"), options) as run:
        found = tell_all(run)
        assert run.finish().version == NUM_STEPS
        return found


@pytest.mark.slow  # what follows a switch is the control plane's, which the modelled run below has all of
def test_each_bound_holds_with_engines_and_a_learner_of_torch(tmp_path: Path) -> None:
    options = (
        "learner.groups_per_batch=4",
        "learner.warm_start=null",
        "sampling.max_response_tokens=64",
        f"run.num_steps={NUM_TORCH_STEPS}",
        *SYNC_AT_FIRST,
    )
    with LiveRun(CHAOS / "torch.yaml", tmp_path, options) as run:
        folder = tell_all(run).folder
        assert run.finish().version == NUM_TORCH_STEPS
    assert_bounds_hold(folder)


def test_the_run_answers_what_then_holds(told: Told) -> None:
    assert "new grants follow fully_async with max_staleness 4, update_mode in_flight" in told.answers["fully_async"]
    assert told.answers["again"].endswith("holds already"), "the next Buffer knows it from the ledger"
    assert "one_step_off with max_staleness 1, update_mode drain" in told.answers["one_step_off"]
    assert "the policy sync means 0, found 2" in told.answers["refused"]
    assert "new grants are paused" in told.answers["pause"]
    assert "is saved: simulated/checkpoint-" in told.answers["save"]
    assert "new grants go on" in told.answers["resume"]


def test_each_bound_holds_from_its_fence_on_and_the_audit_is_clean(told: Told) -> None:
    assert_bounds_hold(told.folder)


def assert_bounds_hold(folder: Path) -> None:
    assert audit_ledger(folder / LEDGER_FILE).is_clean
    bound_of = bounds(folder, first=0)
    ages = dict(trained_ages(folder))
    assert all(age <= bound_of[group] for group, age in ages.items())
    oldest = {bound: max(age for group, age in ages.items() if bound_of[group] == bound) for bound in (0, 4, 1)}
    assert oldest[0] == 0
    assert oldest[4] > 1, "it made use of the wider bound, so the bounds of the others mean something"
    assert oldest[1] <= 1


def test_what_binds_is_asked_of_the_steps_since_the_last_switch(told: Told) -> None:
    last = policy_in_force(read_operations(told.folder))
    facts = explain(told.folder).facts
    assert last is not None
    assert facts is not None
    assert (facts.policy, facts.max_staleness, facts.update_mode) == ("one_step_off", 1, UpdateMode.DRAIN)
    assert facts.first_step > last.version


def test_it_is_in_ledger_metrics_traces_and_report(told: Told) -> None:
    switches = [each for each in read_operations(told.folder) if isinstance(each, PolicySwitch)]
    assert [(each.policy, each.max_staleness) for each in switches] == [("fully_async", 4), ("one_step_off", 1)]
    pauses = [each.is_paused for each in read_operations(told.folder) if isinstance(each, Pause)]
    assert pauses == [True, False]
    summary = read_summary(told.folder)
    assert summary is not None
    held = [(each.from_step, each.policy, each.max_staleness) for each in summary.policies]
    after = [each.version + 1 for each in switches]
    assert held == [(1, "sync", 0), (after[0], "fully_async", 4), (after[1], "one_step_off", 1)]
    assert summary.policy == "one_step_off"
    steps = read_steps(told.folder)
    assert list(dict.fromkeys(step.policy for step in steps)) == ["sync", "fully_async", "one_step_off"]
    assert {step.metrics["buffer/max_staleness"] for step in steps} == {0, 4, 1}
    run = open_run(told.folder)
    spans = [span for step in steps for span in run.step_trace(version=step.version)]
    switched = [span.attributes["policy"] for span in spans if span.name == "policy"]
    assert set(switched) <= {"fully_async", "one_step_off"}
    assert switched, "the step after the switch has it"
    report = (told.folder / "report.html").read_text(encoding="utf-8")
    assert '"label":"fully_async, η = 4"' in report
    assert "one_step_off, η = 1 (after step" in report


def test_a_pause_is_not_forgotten(told: Told) -> None:
    assert "new grants are paused for" in told.status_while_paused
    assert "--off" in told.status_while_paused
    assert "policy since step" in told.status_while_paused


def test_a_run_that_has_ended_is_told_nothing(told: Told) -> None:
    assert not (told.folder / SOCKET_NAME).exists()
    with pytest.raises(UserFault, match="does not go on"):
        send_command(told.folder, PauseGrants(), 5)
