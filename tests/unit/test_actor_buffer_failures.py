"""Why samples fail: what the Buffer counts, tells and records of it, and when it ends a run in which all of them do."""

from __future__ import annotations

import actor_driver as drive
import pytest
from buffer_bench import NUM_SAMPLES, Bench, announced

from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.outbox import SETTLE_TIMER
from penstock.messages.commands import FailRun, Record, Send, StartTimer
from penstock.messages.flow import FailuresTold, GroupAdmitted, GroupRejected
from penstock.messages.ledger import FailuresNoted
from penstock.messages.local import Started, TimerFired
from penstock.messages.reasons import MAX_KIND_CHARACTERS, ReasonCount, reason_kind
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState
from penstock.messages.training import FailuresCounted, LearnerReady, RunFinished, StopAsked

BOOM = "ValueError: {} (reward.py:7)"


def failed(group_id: int, index: int, reason: str = BOOM, cause: str = "scoring_failed") -> SampleEnd:
    key, text = SampleKey(group_id, index), reason.format(index)
    return SampleEnd(key=key, state=TerminalState.FAILED, cause=cause, num_tokens=4, reason=text)


def told(*ends: SampleEnd, has_scored: bool = False) -> FailuresTold:
    return FailuresTold(ends=ends, has_scored=has_scored)


def rejected(*ends: SampleEnd, cause: str = "too_few_samples") -> GroupRejected:
    return GroupRejected(group_id=ends[0].key.group_id, cause=cause, ended=ends)


def counts(bench: Bench) -> list[tuple[str, str, int]]:
    return [(count.cause, count.kind, count.num_samples) for count in bench.buffer.books.failures.counts()]


# --- kinds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("ValueError: bad answer 'x' (reward.py:31)", "ValueError (reward.py:31)"),
        ("ValueError: a: b: c (reward.py:31)", "ValueError (reward.py:31)"),
        ("Boom (reward.py:31)", "Boom (reward.py:31)"),
        ("fmt: KeyError: 'a' (reward.py:2)", "fmt: KeyError (reward.py:2)"),
        ("TypeError: x (tool.py:3) (4 attempts)", "TypeError (tool.py:3)"),
        ("the reward function took longer than 10 s (reward.timeout_s)", None),
        ("the reward function returned str 'abc'; expected a number (r.py:3)", None),
        ("ConnectError", "ConnectError"),
        ("", ""),
    ],
)
def test_the_kind_of_a_reason_is_its_exception_and_line_without_the_values(reason: str, kind: str | None) -> None:
    if kind is not None:
        assert reason_kind(reason) == kind
    else:
        varied = reason.replace("10", "2.5").replace("abc", "another one")
        assert varied != reason
        assert reason_kind(varied) == reason_kind(reason)


def test_a_kind_is_short_whatever_the_reason_is() -> None:
    for reason in ("x" * 100_000, "a:" * 50_000, "'" * 99_999, "(" * 99_999, "E: " + "y" * 99_999 + " (r.py:3)"):
        assert len(reason_kind(reason)) <= MAX_KIND_CHARACTERS


# --- what is counted, recorded and told ------------------------------------------------------------------------------


def test_a_failure_is_recorded_when_it_is_told_and_counts_once_however_often_it_comes() -> None:
    bench = Bench().started()
    assert drive.recorded(bench.hear(told(failed(0, 0))), FailuresNoted) == [FailuresNoted(ends=(failed(0, 0),))]
    assert bench.hear(told(failed(0, 0))) == []
    bench.hear(rejected(failed(0, 0), failed(0, 1)))
    assert counts(bench) == [("scoring_failed", "ValueError (reward.py:7)", 2)]
    assert bench.hear(told(failed(0, 1))) == [], "its group has gone out"


def test_the_failures_of_an_admitted_group_count_once_also_when_it_is_cancelled_later() -> None:
    bench = Bench(num_steps=1, groups_per_batch=1, over_sampling=2.0).started()
    bench.hear(told(failed(0, 2)))
    for group_id in (0, 1):
        ended = (failed(group_id, 2),)
        bench.hear(GroupAdmitted(group=drive.group(group_id, (0, 4), size=NUM_SAMPLES, ended=ended)))
    bench.train()
    assert states_are_balanced(bench)
    assert counts(bench) == [("scoring_failed", "ValueError (reward.py:7)", 2)]


def states_are_balanced(bench: Bench) -> bool:
    return bench.buffer.books.accounts.balance().is_balanced


def test_failures_change_no_balance() -> None:
    bench = Bench().started()
    before = bench.buffer.books.accounts.balance()
    bench.hear(told(failed(0, 0), failed(1, 1)))
    assert bench.buffer.books.accounts.balance() == before


def test_a_buffer_that_takes_anothers_place_counts_the_same() -> None:
    bench = Bench()
    commands = bench.hear(Started(epoch=0), announced(0), LearnerReady(epoch=0, version=0))
    for event in (told(failed(0, 0)), rejected(failed(0, 0), failed(0, 1)), told(failed(1, 0))):
        commands = [*commands, *bench.hear(event)]
    entries = [entry for command in drive.every(commands, Record) for entry in command.entries]
    follower = Buffer(bench.buffer.settings, bench.buffer.policy, entries)
    assert follower.books.failures.counts() == bench.buffer.books.failures.counts()
    assert follower.books.failures.news([failed(1, 0)]) == ()


