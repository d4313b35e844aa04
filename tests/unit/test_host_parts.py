"""The pure parts of the Ray + ZMQ host: who is given up, replaced, told what, and placed where."""

from __future__ import annotations

import traceback

import pytest

from penstock.backends.processes.process_facts import ProcessFacts, facts_of, is_running, start_ticks_of
from penstock.messages.membership import ActorEpoch
from penstock.messages.names import BUFFER, LEARNER, SCORER
from penstock.messages.training import Activity, ActivitySpan, ActorReported
from penstock.runtime.hosts.processes.boot import EndKind, ProcessEnd
from penstock.runtime.hosts.processes.control import Address, ProcessBeat, ProcessStarted
from penstock.runtime.hosts.processes.directory import Directory
from penstock.runtime.hosts.processes.ends import verdict_on
from penstock.runtime.hosts.processes.incarnations import (
    GONE_GRACE_S,
    IMPORT_SILENCE_S,
    LINE_GRACE_S,
    START_TIMEOUT_S,
    STOPPED_GRACE_S,
    Incarnation,
)
from penstock.runtime.hosts.processes.ports import EndedProcess, OutcomeKind
from penstock.runtime.run.plan import log_name
from penstock.runtime.shell.restarts import MAX_PAUSE_S, Restarts

TIMEOUT_S = 10.0
TICKS = 77
RUNNING = ProcessFacts("S", 1, TICKS)


def address(name: str, epoch: int) -> Address:
    return Address(name, epoch, f"tcp://127.0.0.1:{epoch}", b"")


def started(name: str = SCORER, epoch: int = 1) -> ProcessStarted:
    return ProcessStarted(address=address(name, epoch), pid=1234, start_ticks=TICKS, node_id="here")


# --- the directory ----------------------------------------------------------------------------------------------


def test_a_change_tells_what_changed_and_the_whole_tells_everything() -> None:
    directory = Directory()
    first = directory.add(address(SCORER, 1))
    second = directory.add(address(BUFFER, 1))
    assert first is not None
    assert second is not None
    assert (first.sequence, second.sequence) == (1, 2)
    assert second.members == (address(BUFFER, 1),)
    whole = directory.whole()
    assert whole.is_whole
    assert whole.sequence == 2
    assert set(whole.members) == {address(SCORER, 1), address(BUFFER, 1)}


def test_who_is_given_up_is_no_member_and_never_becomes_one_again() -> None:
    directory = Directory()
    directory.add(address(SCORER, 1))
    change = directory.give_up(SCORER, 1)
    assert change.fences == (ActorEpoch(SCORER, 1),)
    assert directory.members() == ()
    assert directory.add(address(SCORER, 1)) is None
    assert directory.add(address(SCORER, 2)) is not None
    assert directory.whole().fences == (ActorEpoch(SCORER, 1),)


def test_a_late_loss_of_an_earlier_incarnation_leaves_the_present_one_alone() -> None:
    directory = Directory()
    directory.give_up(SCORER, 2)
    directory.add(address(SCORER, 3))
    change = directory.give_up(SCORER, 1)
    assert change.fences == (ActorEpoch(SCORER, 2),)  # a fence never goes down
    assert directory.members() == (address(SCORER, 3),)


# --- restarts ---------------------------------------------------------------------------------------------------


def test_the_first_restart_is_at_once_and_each_further_one_waits_twice_as_long() -> None:
    restarts = Restarts(max_restarts=20)
    pauses = [restarts.pause_s(SCORER, 0.0) for _ in range(12)]
    assert pauses[:5] == [0.0, 0.25, 0.5, 1.0, 2.0]
    assert pauses[-1] == MAX_PAUSE_S
    assert restarts.totals == {SCORER: 12}


def test_the_limit_counts_what_lies_in_the_window_and_each_actor_for_itself() -> None:
    restarts = Restarts(max_restarts=2, window_s=100.0)
    assert restarts.pause_s(SCORER, 0.0) == 0.0
    assert restarts.pause_s(SCORER, 50.0) is not None
    assert restarts.pause_s(SCORER, 99.0) is None
    assert restarts.pause_s(BUFFER, 99.0) == 0.0
    assert restarts.pause_s(SCORER, 101.0) is not None  # the first has left the window
    assert restarts.pause_s(SCORER, 151.0) is not None
    assert restarts.pause_s(SCORER, 152.0) is None


def test_a_limit_of_none_allows_no_restart() -> None:
    assert Restarts(max_restarts=0).pause_s(SCORER, 0.0) is None


def test_what_is_forgotten_counts_no_more() -> None:
    restarts = Restarts(max_restarts=1)
    assert restarts.pause_s(SCORER, 0.0) == 0.0
    assert restarts.pause_s(SCORER, 1.0) is None
    restarts.forget(SCORER)
    assert restarts.pause_s(SCORER, 2.0) == 0.0
    assert restarts.totals == {SCORER: 2}


# --- how a process ended ----------------------------------------------------------------------------------------


