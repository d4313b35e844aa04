"""The supervisor and the processes of the actors on a real host: who is lost, replaced, fenced; what survives it."""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import host_echo
import pytest
from host_echo import ENGINE, RunPlan
from host_harness import EchoRun, wait_for_the_end_of

from penstock.backends.engines.served.base.settings import OWNER_VARIABLE
from penstock.backends.ledger.sqlite import SqliteReader, SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.processes.process_facts import marked_processes
from penstock.messages.ledger import GroupRecorded
from penstock.messages.names import BUFFER, FILTER, LEARNER, PROMPT_SOURCE, SCORER, SUPERVISOR
from penstock.runtime.hosts.driver.main import exit_code_of
from penstock.runtime.hosts.processes.boot import Boot, EndKind
from penstock.runtime.hosts.processes.ports import OutcomeKind
from penstock.runtime.run.placement import Placement

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.hosts.processes.control import ProcessStarted
    from penstock.runtime.hosts.processes.ports import Launcher, ProcessHost


class Blow:
    """Sends a signal to the first incarnation of an actor, once, when some groups are through."""

    def __init__(self, name: str, number: signal.Signals, *, after_steps: int = 10) -> None:
        self.name = name
        self.number = number
        self.after_steps = after_steps
        self.victim: ProcessStarted | None = None

    def __call__(self, run: EchoRun) -> None:
        process = run.process(self.name, 1)
        if self.victim is None and process is not None and run.num_steps >= self.after_steps:
            self.victim = process
            os.kill(process.pid, self.number)


def assert_every_group_arrived_once(run: EchoRun) -> None:
    assert run.groups() == dict.fromkeys(range(run.plan.num_groups), 1)


@pytest.mark.both_hosts
@pytest.mark.parametrize("encrypt", [True, False], ids=["curve", "plain"])
def test_a_run_without_faults_completes(host: ProcessHost, tmp_path: Path, encrypt: bool) -> None:
    run = EchoRun(host, tmp_path, RunPlan(), encrypt=encrypt)
    outcome = run.play()
    assert outcome.kind is OutcomeKind.COMPLETED
    assert outcome.story == "every group has arrived"
    assert outcome.finished is not None
    assert outcome.finished.balance.is_balanced
    assert run.witness.losses == []
    assert {name for name, _, state in run.witness.states if state == "ended"} == set(host_echo.NAMES)
    assert_every_group_arrived_once(run)


@pytest.mark.both_hosts
@pytest.mark.parametrize(
    "name", [ENGINE, PROMPT_SOURCE, *(pytest.param(name, marks=pytest.mark.slow) for name in (SCORER, FILTER, LEARNER))]
)
def test_nothing_is_lost_when_an_actor_is_killed(host: ProcessHost, tmp_path: Path, name: str) -> None:
    run = EchoRun(host, tmp_path, RunPlan(num_groups=500))
    blow = Blow(name, signal.SIGKILL)
    assert run.play(blow).kind is OutcomeKind.COMPLETED
    assert run.witness.losses == [(name, "its process was killed")]
    assert (name, 2, "up") in run.witness.states
    assert_every_group_arrived_once(run)


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_what_a_predecessor_left_is_taken_over_unless_its_replacement_was_asked_for(
    host: ProcessHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_asked_for: bool
) -> None:
    run = EchoRun(host, tmp_path, RunPlan(num_groups=150, replace_after=10 if is_asked_for else -1))
    launch, boots = type(run.launcher).launch, list[Boot]()

    def noted(self: Launcher, boot: Boot) -> None:
        boots.append(boot)
        launch(self, boot)

    monkeypatch.setattr(type(run.launcher), "launch", noted)
    blow = None if is_asked_for else Blow(ENGINE, signal.SIGKILL)
    assert run.play(blow).kind is OutcomeKind.COMPLETED
    found = [(boot.epoch, boot.takes_over) for boot in boots if boot.name == ENGINE]
    assert found == [(1, False), (2, not is_asked_for)]