def test_the_counts_are_told_soon_and_again_when_they_have_changed() -> None:
    bench = Bench().started()
    failures = told(failed(0, 0), failed(0, 1, "KeyError: 'a' (r.py:1)", "generation_failed"), failed(1, 0))
    assert drive.one(bench.hear(failures), StartTimer).key == SETTLE_TIMER
    (event,) = drive.sent(bench.hear(TimerFired(key=SETTLE_TIMER)), FailuresCounted, to="supervisor")
    example = "ValueError: 0 (reward.py:7)"
    first = ReasonCount(cause="scoring_failed", kind="ValueError (reward.py:7)", example=example, num_samples=2)
    assert (event.num_samples, event.counts[0]) == (3, first)
    assert [count.num_samples for count in event.counts] == [2, 1]
    assert drive.sent(bench.hear(TimerFired(key=SETTLE_TIMER)), FailuresCounted) == []


def test_the_last_word_of_a_run_comes_after_its_failures() -> None:
    bench = Bench().started()
    bench.hear(told(failed(0, 0)))
    commands = bench.hear(StopAsked(reason="enough"))
    kinds = [type(send.event) for send in drive.every(commands, Send) if send.to == "supervisor"]
    assert kinds == [FailuresCounted, RunFinished]


def test_the_last_word_is_said_again_when_the_groups_of_failed_samples_are_closed() -> None:
    bench = Bench(stop_after_failures=2, groups_per_batch=100, target=None).started()
    stop = bench.hear(told(failed(0, 0), failed(0, 1)))
    first = drive.one_sent(stop, RunFinished)
    commands = bench.hear(rejected(failed(0, 0), failed(0, 1)))
    last = drive.one_sent(commands, RunFinished, to="supervisor")
    assert last.balance == bench.buffer.books.accounts.balance() != first.balance
    assert (last.story, last.completed) == (first.story, False)
    assert drive.sent(bench.hear(rejected(failed(0, 0), failed(0, 1))), RunFinished) == [], "nothing has changed since"


def test_users_may_fail_for_as_many_reasons_as_they_like() -> None:
    bench = Bench(groups_per_batch=2000, target=None).started()
    assert bench.granted > 1000
    for group_id in range(1000):
        bench.hear(told(failed(group_id, 0, f"E{group_id}Error: x (r{group_id}.py:3)")))
    failures = bench.buffer.books.failures
    assert failures.num_samples == 1000
    assert failures.counts(1)[0].kind == "other reasons"
    assert len(failures.counts(10_000)) <= 201


# --- a run in which everything fails --------------------------------------------------------------------------------


def early(num: int, *, limit: int = 8, varies: bool = False, has_scored: bool = False) -> list[FailRun]:
    bench = Bench(stop_after_failures=limit, groups_per_batch=100, target=None).started()
    stops: list[FailRun] = []
    for n in range(num):
        reason = f"ValueError: boom (reward.py:{n % 3 if varies else 7})"
        stops += drive.every(bench.hear(told(failed(n // 2, n % 2, reason), has_scored=has_scored)), FailRun)
    return stops


def test_a_run_whose_first_samples_all_fail_for_one_reason_ends_with_it() -> None:
    assert early(7) == []
    (stop,) = early(8)
    assert "the first 8 samples of the run all failed" in stop.story
    assert "ValueError: boom (reward.py:7)" in stop.story


def test_what_fails_for_another_reason_beside_them_makes_one_reason_no_less_of_one() -> None:
    bench = Bench(stop_after_failures=8, groups_per_batch=100, target=None).started()
    other = told(failed(9, 0, "OSError: a stray (other.py:1)"))
    assert drive.every(bench.hear(other), FailRun) == []
    heard = [bench.hear(told(failed(n, 0, "ValueError: boom (reward.py:7)"))) for n in range(8)]
    assert [drive.every(each, FailRun) for each in heard[:-1]] == [[]] * 7
    story = drive.one(heard[-1], FailRun).story
    assert "the first 9 samples of the run all failed, for 2 reasons, 8 of them for one: ValueError: boom" in story


def test_for_several_reasons_it_takes_more_of_them() -> None:
    assert early(31, varies=True) == []
    assert len(early(40, varies=True)) == 1


def test_one_sample_that_was_scored_lets_the_run_go_on() -> None:
    assert early(100, has_scored=True) == []
    bench = Bench(stop_after_failures=2, groups_per_batch=10, target=None).started()
    bench.admit(0)
    for group_id in range(1, 9):
        assert drive.every(bench.hear(told(failed(group_id, 0))), FailRun) == []


def test_the_stop_can_be_switched_off() -> None:
    assert early(200, limit=0) == []


# --- the last word ------------------------------------------------------------------------------------------------


def test_groups_turned_away_because_rewards_fail_are_never_blamed_on_the_task() -> None:
    bench = Bench(groups_per_batch=2, max_rejected_batches=2).started()
    for group_id in range(3):
        bench.hear(rejected(failed(group_id, 0), failed(group_id, 1)))
    story = drive.one(bench.hear(rejected(failed(3, 0), failed(3, 1))), FailRun).story
    assert "too hard" not in story
    assert "8, scoring_failed" in story
    assert "ValueError: 0 (reward.py:7)" in story


def test_groups_turned_away_for_what_they_are_are() -> None:
    bench = Bench(groups_per_batch=1, max_rejected_batches=1).started()
    assert "too hard or too easy" in drive.one(bench.reject(0), FailRun).story