def test_the_end_of_a_process_says_whether_another_may_take_its_place_and_where_it_crashed() -> None:
    try:
        raise KeyError("layer")
    except KeyError as error:
        text, line = "".join(traceback.format_exception(error)), error.__traceback__.tb_lineno  # type: ignore[union-attr]
    crash = ProcessEnd(kind=EndKind.CRASHED, error="KeyError: 'layer'", traceback=text)
    assert verdict_on(EndedProcess(SCORER, 2, crash)) == (
        f"KeyError: 'layer' ({__file__}:{line}; logs/scorer-2.log has the traceback)",
        None,
    )
    bare = ProcessEnd(kind=EndKind.CRASHED, error="KeyError: 'layer'")
    assert verdict_on(EndedProcess(SCORER, 2, bare)).cause == "KeyError: 'layer' (logs/scorer-2.log has the traceback)"
    assert verdict_on(EndedProcess(SCORER, 2, None)) == ("its process was killed", None)
    wrong = ProcessEnd(kind=EndKind.USER_ERROR, error="engines.sglang: no")
    assert verdict_on(EndedProcess(SCORER, 2, wrong)) == ("engines.sglang: no", OutcomeKind.USER_ERROR)
    full = ProcessEnd(kind=EndKind.DISK_FULL, error="full")
    assert verdict_on(EndedProcess(SCORER, 2, full)).ends_as is OutcomeKind.FAILED
    assert verdict_on(EndedProcess(SCORER, 2, ProcessEnd(kind=EndKind.ASKED))).ends_as is None


# --- signs of life ----------------------------------------------------------------------------------------------


class Watched:
    """One incarnation that has announced itself at 0 s and is on this machine."""

    def __init__(self, *, is_local: bool = True) -> None:
        self.incarnation = Incarnation(SCORER, 1, 0.0)
        self.incarnation.process = started()
        self.incarnation.has_reported = True
        self.is_local = is_local

    def cause(self, now_s: float, facts: ProcessFacts | None = RUNNING) -> str:
        return self.incarnation.cause_of_loss(now_s, facts, timeout_s=TIMEOUT_S, is_local=self.is_local)


def test_who_is_heard_lives() -> None:
    watched = Watched()
    for second in range(100):
        watched.incarnation.heard(float(second))
        assert watched.cause(second + 0.9) == ""


def test_a_process_that_never_announces_itself_is_given_up() -> None:
    incarnation = Incarnation(SCORER, 1, 0.0)
    alive = incarnation.cause_of_loss(START_TIMEOUT_S - 1, None, timeout_s=TIMEOUT_S, is_local=False)
    dead = incarnation.cause_of_loss(START_TIMEOUT_S + 1, None, timeout_s=TIMEOUT_S, is_local=False)
    assert (alive, dead) == ("", "it did not start within 120 s")


@pytest.mark.parametrize("facts", [None, ProcessFacts("Z", 1, TICKS), ProcessFacts("S", 1, TICKS + 1)])
def test_a_process_that_is_gone_is_given_up_once_who_started_it_had_time_to_tell_how_it_ended(
    facts: ProcessFacts | None,
) -> None:
    watched, blind = Watched(), Watched(is_local=False)
    assert watched.cause(0.1, facts) == blind.cause(0.1, facts) == ""
    assert watched.cause(0.1 + GONE_GRACE_S - 0.1, facts) == ""
    assert watched.cause(0.1 + GONE_GRACE_S, facts) == "its process was killed"
    assert blind.cause(0.1 + GONE_GRACE_S, facts) == ""  # nobody can know


def test_a_process_that_is_stopped_for_longer_than_a_moment_is_given_up() -> None:
    watched, stopped = Watched(), ProcessFacts("T", 1, TICKS)
    assert watched.cause(1.0, stopped) == ""
    assert watched.cause(1.0 + STOPPED_GRACE_S, stopped) == "its process was stopped"
    assert watched.cause(2.0) == ""  # it was continued: the moment begins anew
    assert watched.cause(2.1, stopped) == ""


def test_a_process_under_a_debugger_is_left_alone() -> None:
    watched, traced = Watched(), ProcessFacts("t", 1, TICKS)
    assert [watched.cause(second, traced) for second in (1.0, 2.0, 3.0)] == ["", "", ""]


def test_who_is_not_heard_within_the_deadline_is_given_up() -> None:
    watched = Watched()
    assert watched.cause(TIMEOUT_S - 0.1) == ""
    assert watched.cause(TIMEOUT_S + 0.6) == "it was not heard for 11 s"


def test_who_still_imports_is_given_longer() -> None:
    watched = Watched()
    watched.incarnation.has_reported = False
    assert watched.cause(IMPORT_SILENCE_S - 0.1) == ""
    assert watched.cause(IMPORT_SILENCE_S + 0.6) == "it was not heard for 61 s"


