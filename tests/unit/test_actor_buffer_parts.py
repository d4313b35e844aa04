"""The Buffer of a run that only collects groups."""

from __future__ import annotations

import actor_driver as drive
from buffer_bench import Bench

from penstock.actors.buffer.goals import Collect
from penstock.messages.commands import ArchiveGroups, FailRun
from penstock.messages.local import SamplesArchived
from penstock.messages.training import BatchReady, CheckpointSaved, RunFinished, StepReported, StopAsked


def collecting(num_groups: int, **fields: int) -> Bench:
    """A Buffer that wants so many groups, two of which would be a batch; version 0 is served."""
    return Bench(eta=9, num_steps=9, goal=Collect(num_groups), **fields).started()  # type: ignore[arg-type]


def test_as_many_groups_are_granted_as_are_wanted_and_none_is_trained() -> None:
    bench = collecting(3)
    assert bench.granted == 3
    for group_id in (1, 0):
        assert not drive.sent(bench.admit(group_id), BatchReady)
    assert bench.batch() is None
    assert bench.granted == 3


def test_a_group_that_is_turned_away_makes_room_for_another() -> None:
    bench = collecting(3)
    bench.admit(0)
    bench.reject(1)
    assert bench.granted == 4
    assert bench.outstanding == 3


def test_no_more_are_in_generation_than_the_limit_says() -> None:
    bench = collecting(8, max_concurrent=3)
    assert bench.granted == 3
    bench.admit(0)
    assert bench.granted == 4


def test_each_batch_of_them_is_reported_and_what_is_left_at_the_end() -> None:
    bench = collecting(3)
    assert not drive.sent(bench.admit(2), StepReported)
    first = drive.one_sent(bench.admit(0), StepReported)
    assert (first.version, first.num_steps, first.group_ids) == (1, 2, (2, 0))
    assert first.staleness_counts == ()
    last = drive.one_sent(bench.admit(1), StepReported)
    assert (last.version, last.num_steps, last.group_ids) == (2, 2, (1,))


def test_what_was_collected_is_written_to_a_file_and_then_the_run_is_over() -> None:
    bench = collecting(3)
    for group_id in (2, 0, 1):
        bench.admit(group_id)
    assert drive.one(bench.commands, ArchiveGroups).group_ids == (2, 0, 1)
    assert not drive.sent(bench.hear(CheckpointSaved(version=0, path="c")), RunFinished), "of the warm start"
    finished = drive.one_sent(bench.hear(SamplesArchived(last_version=0)), RunFinished)
    assert finished.completed
    assert finished.story == "3 groups collected of 3"
    assert finished.balance.in_system == 6
    assert finished.balance.is_balanced


def test_it_ends_with_fewer_where_the_dataset_has_no_more() -> None:
    bench = collecting(5, num_prompts=3)
    bench.admit(0)
    bench.reject(1)
    bench.admit(2)
    assert drive.one(bench.commands, ArchiveGroups).group_ids == (0, 2)
    assert drive.one_sent(bench.hear(SamplesArchived(last_version=0)), RunFinished).story == "2 groups collected of 5"


def test_groups_that_are_all_turned_away_end_it_and_some_do_not() -> None:
    bench = collecting(50, max_rejected_batches=2)
    for group_id in (0, 1, 2):
        assert not drive.every(bench.reject(group_id), FailRun)
    bench.admit(3)
    for group_id in (4, 5, 6):
        assert not drive.every(bench.reject(group_id), FailRun)
    assert "4 groups in a row were turned away" in drive.one(bench.reject(7), FailRun).story


def test_a_stop_keeps_what_there_is() -> None:
    bench = collecting(3)
    bench.admit(0)
    finished = drive.one_sent(bench.hear(StopAsked(reason="enough")), RunFinished)
    assert not finished.completed
    assert finished.balance.in_system == 6