@pytest.mark.both_hosts
def test_a_stopped_actor_is_noticed_killed_and_replaced(host: ProcessHost, tmp_path: Path) -> None:
    run = EchoRun(host, tmp_path, RunPlan(num_groups=150))
    blow = Blow(SCORER, signal.SIGSTOP)
    assert run.play(blow).kind is OutcomeKind.COMPLETED
    assert run.witness.losses == [(SCORER, "its process was stopped")]
    assert blow.victim is not None
    wait_for_the_end_of(blow.victim)
    assert_every_group_arrived_once(run)


def blind_launcher(host: ProcessHost, patch: pytest.MonkeyPatch) -> Launcher:
    """A launcher that sees no process, as if all of them ran on another machine, and cannot reach the first Scorer."""
    launcher = host.launcher(Placement())

    def kill(name: str, epoch: int, process: ProcessStarted | None) -> None:
        if (name, epoch) != (SCORER, 1) and process is not None:
            os.kill(process.pid, signal.SIGKILL)

    def is_local(process: ProcessStarted) -> bool:
        return False

    patch.setattr(launcher, "kill", kill)
    patch.setattr(launcher, "is_local", is_local)
    return launcher


@pytest.mark.both_hosts
def test_a_zombie_that_wakes_up_behind_its_fence_does_no_harm_and_ends(
    host: ProcessHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``/proc``, the cut line or the missing heartbeat tells; without a kill, the fence protects."""
    run = EchoRun(
        host,
        tmp_path,
        RunPlan(num_groups=1000),
        launcher=blind_launcher(host, monkeypatch),
        resend_after_s=0.5,
    )
    blow = Blow(SCORER, signal.SIGSTOP)
    has_woken = False

    def act(run: EchoRun) -> None:
        nonlocal has_woken
        blow(run)
        if not has_woken and run.process(SCORER, 2) is not None and blow.victim is not None:
            os.kill(blow.victim.pid, signal.SIGCONT)
            has_woken = True

    assert run.play(act).kind is OutcomeKind.COMPLETED
    [(lost, cause)] = run.witness.losses
    assert lost == SCORER
    assert cause.startswith(("it was not heard for", "its line was cut"))
    assert has_woken
    assert blow.victim is not None
    wait_for_the_end_of(blow.victim)
    assert_every_group_arrived_once(run)


def test_an_actor_is_replaced_when_another_asks_for_it(host: ProcessHost, tmp_path: Path) -> None:
    run = EchoRun(host, tmp_path, RunPlan(replace_after=10))
    assert run.play().kind is OutcomeKind.COMPLETED
    assert run.witness.losses == [(ENGINE, f"{BUFFER} asked for its replacement: it is late with its weights")]
    assert_every_group_arrived_once(run)


def test_the_run_fails_with_the_story_that_an_actor_tells(host: ProcessHost, tmp_path: Path) -> None:
    outcome = EchoRun(host, tmp_path, RunPlan(fail_after=5)).play()
    assert (outcome.kind, outcome.story) == (OutcomeKind.FAILED, "the Buffer has seen enough")
    assert outcome.finished is not None  # the books were closed nevertheless
    assert outcome.finished.version >= 5


def recorded_groups(run: EchoRun) -> list[int]:
    reader = SqliteReader(run.folder / LEDGER_FILE)
    try:
        return [entry.group_id for entry in reader.entries() if isinstance(entry, GroupRecorded)]
    finally:
        reader.close()


@pytest.mark.smoke
@pytest.mark.both_hosts
def test_a_buffer_that_is_killed_goes_on_from_its_ledger(host: ProcessHost, tmp_path: Path) -> None:
    run = EchoRun(host, tmp_path, RunPlan(num_groups=150))
    assert run.play(Blow(BUFFER, signal.SIGKILL)).kind is OutcomeKind.COMPLETED
    assert run.witness.losses == [(BUFFER, "its process was killed")]
    assert sorted(recorded_groups(run)) == list(range(150))
    assert max(run.groups().values()) == 1


def test_a_ledger_that_cannot_be_written_stops_the_run_and_nothing_unrecorded_was_told(
    host: ProcessHost, tmp_path: Path
) -> None:
    run = EchoRun(host, tmp_path, RunPlan(num_groups=100_000, tick_s=0.002, ledger_bytes=1_500_000))
    outcome = run.play()
    assert outcome.kind is OutcomeKind.FAILED
    assert "the ledger cannot be written" in outcome.story
    assert run.witness.losses == []  # another Buffer would fare no better
    assert set(run.groups()) <= set(recorded_groups(run))
    assert run.num_steps > 10


def test_a_run_whose_ledger_somebody_else_claims_ends_and_writes_nothing_more(
    host: ProcessHost, tmp_path: Path
) -> None:
    run = EchoRun(host, tmp_path, RunPlan(num_groups=100_000))
    before: list[list[int]] = []

    def act(run: EchoRun) -> None:
        if run.num_steps >= 20 and not before:
            store = SqliteStore(run.folder / LEDGER_FILE)
            store.claim(1000)
            store.close()
            before.append(recorded_groups(run))

    outcome = run.play(act)
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.story.startswith("another process drives this run")
    assert run.witness.losses == []
    assert [recorded_groups(run)] == before


def test_a_stop_waits_for_the_last_checkpoint_and_no_longer_than_it_may(host: ProcessHost, tmp_path: Path) -> None:
    def stop_when_all_work(run: EchoRun) -> None:
        who = [run.incarnation(name) for name in (BUFFER, LEARNER)]
        if all(one is not None and one.is_ready for one in who):
            run.stop()

    patient = EchoRun(host, tmp_path / "answers", RunPlan(num_groups=100_000))
    outcome = patient.play(stop_when_all_work)
    assert (outcome.kind, outcome.finished is None) == (OutcomeKind.STOPPED, False)
    assert patient.witness.stops == [10.0]
    silent = EchoRun(host, tmp_path / "is_silent", RunPlan(num_groups=100_000, closes_books=False), stop_timeout_s=0.5)
    outcome = silent.play(stop_when_all_work)
    assert (outcome.kind, outcome.finished) == (OutcomeKind.STOPPED, None)
    assert silent.witness.notices == [
        (SUPERVISOR, "no checkpoint was recorded within 0.5 s (runtime.stop_timeout_s)"),
    ]


def test_past_the_restart_limit_the_run_stops_with_the_story(host: ProcessHost, tmp_path: Path) -> None:
    run = EchoRun(host, tmp_path, RunPlan(crash=SCORER), max_restarts=2)
    outcome = run.play()
    assert outcome.kind is OutcomeKind.FAILED
    assert re.fullmatch(
        "scorer was lost 3 times within 10 minutes, the last time because of this: RuntimeError: scorer was told to "
        r"crash \(\S+/host_echo\.py:[0-9]+; logs/scorer-3\.log has the traceback\)\. "
        "The limit is runtime.max_restarts = 2",
        outcome.story,
    )
    assert [name for name, _ in run.witness.losses] == [SCORER] * 3
    log = (tmp_path / "logs" / "scorer-3.log").read_text()
    assert "Traceback" in log
    assert "and this is a second line" in log


@pytest.mark.both_hosts
def test_what_the_user_has_to_mend_stops_the_run_at_once(host: ProcessHost, tmp_path: Path) -> None:
    run = EchoRun(host, tmp_path, RunPlan(user_error=PROMPT_SOURCE))
    outcome = run.play()
    assert (outcome.kind, exit_code_of(outcome)) == (OutcomeKind.USER_ERROR, 2)
    assert outcome.story == "data.path: rows.jsonl:3: not a JSON object, found '['"
    assert run.witness.losses == []


def test_a_surplus_engine_that_the_user_has_to_mend_something_for_is_given_up_at_once(
    host: ProcessHost, tmp_path: Path
) -> None:
    plan = RunPlan(num_groups=100_000, user_error="engine/1", engines=(ENGINE, "engine/1"), story="engines.sglang: no")
    run = EchoRun(host, tmp_path, plan, joining=("engine/1",))

    def stop_when_it_has_left(run: EchoRun) -> None:
        if ("engine/1", 1, "left") in run.witness.states and run.witness.steps:
            run.stop()

    outcome = run.play(stop_when_it_has_left)
    assert outcome.kind is OutcomeKind.STOPPED
    assert run.witness.losses == [("engine/1", "engines.sglang: no")]
    assert (SUPERVISOR, "the run goes on without engine/1: engines.sglang: no") in run.witness.notices
    states = [state for name, _, state in run.witness.states if name == "engine/1" and state != "up"]
    assert states == ["starting", "lost", "left"], "once, whether it was heard of before or not"


@pytest.mark.both_hosts
def test_the_servers_of_an_engine_that_is_given_up_end_while_the_run_goes_on(host: ProcessHost, tmp_path: Path) -> None:
    plan = RunPlan(
        num_groups=100_000, crash="engine/1", leaves_server="engine/1", engines=(ENGINE, "engine/1")
    )  # fmt: skip
    run = EchoRun(host, tmp_path, plan, joining=("engine/1",), max_restarts=1)
    marks = [f"{OWNER_VARIABLE}=engine/1".encode(), f"PENSTOCK_RUN_FOLDER={tmp_path}".encode()]
    left: set[int] = set()

    def stop_when_they_have_ended(run: EchoRun) -> None:
        left.update(found := marked_processes(marks))
        if ("engine/1", 2, "left") in run.witness.states and not found:
            run.stop()

    outcome = run.play(stop_when_they_have_ended)
    assert outcome.kind is OutcomeKind.STOPPED
    assert len(left) >= 2, "a guardian that waited for a successor, and what it kept"
    assert any(text.startswith("the run goes on without engine/1") for _, text in run.witness.notices)


@pytest.mark.both_hosts
@pytest.mark.parametrize("shares", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("how", ["killed", "replaced", "left"])
def test_the_learner_hears_of_a_loss_on_its_devices_when_nothing_of_the_engine_is_left(
    host: ProcessHost, tmp_path: Path, how: str, *, shares: bool
) -> None:
    """The engine has a program that outlives its process by minutes, where nobody ends it."""
    name = "engine/1" if how == "left" else ENGINE
    plan = RunPlan(num_groups=100_000, leaves_server=name, replace_after=10 if how == "replaced" else -1)
    run = EchoRun(
        host,
        tmp_path,
        plan,
        names=(*host_echo.NAMES, name) if how == "left" else host_echo.NAMES,
        leave_timeout_s=0.5,
        shares_devices=frozenset({name, LEARNER} if shares else ()),
    )
    blow = Blow(name, signal.SIGKILL)
    is_asked = False

    def stop_when_it_has_heard(run: EchoRun) -> None:
        nonlocal is_asked
        if how == "left" and not is_asked and {name, LEARNER} <= run.witness.reports.keys():
            is_asked = True
            run.want(ENGINE)
        elif how == "killed":
            blow(run)
        if LEARNER in run.witness.reports and run.metric(LEARNER, "echo/losses"):
            run.stop()

    assert run.play(stop_when_it_has_heard).kind is OutcomeKind.STOPPED
    assert (run.metric(LEARNER, "echo/left") == 0) == shares
    states = [state for each, epoch, state in run.witness.states if (each, epoch) == (name, 1)]
    assert states == ["starting", "up", "lost" if how != "left" else "left"]


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "own"])
def test_a_learner_on_shared_devices_begins_when_nothing_of_its_predecessor_is_left(
    host: ProcessHost, tmp_path: Path, *, shares: bool
) -> None:
    plan = RunPlan(num_groups=100_000, leaves_server=LEARNER)
    run = EchoRun(host, tmp_path, plan, shares_devices=frozenset({ENGINE, LEARNER} if shares else ()))
    blow = Blow(LEARNER, signal.SIGKILL)

    def stop_when_the_next_has_reported(run: EchoRun) -> None:
        report = run.witness.reports.get(LEARNER)
        if report is not None:  # it has started its program, too
            blow(run)
        if report is not None and report.epoch == 2:
            run.stop()

    assert run.play(stop_when_the_next_has_reported).kind is OutcomeKind.STOPPED
    assert (run.metric(LEARNER, "echo/left") == 0) == shares


def test_the_same_of_the_last_engine_ends_the_run(host: ProcessHost, tmp_path: Path) -> None:
    plan = RunPlan(user_error=ENGINE, engines=(ENGINE,), story="engines.sglang: no")
    outcome = EchoRun(host, tmp_path, plan, joining=("engine/1",)).play()
    assert (outcome.kind, outcome.story) == (OutcomeKind.USER_ERROR, "engines.sglang: no")


@pytest.mark.parametrize("kind", ["ValueError", "ArrayLengthError"])
def test_a_mistake_of_ours_has_the_actor_replaced_whatever_its_class(
    host: ProcessHost, tmp_path: Path, kind: Literal["ValueError", "ArrayLengthError"]
) -> None:
    run = EchoRun(host, tmp_path, RunPlan(crash=SCORER, crash_kind=kind), max_restarts=1)
    outcome = run.play()
    assert outcome.kind is OutcomeKind.FAILED
    assert f"{kind}: scorer was told to crash (" in outcome.story
    assert "; logs/scorer-2.log has the traceback)" in outcome.story
    assert [name for name, _ in run.witness.losses] == [SCORER] * 2


def test_an_actor_that_has_diverged_is_not_replaced(host: ProcessHost, tmp_path: Path) -> None:
    run = EchoRun(host, tmp_path, RunPlan(crash=LEARNER, crash_kind="DivergedError"))
    outcome = run.play()
    assert (outcome.kind, exit_code_of(outcome)) == (OutcomeKind.DIVERGED, 2)
    assert outcome.story == "learner was told to crash\nand this is a second line"
    assert run.witness.losses == []


def test_a_backend_that_fails_on_its_own_thread_ends_its_process_with_the_story(
    host: ProcessHost, tmp_path: Path
) -> None:
    outcome = EchoRun(host, tmp_path, RunPlan(break_backend=True), max_restarts=0).play()
    assert outcome.kind is OutcomeKind.FAILED
    assert "MemoryError: the device is full" in outcome.story


@pytest.mark.both_hosts
def test_an_actor_that_does_not_end_when_asked_is_killed(host: ProcessHost, tmp_path: Path) -> None:
    run = EchoRun(host, tmp_path, RunPlan(num_groups=5, stubborn=FILTER))
    seen: dict[str, ProcessStarted] = {}

    def act(run: EchoRun) -> None:
        if (process := run.process(FILTER, 1)) is not None:
            seen[FILTER] = process

    assert run.play(act).kind is OutcomeKind.COMPLETED
    wait_for_the_end_of(seen[FILTER])
    assert (FILTER, 1, "ended") not in run.witness.states


def test_reports_carry_state_time_accounting_and_figures_of_the_backend(host: ProcessHost, tmp_path: Path) -> None:
    run = EchoRun(host, tmp_path, RunPlan(num_groups=100))
    pids: set[float] = set()

    def act(run: EchoRun) -> None:
        if LEARNER in run.witness.reports:
            pids.add(run.metric(LEARNER, "echo/pid"))

    run.play(act)
    learner, engine, scorer, keeper = (run.witness.reports[name] for name in (LEARNER, ENGINE, SCORER, FILTER))
    assert learner.state == engine.state == "echoing"
    assert len(pids) == 1
    for lane in (engine.activities, scorer.activities):
        assert lane
        assert all(a.end_s == b.start_s for a, b in pairwise(lane))
    assert keeper.activities == ()


@pytest.mark.both_hosts
def test_a_process_shows_where_its_threads_are_and_goes_on(host: ProcessHost, tmp_path: Path) -> None:
    run = EchoRun(host, tmp_path, RunPlan(num_groups=100))
    assert run.play(Blow(SCORER, signal.SIGUSR1)).kind is OutcomeKind.COMPLETED
    log = (tmp_path / "logs" / "scorer-1.log").read_text()
    assert "in poll" in log
    assert run.witness.losses == []


def test_ends_of_processes_are_told_apart() -> None:
    assert {kind.value for kind in EndKind} == {
        "asked",
        "dismissed",
        "crashed",
        "user_error",
        "diverged",
        "disk_full",
        "ledger_failed",
        "superseded",
    }
