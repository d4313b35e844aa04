"""The Buffer: how many groups it grants, and which deadlines they get."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from buffer_bench import MANY, Bench, LatestFirst, announced
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.messages.commands import FailRun, Record, Send
from penstock.messages.flow import DemandGranted, GrantSpan, GroupAdmitted, SettledState
from penstock.messages.ledger import (
    GroupRecorded,
    GroupsGranted,
    VersionRecorded,
)
from penstock.messages.local import Started
from penstock.messages.operator import PolicyChanged
from penstock.messages.samples import Group
from penstock.messages.training import (
    LearnerReady,
    UpdateMode,
)

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand

# --- admission --------------------------------------------------------------------------------------------------------


def test_nothing_is_granted_before_a_version_is_announced_and_the_learner_is_ready() -> None:
    bench = Bench()
    assert drive.sent(bench.hear(Started(epoch=0), LearnerReady(epoch=0, version=0)), DemandGranted) == []
    assert drive.one_sent(bench.hear(announced(0)), DemandGranted).total == 6
    other = Bench()
    assert drive.sent(other.hear(Started(epoch=0), announced(0)), DemandGranted) == []
    assert drive.one_sent(other.hear(LearnerReady(epoch=0, version=0)), DemandGranted).total == 6


@pytest.mark.parametrize("eta", range(9))
def test_outstanding_is_at_most_announced_plus_eta_plus_one_minus_trained_batches(eta: int) -> None:
    """(s + η + 1 − v)·B, with an announcement that lags up to η batches behind."""
    bench = Bench(eta=eta, groups_per_batch=2).started()
    assert bench.outstanding == (eta + 1) * 2
    for lag in range(1, eta + 2):
        bench.train_in_order(announces=False)
        assert bench.buffer.version == lag
        assert bench.outstanding == (0 + eta + 1 - lag) * 2
    assert bench.outstanding == 0
    bench.hear(announced(eta))
    assert bench.outstanding == eta * 2
    bench.hear(announced(eta + 1))
    assert bench.outstanding == (eta + 1) * 2


def test_a_grant_carries_the_announced_version_and_the_deadline_that_follows_from_it() -> None:
    bench = Bench(eta=3, groups_per_batch=1).started()
    demand = drive.one_sent(bench.train_in_order(), DemandGranted, to="prompt_source")
    assert demand.total == 5
    assert demand.spans == (GrantSpan(0, 4, 0, 0, 3), GrantSpan(4, 1, 4, 1, 4))
    assert demand.settled == SettledState(1, 1, ())


def test_a_grant_is_recorded_before_it_is_sent() -> None:
    commands = Bench().hear(Started(epoch=0), announced(0), LearnerReady(epoch=0, version=0))
    kinds = [
        [type(entry) for entry in command.entries] if isinstance(command, Record) else type(command.event)
        for command in commands
        if isinstance(command, Record | Send)
    ]
    assert kinds == [[VersionRecorded], [GroupsGranted], DemandGranted]
    assert drive.recorded(commands, GroupsGranted) == [
        GroupsGranted(span=GrantSpan(0, 6, 0, 0, 2), total=6, max_staleness=2)
    ]


def test_a_rejected_group_is_replaced_by_exactly_one() -> None:
    bench = Bench(eta=1).started()
    assert bench.granted == 4
    bench.reject(2)
    assert (bench.granted, bench.outstanding) == (5, 4)


def test_grants_never_exceed_what_the_rest_of_the_run_can_train() -> None:
    bench = Bench(eta=8, groups_per_batch=2, num_steps=3).started()
    assert bench.granted == 6
    bench.reject(0)
    assert bench.granted == 7
    for _ in range(2):
        bench.train_in_order()
    assert bench.granted == 7


def test_a_fixed_target_limits_what_is_outstanding() -> None:
    bench = Bench(eta=8, groups_per_batch=2, target=5).started()
    assert bench.outstanding == 5
    bench.train_in_order()
    assert bench.outstanding == 5


def test_a_target_below_one_batch_counts_as_one_batch() -> None:
    bench = Bench(eta=2, groups_per_batch=4, target=1).started()
    assert bench.outstanding == 4
    bench.train_in_order()
    assert bench.outstanding == 4


def test_max_concurrent_limits_what_is_granted_and_not_admitted() -> None:
    bench = Bench(eta=8, groups_per_batch=2, max_concurrent=3).started()
    assert bench.outstanding == 3
    bench.admit(0)
    assert (bench.outstanding, bench.buffer.books.table.num_in_generation) == (4, 3)


def test_the_auto_target_rises_when_the_learner_waits_and_falls_when_whole_batches_lie_ready() -> None:
    bench = Bench(eta=8, groups_per_batch=4, target=None).started()
    assert bench.outstanding == 10, "it starts at two batches, and the Learner waits for its first"
    for group_id in range(4):
        bench.admit(group_id)
    bench.train()
    assert bench.buffer.target.value == 12
    for group_id in range(4, 16):
        bench.admit(group_id)
    assert bench.batch() == (4, 5, 6, 7)
    bench.train()
    assert bench.buffer.target.value == 11, "after this batch four more groups were left"


def test_the_auto_target_is_not_raised_while_a_late_group_holds_up_a_full_buffer() -> None:
    bench = Bench(eta=1, groups_per_batch=1, target=None).started()
    bench.admit(1)
    bench.train()
    before = bench.buffer.target.value
    bench.hear(announced(1))
    bench.admit(2)
    assert bench.batch() is None, "group 0 is due now"
    assert bench.buffer.target.value == before


@given(
    eta=st.integers(0, 8),
    groups_per_batch=st.integers(1, 3),
    latest_first=st.booleans(),
    moves=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10**6)), max_size=100),
)
@settings(max_examples=60)
def test_random_walks_keep_the_bound_and_always_come_to_the_next_batch(
    eta: int, groups_per_batch: int, latest_first: bool, moves: list[tuple[int, int]]
) -> None:
    """Groups finish in any order, some are rejected, announcements lag, and the rank may be the worst there is.
    Whatever happens, as much is outstanding as the bound allows, the state is sound (``validate``), and when all that
    is granted has finished there is a batch."""
    policy = LatestFirst(max_staleness=eta, update_mode=UpdateMode.IN_FLIGHT) if latest_first else None
    bench = Bench(eta=eta, groups_per_batch=groups_per_batch, policy=policy, num_steps=MANY).started()
    buffer = bench.buffer
    for move, choice in moves:
        generating = [t.group_id for t in buffer.books.table.outstanding() if t.record is None]
        if move in (0, 1) and generating:
            bench.admit(generating[choice % len(generating)])
        elif move == 2 and generating:
            bench.reject(generating[choice % len(generating)])
        elif move == 3 and bench.open_batch is not None:
            bench.train()
        elif move == 4 and buffer.books.announced is not None and buffer.books.announced < buffer.version:
            bench.hear(announced(buffer.books.announced + 1))
        assert buffer.books.announced is not None
        assert bench.outstanding == (buffer.books.announced + eta + 1 - buffer.version) * groups_per_batch
        opened = bench.open_batch
        if opened is not None:
            assert all(opened.version - 1 - (group.oldest_version or 0) <= eta for group in opened.groups)
    bench.hear(announced(buffer.version))
    for tracked in list(buffer.books.table.outstanding()):
        if tracked.record is None:
            bench.admit(tracked.group_id)
    assert bench.open_batch is not None


# --- deadlines --------------------------------------------------------------------------------------------------------


def deadline_of(commands: list[AnyCommand]) -> int:
    return drive.recorded(commands, GroupRecorded)[0].deadline_version


def test_a_later_birth_raises_the_deadline() -> None:
    bench = Bench(eta=2, groups_per_batch=1).started()
    bench.train_in_order()
    bench.train_in_order()
    assert deadline_of(bench.admit(2, (2, 4))) == 4


def test_the_deadline_follows_the_minimum_over_all_spans() -> None:
    """A prefix made under version 2 may go on under 1: its first token is not its oldest."""
    bench = Bench(eta=2, groups_per_batch=1).started()
    bench.train_in_order()
    bench.train_in_order()
    assert deadline_of(bench.admit(2, (2, 4), (1, 4))) == 3


def test_a_birth_at_the_granted_version_leaves_the_deadline() -> None:
    bench = Bench(eta=2).started()
    assert deadline_of(bench.admit(0, (0, 4), (7, 1))) == 2


def test_a_group_without_a_token_keeps_the_deadline_of_its_grant() -> None:
    bench = Bench(eta=2).started()
    assert deadline_of(bench.admit(0, (0, 0))) == 2


def test_a_changed_policy_does_not_lower_a_deadline_that_was_granted() -> None:
    bench = Bench(eta=4).started()
    bench.hear(PolicyChanged(policy="sync", max_staleness=0, update_mode=UpdateMode.DRAIN))
    assert deadline_of(bench.admit(0)) == 4


def test_a_group_that_has_a_place_twice_stops_the_run() -> None:
    """Sample 3 of a group of two stands for sample 1."""
    bench = Bench().started()
    samples = tuple(drive.sample(0, index, reward=0.0) for index in (0, 1, 3))
    commands = bench.hear(GroupAdmitted(group=Group(group_id=0, prompt=drive.prompt(0), samples=samples)))
    assert "group 0 has a place twice: samples [0, 1, 3]" in drive.one(commands, FailRun).story
    assert drive.recorded(commands, GroupRecorded) == []


def test_a_token_older_than_the_granted_version_stops_the_run() -> None:
    bench = Bench(eta=2, groups_per_batch=1).started()
    bench.train_in_order()
    first_of_version_1 = 3
    commands = bench.admit(first_of_version_1, (1, 4), (0, 1))
    assert "group 3 has a token of version 0, it was granted for 1" in drive.one(commands, FailRun).story
    assert drive.recorded(commands, GroupRecorded) == []