def test_a_cut_line_counts_only_when_nothing_is_heard_either() -> None:
    watched = Watched()
    watched.incarnation.heard(1.0)
    watched.incarnation.line_is(2.0, up=False)
    assert watched.cause(2.0 + LINE_GRACE_S) == ""
    assert watched.cause(2.5 + LINE_GRACE_S).startswith("its line was cut")
    watched.incarnation.heard(5.0)
    assert watched.cause(2.5 + LINE_GRACE_S) == ""
    watched.incarnation.line_is(6.0, up=True)
    watched.incarnation.line_is(7.0, up=False)
    watched.incarnation.line_is(9.0, up=False)  # still the same cut
    assert watched.cause(7.5 + LINE_GRACE_S).startswith("its line was cut")


def test_a_loop_that_is_stuck_in_one_turn_is_given_up_although_its_heart_beats() -> None:
    watched = Watched()
    watched.incarnation.heard(400.0)
    watched.incarnation.beat = ProcessBeat(num_turns=5, turn_s=299.0, directory_sequence=0)
    assert watched.cause(400.0) == ""
    watched.incarnation.beat = ProcessBeat(num_turns=5, turn_s=301.0, directory_sequence=0)
    assert watched.cause(400.0) == "its loop has been stuck in one turn for 301 s"


def test_an_actor_is_ready_when_it_has_reported_and_does_not_load_any_more() -> None:
    incarnation = Incarnation(LEARNER, 1, 0.0)
    told = [incarnation.is_ready]
    for activities in ((), (Activity.STARTING,), (Activity.STARTING, Activity.WAITING_FOR_SAMPLES), ()):
        spans = tuple(ActivitySpan(activity, 0.0, 1.0) for activity in activities)
        incarnation.reported(ActorReported(name=LEARNER, epoch=1, state="", activities=spans), 1.0, timeout_s=TIMEOUT_S)
        told.append(incarnation.is_ready)
    assert told == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("start_s", "silent_s", "cut_s"),
    [(20.0, TIMEOUT_S, LINE_GRACE_S), (50.0, TIMEOUT_S, 5.0), (300.0, 30.0, 30.0), (9000.0, 60.0, 60.0)],
)
def test_who_took_long_to_start_is_waited_for_longer_and_no_longer_than_a_minute(
    start_s: float, silent_s: float, cut_s: float
) -> None:
    incarnation = Incarnation("engine/0", 1, 0.0)
    incarnation.process = started()

    def reports(now_s: float, *activities: Activity) -> str:
        incarnation.heard(now_s)
        spans = tuple(ActivitySpan(activity, 0.0, now_s) for activity in activities)
        report = ActorReported(name="engine/0", epoch=1, state="", activities=spans)
        return incarnation.reported(report, now_s, timeout_s=TIMEOUT_S)

    def cause(silence_s: float) -> str:
        return incarnation.cause_of_loss(start_s + silence_s, None, timeout_s=TIMEOUT_S, is_local=False)

    assert reports(1.0) == reports(2.0, Activity.STARTING) == ""
    told = reports(start_s, Activity.STARTING, Activity.WAITING_FOR_WEIGHTS)
    took = f"engine/0 took {start_s:.0f} s to start, as another one would"
    assert told == (f"{took}: it is replaced when it is silent for {silent_s:.0f} s" if silent_s > TIMEOUT_S else "")
    assert reports(start_s, Activity.WORKING) == "", "said once"
    assert cause(silent_s) == ""
    assert cause(silent_s + 0.1).startswith("it was not heard for")
    incarnation.line_is(start_s, up=False)
    assert cause(cut_s) == ""
    assert cause(cut_s + 0.1)


def test_a_slow_turn_is_told_once() -> None:
    incarnation = Incarnation(SCORER, 1, 0.0)
    told: list[bool] = []
    for num_turns, turn_s in [(5, 19.0), (5, 21.0), (5, 22.0), (6, 0.0), (6, 30.0), (6, 31.0)]:
        incarnation.beat = ProcessBeat(num_turns=num_turns, turn_s=turn_s, directory_sequence=0)
        told.append(incarnation.has_become_slow())
    assert told == [False, True, False, False, True, False]


def test_a_supervisor_that_was_asleep_blames_nobody() -> None:
    watched = Watched()
    watched.incarnation.line_is(1.0, up=False)
    watched.incarnation.forgive(1000.0)
    assert watched.cause(1000.0 + LINE_GRACE_S) == ""
    assert watched.cause(1000.0 + LINE_GRACE_S + 0.1).startswith("its line was cut")


# --- processes and places ---------------------------------------------------------------------------------------


def test_a_pid_with_another_start_time_is_another_process() -> None:
    import os

    ticks = start_ticks_of(os.getpid())
    assert is_running(os.getpid(), ticks)
    assert not is_running(os.getpid(), ticks + 1)
    facts = facts_of(os.getpid())
    assert facts is not None
    assert facts.parent == os.getppid()
    with pytest.raises(ProcessLookupError, match="there is no process"):
        start_ticks_of(2**22 + 1)


def test_the_log_of_an_engine_is_one_file_and_not_a_folder() -> None:
    assert log_name("engine/3", 2) == "logs/engine-3-2.log"
