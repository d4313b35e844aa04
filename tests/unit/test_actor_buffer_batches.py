"""The Buffer: what it makes a batch of, receipts, settlements, over-sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from buffer_bench import NUM_SAMPLES, Bench, LatestFirst, announced, ends, states_of

from penstock.actors.buffer.books import recorded
from penstock.actors.buffer.machine import Buffer
from penstock.actors.buffer.outbox import SETTLE_TIMER
from penstock.messages.commands import FailRun, Record, Send, StartTimer
from penstock.messages.flow import GrantSpan, GroupAdmitted, GroupRejected, SamplesSettled, SettledState
from penstock.messages.ledger import (
    BatchesFixed,
    BatchLeased,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.local import Started, TimerFired
from penstock.messages.samples import TerminalState
from penstock.messages.training import (
    BatchReady,
    LearnerReady,
    OnStale,
    StepFinished,
    StepReported,
    UpdateMode,
)

if TYPE_CHECKING:
    from penstock.messages.ledger import LedgerEntry


def leased(version: int, *group_ids: int) -> BatchLeased:
    return BatchLeased(version=version, group_ids=group_ids, max_staleness=2, update_mode=UpdateMode.IN_FLIGHT)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_counterexample_of_the_design() -> None:
    """η = 2, B = 1: g0, g1, g2 start at version 0; g0 is trained; g3, born at 1, is ready first. Earliest deadline
    first with a wait for what is due now would train g3, and one of g1 and g2 would come too late."""
    bench = Bench(eta=2, groups_per_batch=1).started()
    bench.admit(0)
    bench.train()
    bench.hear(announced(1))
    bench.admit(3)
    assert bench.batch() is None
    bench.admit(2)
    assert bench.batch() == (2,)
    bench.train()
    assert bench.batch() is None
    bench.admit(1)
    assert bench.batch() == (1,)
    bench.train()
    assert bench.batch() == (3,)


def test_a_rank_other_than_earliest_deadline_never_blocks() -> None:
    """The first in rank order is forbidden, and the batch is found behind it."""
    policy = LatestFirst(max_staleness=1, update_mode=UpdateMode.IN_FLIGHT)
    bench = Bench(groups_per_batch=1, policy=policy).started()
    bench.admit(0)
    bench.train()
    bench.hear(announced(1))
    bench.admit(2)
    bench.admit(1)
    assert bench.batch() == (1,)


def test_the_lease_is_recorded_before_the_batch_is_offered() -> None:
    bench = Bench().started()
    bench.admit(1)
    commands = bench.admit(0)
    assert drive.recorded(commands, BatchLeased) == [leased(1, 0, 1)]
    offer = next(c for c in commands if isinstance(c, Send) and isinstance(c.event, BatchReady))
    lease = next(c for c in commands if isinstance(c, Record) and isinstance(c.entries[0], BatchLeased))
    admission = next(c for c in commands if isinstance(c, Record) and isinstance(c.entries[0], GroupRecorded))
    assert commands.index(admission) < commands.index(lease) < commands.index(offer)


def test_a_batch_says_what_the_learner_has_to_know() -> None:
    bench = Bench(eta=2, groups_per_batch=1).started()
    for group_id in (0, 1, 2):
        bench.admit(group_id)
    batch = drive.one_sent(bench.train(), BatchReady, to="learner")
    assert (batch.version, batch.announced_version, batch.max_staleness) == (2, 0, 2)
    assert (batch.update_mode, batch.mask_stale, batch.is_last) == (UpdateMode.IN_FLIGHT, False, False)
    assert batch.num_waiting_groups == 1


def test_no_second_batch_is_leased_before_the_receipt_of_the_first() -> None:
    bench = Bench(eta=2, groups_per_batch=1).started()
    bench.admit(0)
    assert bench.batch() == (0,)
    assert drive.recorded(bench.admit(1), BatchLeased) == []
    assert bench.batch() == (0,)
    assert drive.recorded(bench.train(), BatchLeased) == [leased(2, 1)]


def test_a_receipt_is_recorded_once() -> None:
    bench = Bench().started()
    bench.admit(0)
    bench.admit(1)
    receipt = bench.receipt()
    recorded = drive.recorded(bench.hear(receipt), StepRecorded)
    assert [(entry.version, entry.group_ids) for entry in recorded] == [(1, (0, 1))]
    bench.driver.ignores(receipt)
    assert states_of(bench) == {("trained", ""): 4}


@pytest.mark.parametrize("version", [1, 2])
def test_a_receipt_of_a_batch_that_was_never_leased_stops_the_run(version: int) -> None:
    bench = Bench().started()
    if version == 2:
        bench.admit(0)
        bench.admit(1)
    commands = bench.hear(StepFinished(version=version, group_ids=(0, 1), num_trained_tokens=1, max_staleness=0))
    assert drive.recorded(commands, StepRecorded) == []
    assert any(isinstance(command, FailRun) and "ledger at 0" in command.story for command in commands)


def test_a_receipt_for_other_groups_than_the_batch_stops_the_run() -> None:
    bench = Bench().started()
    bench.admit(0)
    bench.admit(1)
    commands = bench.hear(StepFinished(version=1, group_ids=(0, 2), num_trained_tokens=1, max_staleness=0))
    assert "names other groups" in drive.one(commands, FailRun).story
    assert drive.recorded(commands, StepRecorded) == []


def test_a_group_counts_once_whatever_is_said_about_it_later() -> None:
    bench = Bench().started()
    bench.admit(0)
    bench.driver.ignores(GroupAdmitted(group=drive.group(0)))
    bench.driver.ignores(GroupRejected(group_id=0, cause="late", ended=ends(0, TerminalState.FILTERED)))
    bench.reject(1)
    bench.driver.ignores(GroupAdmitted(group=drive.group(1)))
    bench.driver.ignores(GroupRejected(group_id=1, cause="again", ended=ends(1, TerminalState.FILTERED)))
    bench.driver.ignores(GroupAdmitted(group=drive.group(1234)))


def test_the_announced_version_never_goes_down() -> None:
    bench = Bench(eta=8, groups_per_batch=1).started()
    for _ in range(3):
        bench.train_in_order()
    bench.driver.ignores(announced(2))
    bench.driver.ignores(announced(3))


def test_a_step_is_reported_with_its_ages_lengths_and_the_balance() -> None:
    bench = Bench(eta=2, groups_per_batch=2).started()
    bench.train_in_order()
    bench.admit(2, (0, 4))
    bench.admit(3, (1, 4))
    report = drive.one_sent(bench.train(), StepReported, to="supervisor")
    assert (report.version, report.num_steps, report.group_ids) == (2, 100, (2, 3))
    assert report.staleness_counts == (2, 2)
    assert report.response_lengths == (4, 4, 4, 4)
    assert report.balance.is_balanced


# --- settlements ------------------------------------------------------------------------------------------------------


def test_settlements_are_collected_for_a_while_and_then_told_to_all_who_keep() -> None:
    bench = Bench(eta=2, groups_per_batch=2).started()
    assert drive.one(bench.admit(1), StartTimer).key == SETTLE_TIMER
    assert drive.every(bench.admit(3), StartTimer) == []
    commands = bench.hear(TimerFired(key=SETTLE_TIMER))
    assert [send.to for send in drive.every(commands, Send)] == [
        "prompt_source",
        "scorer",
        "filter",
        "engine/0",
        "engine/1",
    ]
    assert {event.settled for event in drive.sent(commands, SamplesSettled)} == {SettledState(2, 0, (1, 3))}
    assert drive.one(bench.admit(0), StartTimer).key == SETTLE_TIMER
    commands = bench.hear(TimerFired(key=SETTLE_TIMER))
    assert drive.sent(commands, SamplesSettled, to="filter") == [SamplesSettled(settled=SettledState(3, 2, (3,)))]


def test_a_group_is_settled_when_it_is_recorded_and_not_when_it_is_trained() -> None:
    bench = Bench(eta=0).started()
    bench.admit(0)
    bench.admit(1)
    before = bench.buffer.books.settled.snapshot()
    bench.train()
    assert bench.buffer.books.settled.snapshot() == before == SettledState(2, 2, ())


def test_what_was_recorded_and_not_told_yet_is_held_by_the_buffer() -> None:
    """If Filter and Scorer die now, nobody else knows that these samples need not be generated again."""
    bench = Bench(eta=2, groups_per_batch=2).started()
    bench.admit(1)
    assert {(lease.key.group_id, lease.key.index) for lease in bench.buffer.leases()} == {(1, 0), (1, 1)}
    bench.hear(TimerFired(key=SETTLE_TIMER))
    assert bench.buffer.leases() == ()


def test_a_grant_tells_what_is_settled_too() -> None:
    bench = Bench(eta=2, groups_per_batch=2, num_prompts=6).started()
    bench.reject(0)
    assert [lease.key.group_id for lease in bench.buffer.leases()] == [0, 0]
    other = Bench(eta=2, groups_per_batch=2).started()
    other.reject(0)
    assert other.buffer.leases() == ()


# --- over-sampling ----------------------------------------------------------------------------------------------------


def test_with_over_sampling_a_batch_takes_the_first_that_are_ready() -> None:
    """Until there is a batch, nobody is given up: any of them may be among the first."""
    bench = Bench(eta=0, groups_per_batch=2, over_sampling=1.5).started()
    assert bench.outstanding == 3
    bench.admit(2)
    assert bench.outstanding == 3
    bench.admit(1)
    assert bench.batch() == (1, 2)


def test_what_no_longer_fits_is_cancelled_as_surplus_when_the_batch_is_taken() -> None:
    bench = Bench(eta=0, groups_per_batch=2, over_sampling=1.5).started()
    bench.admit(2)
    commands = bench.admit(1)
    closed = drive.recorded(commands, GroupClosed)
    assert [entry.group_id for entry in closed] == [0]
    assert {(end.state, end.cause) for entry in closed for end in entry.ended} == {(TerminalState.CANCELLED, "surplus")}
    bench.train()
    bench.hear(announced(1))
    assert bench.outstanding == 3


def test_with_over_sampling_the_surplus_is_what_exceeds_the_multiplied_bound() -> None:
    """η = 1, B = 2: six groups are granted for four places. After the first batch four are left for two places; three
    may go on, so that the second batch too takes the first that are ready."""
    bench = Bench(eta=1, groups_per_batch=2, over_sampling=1.5).started()
    assert bench.outstanding == 6
    bench.admit(0)
    bench.admit(4)
    assert bench.batch() == (0, 4)
    assert [t.group_id for t in bench.buffer.books.table.outstanding()] == [0, 1, 2, 3, 4]
    bench.train()
    bench.admit(3)
    bench.admit(2)
    assert bench.batch() == (2, 3)
    assert states_of(bench)["cancelled", "surplus"] == 2 * NUM_SAMPLES


# --- batches that are fixed beforehand --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [2, 99])
def test_where_batches_are_fixed_nothing_more_is_granted_and_nothing_expires(num_steps: int) -> None:
    """A run that trains what another one has recorded: the bound was kept there, under versions that are no more."""
    bench = Bench(eta=9, num_steps=num_steps, on_stale=OnStale.DROP)
    batches = tuple(
        BatchLeased(version=v, group_ids=(2 * v - 2, 2 * v - 1), max_staleness=9, update_mode=UpdateMode.DRAIN)
        for v in (1, 2, 3)
    )
    entries: list[LedgerEntry] = [
        BatchesFixed(batches=batches, source="runs/first"),
        VersionRecorded(version=0),
        GroupsGranted(span=GrantSpan(0, 6, 0, 0, 0), total=6, max_staleness=9),
        *(recorded(drive.group(group_id, (0, 4)), 0) for group_id in range(6)),
    ]
    bench.driver = drive.Driver(Buffer(bench.buffer.settings, bench.buffer.policy, entries))
    commands = bench.hear(Started(epoch=0), LearnerReady(epoch=0, version=0))
    assert drive.one_sent(commands, BatchReady).version == 1
    while bench.open_batch is not None:
        commands += bench.train()
    num_trained = min(num_steps, len(batches))
    assert [step.version for step in drive.recorded(commands, StepRecorded)] == list(range(1, num_trained + 1))
    assert drive.recorded(commands, GroupsGranted) == []
    left = [group_id for group_id in range(6) if group_id >= 2 * num_trained]
    closed = drive.recorded(commands, GroupClosed)
    assert [entry.group_id for entry in closed] == left, "past its deadline, and trained all the same"
    assert {(end.state, end.cause) for entry in closed for end in entry.ended} <= {(TerminalState.CANCELLED, "run_end")}
