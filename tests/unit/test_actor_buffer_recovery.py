"""The Buffer after a loss: its own, which the ledger makes good, and the Learner's, which trains old batches again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import msgspec
import pytest
from buffer_bench import Bench, announced

from penstock.actors.buffer.machine import Buffer
from penstock.messages.commands import ArchiveSamples, FailRun, FetchBatch, Record, Send
from penstock.messages.errors import UserFault
from penstock.messages.flow import DemandGranted, SamplesSettled
from penstock.messages.ledger import (
    BatchLeased,
    CheckpointRecorded,
    GroupRecorded,
    PayloadsReleased,
    RunRecorded,
    StepRecorded,
)
from penstock.messages.local import BatchFetched, SamplesArchived, Started
from penstock.messages.training import (
    BatchReady,
    CheckpointDemanded,
    CheckpointNamed,
    CheckpointSaved,
    CheckpointsKept,
    LearnerReady,
    OnStale,
    RunFinished,
    StepFinished,
)

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import Group


class Ledgered:
    """A Buffer on the bench, with a ledger that outlives it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.entries: list[LedgerEntry] = []
        self.payloads: dict[int, Group] = {}
        hear = bench.driver.hear

        def noted(*events: Event) -> list[AnyCommand]:
            commands = hear(*events)
            self._keep(commands)
            return commands

        bench.driver.hear = noted  # type: ignore[method-assign]

    def _keep(self, commands: list[AnyCommand]) -> None:
        for command in commands:
            if isinstance(command, Record):
                self.entries.extend(command.entries)
        self.payloads |= {e.group_id: e.payload for e in self.entries if isinstance(e, GroupRecorded) and e.payload}

    def restarted(self, **settings: object) -> Buffer:
        """A Buffer that takes the place of the one on the bench, which is dead."""
        old = self.bench.buffer
        changed = msgspec.structs.replace(old.settings, **settings)
        return Buffer(changed, old.policy, self.entries)

    def batch(self, version: int) -> tuple[Group, ...]:
        (lease,) = [e for e in self.entries if isinstance(e, BatchLeased) and e.version == version]
        return tuple(self.payloads[group_id] for group_id in lease.group_ids)


def run_to(version: int, *, keep_checkpoints: int = 1, **fields: object) -> Ledgered:
    """A run of two groups a batch that has come to this version."""
    bench = Bench(eta=2, **fields)  # type: ignore[arg-type]
    bench.buffer.settings = bench.buffer.books.settings = msgspec.structs.replace(
        bench.buffer.settings, keep_checkpoints=keep_checkpoints
    )
    run = Ledgered(bench)
    bench.started()
    for _ in range(version):
        bench.train_in_order()
    return run


def books_of(buffer: Buffer) -> object:
    """The books, without the spans that nobody needs any more."""
    buffer.books.grants.snapshot(buffer.books.settled.floor)
    return drive.snapshot(buffer.books)


# --- the Buffer's own loss --------------------------------------------------------------------------------------------


def test_a_buffer_that_is_built_from_the_ledger_has_the_books_of_its_predecessor() -> None:
    for version in range(4):
        run = run_to(version)
        run.bench.admit(2 * version)
        run.bench.reject(2 * version + 1)
        if version > 1:
            run.bench.hear(CheckpointSaved(version=version - 1, path="c"))
        for end in range(len(run.entries)):  # whatever was the last that became durable
            Buffer(run.bench.buffer.settings, run.bench.buffer.policy, run.entries[:end]).validate()
        assert books_of(run.restarted()) == books_of(run.bench.buffer)


def test_requeued_prompts_come_in_the_same_order_after_a_restart() -> None:
    run = run_to(0, on_stale=OnStale.REQUEUE)
    bench = run.bench
    for _ in range(4):
        for group_id in range(bench.granted - 3, bench.granted):
            bench.admit(group_id)
        if bench.open_batch is not None:
            bench.train()
            bench.hear(announced(bench.buffer.version))
    assert books_of(run.restarted()) == books_of(bench.buffer)


def test_a_restarted_buffer_tells_everyone_what_is_granted_and_what_is_settled() -> None:
    run = run_to(1)
    total = run.bench.granted
    driver = drive.Driver(run.restarted())
    commands = driver.hear(Started(epoch=1))
    demand = drive.one_sent(commands, DemandGranted, to="prompt_source")
    assert (demand.total, demand.settled.floor) == (total, 2)
    assert {command.to for command in commands if isinstance(command, Send)} >= {"scorer", "filter", "engine/0"}
    assert drive.one_sent(commands, SamplesSettled, to="filter").settled == demand.settled


def test_the_open_batch_is_offered_again_as_it_was_and_none_is_formed_in_its_place() -> None:
    run = run_to(1)
    for group_id in (2, 3):
        run.bench.admit(group_id)
    open_batch = run.bench.open_batch
    assert open_batch is not None
    driver = drive.Driver(run.restarted())
    driver.hear(Started(epoch=1))
    commands = driver.hear(LearnerReady(epoch=0, version=0))
    assert drive.sent(commands, BatchReady) == []  # the Learner's receipt is still on its way: it stands at 1
    assert commands == [FetchBatch(1, (0, 1))]
    receipt = StepFinished(version=1, group_ids=(0, 1), num_trained_tokens=1, max_staleness=0)
    offered = drive.one_sent(driver.hear(receipt), BatchReady)
    assert (offered.version, offered.groups) == (open_batch.version, open_batch.groups)
    assert driver.hear(BatchFetched(version=1, groups=run.batch(1))) == []


def test_a_run_that_had_ended_says_so_again() -> None:
    run = run_to(1, num_steps=1)
    run.bench.hear(CheckpointSaved(version=1, path="c1"))
    finished = drive.one_sent(drive.Driver(run.restarted()).hear(Started(epoch=1)), RunFinished)
    assert (finished.completed, finished.version, finished.checkpoint) == (True, 1, "c1")
    assert finished.balance == run.bench.buffer.books.accounts.balance()


def test_a_recorded_batch_is_trained_also_when_the_run_was_made_shorter_since() -> None:
    run = run_to(2)
    for group_id in (4, 5):
        run.bench.admit(group_id)
    old = run.bench.buffer.settings
    driver = drive.Driver(run.restarted(pacing=msgspec.structs.replace(old.pacing, num_steps=2)))
    driver.hear(Started(epoch=1), LearnerReady(epoch=0, version=0))
    receipt = StepFinished(version=2, group_ids=(2, 3), num_trained_tokens=1, max_staleness=0)
    assert drive.one_sent(driver.hear(receipt), BatchReady).version == 3
    receipt = StepFinished(version=3, group_ids=(4, 5), num_trained_tokens=1, max_staleness=0)
    assert drive.one_sent(driver.hear(receipt), CheckpointDemanded).version == 3


def test_a_run_whose_last_checkpoint_is_missing_demands_it() -> None:
    run = run_to(1, num_steps=1)
    commands = drive.Driver(run.restarted()).hear(Started(epoch=1))
    assert drive.one_sent(commands, CheckpointDemanded, to="learner").version == 1


def test_a_ledger_of_another_run_is_refused_by_name() -> None:
    def identity(num_rows: int) -> RunRecorded:
        return RunRecorded(seed=1, num_rows=num_rows, shuffle=True, samples_per_group=2, groups_per_batch=2)

    run = run_to(0)
    run.entries.insert(0, identity(100))
    assert run.restarted(identity=identity(100)).books.identity == identity(100)
    with pytest.raises(UserFault, match=r"num_rows 99 \(was 100\)"):
        run.restarted(identity=identity(99))


def test_the_first_entry_names_the_run() -> None:
    identity = RunRecorded(seed=1, num_rows=9, shuffle=True, samples_per_group=2, groups_per_batch=2)
    bench = Bench()
    bench.buffer.settings = bench.buffer.books.settings = msgspec.structs.replace(
        bench.buffer.settings, identity=identity
    )
    assert drive.recorded(bench.hear(Started(epoch=0)), RunRecorded) == [identity]
    assert drive.recorded(bench.hear(Started(epoch=0)), RunRecorded) == []


# --- the Learner's loss -----------------------------------------------------------------------------------------------


def test_a_learner_that_has_started_is_told_the_newest_recorded_checkpoint_and_offered_nothing() -> None:
    run = run_to(4)
    run.bench.hear(CheckpointSaved(version=2, path="c2"))
    commands = run.bench.hear(LearnerReady(epoch=7, version=-1))
    named = drive.one_sent(commands, CheckpointNamed, to="learner")
    assert named == CheckpointNamed(learner_epoch=7, version=2, path="c2", announced_version=4)
    assert drive.sent(commands, BatchReady) == []


def test_without_a_checkpoint_a_learner_is_told_to_begin_with_the_model() -> None:
    run = run_to(1)
    named = drive.one_sent(run.bench.hear(LearnerReady(epoch=1, version=-1)), CheckpointNamed)
    assert (named.version, named.path) == (0, "")


def test_recorded_batches_are_offered_again_unchanged_and_in_order_before_any_new_one() -> None:
    run = run_to(4)
    bench = run.bench
    bench.hear(CheckpointSaved(version=2, path="c2"))
    for group_id in (8, 9):
        bench.admit(group_id)
    open_batch = bench.open_batch
    assert open_batch is not None
    bench.hear(LearnerReady(epoch=1, version=-1))
    commands = bench.hear(LearnerReady(epoch=1, version=2))
    for version in (3, 4):
        groups = run.batch(version)
        assert commands == [FetchBatch(version, tuple(group.group_id for group in groups))]
        offered = drive.one_sent(bench.hear(BatchFetched(version=version, groups=groups)), BatchReady)
        assert (offered.version, offered.groups) == (version, groups)
        commands = bench.hear(
            StepFinished(
                version=version, group_ids=tuple(g.group_id for g in groups), num_trained_tokens=1, max_staleness=0
            )
        )
        assert drive.recorded(commands, StepRecorded) == []  # it is recorded, once
    assert drive.one_sent(commands, BatchReady) == open_batch
    assert drive.recorded(bench.train(), StepRecorded) != []


def test_a_batch_fetched_for_a_learner_that_has_gone_is_not_offered_to_its_successor() -> None:
    run = run_to(2)
    run.bench.hear(
        LearnerReady(epoch=1, version=-1), LearnerReady(epoch=1, version=0), LearnerReady(epoch=2, version=-1)
    )
    assert run.bench.hear(BatchFetched(version=1, groups=run.batch(1))) == []


def test_a_batch_whose_samples_are_gone_stops_the_run_if_it_is_still_wanted() -> None:
    run = run_to(2)
    run.bench.hear(LearnerReady(epoch=1, version=-1), LearnerReady(epoch=1, version=0))
    commands = run.bench.hear(BatchFetched(version=1, groups=(), is_gone=True))
    assert any(isinstance(command, FailRun) for command in commands)


def test_a_learner_that_is_ahead_of_the_offer_moves_the_cursor_with_its_receipt() -> None:
    run = run_to(3)
    driver = drive.Driver(run.restarted())
    driver.hear(Started(epoch=1), announced(3))
    assert driver.hear(LearnerReady(epoch=0, version=0)) == [FetchBatch(1, (0, 1))]
    receipt = StepFinished(version=3, group_ids=(4, 5), num_trained_tokens=1, max_staleness=0)
    assert drive.sent(driver.hear(receipt), BatchReady) == []
    assert driver.machine.learner.is_level


def test_a_new_buffer_offers_no_batch_that_the_checkpoint_covers() -> None:
    """What the Learner repeats to it is the version that it loaded when it started, which may be long ago."""
    run = run_to(4)
    run.bench.hear(CheckpointSaved(version=2, path="c2"))
    driver = drive.Driver(run.restarted())
    assert driver.hear(Started(epoch=1), LearnerReady(epoch=0, version=0))[-1] == FetchBatch(3, (4, 5))


def test_a_checkpoint_that_is_heard_of_late_moves_the_offer_past_it() -> None:
    run = run_to(4)
    driver = drive.Driver(run.restarted())
    assert driver.hear(Started(epoch=1), LearnerReady(epoch=0, version=0))[-1] == FetchBatch(1, (0, 1))
    assert driver.hear(CheckpointSaved(version=3, path="c3"))[-1] == FetchBatch(4, (6, 7))


def test_a_learner_that_stands_ahead_of_the_ledger_stops_the_run() -> None:
    """It has trained what nobody has recorded: nothing that is offered to it could make that good."""
    run = run_to(2)
    commands = run.bench.hear(LearnerReady(epoch=1, version=-1), LearnerReady(epoch=1, version=3))
    assert drive.one(commands, FailRun).story == "the Learner stands at version 3, and the ledger at 2"
    assert not drive.one_sent(commands, RunFinished).completed
    assert drive.sent(commands, BatchReady) == []


# --- checkpoints and what they cover ----------------------------------------------------------------------------------


def test_payloads_go_when_the_oldest_checkpoint_that_is_kept_covers_them() -> None:
    run = run_to(4, keep_checkpoints=2)
    released = [
        (checkpoint, drive.recorded(run.bench.hear(CheckpointSaved(version=checkpoint, path="c")), PayloadsReleased))
        for checkpoint in (1, 2, 4)
    ]
    assert released == [
        (1, [PayloadsReleased(through_version=1)]),
        (2, []),
        (4, [PayloadsReleased(through_version=2)]),
    ]


def test_the_learner_hears_which_checkpoints_may_go_after_the_new_one_is_recorded() -> None:
    run = run_to(2, keep_checkpoints=1)
    commands = run.bench.hear(CheckpointSaved(version=2, path="c2"))
    kinds = [type(command.entries[0]) for command in commands if isinstance(command, Record)]
    assert kinds == [CheckpointRecorded, PayloadsReleased]
    assert drive.one_sent(commands, CheckpointsKept, to="learner").oldest_version == 2


def test_samples_are_archived_before_their_payloads_go_and_before_the_run_ends() -> None:
    run = run_to(2, num_steps=2)
    bench = run.bench
    settings = msgspec.structs.replace(bench.buffer.settings, keep_samples=True)
    bench.buffer.settings = bench.buffer.books.settings = settings
    commands = bench.hear(CheckpointSaved(version=2, path="c2"))
    assert ArchiveSamples(1, 2) in commands
    assert drive.recorded(commands, PayloadsReleased) == []
    assert drive.sent(commands, RunFinished) == []
    commands = bench.hear(SamplesArchived(last_version=2))
    assert drive.recorded(commands, PayloadsReleased) == [PayloadsReleased(through_version=2)]
    assert drive.one_sent(commands, RunFinished).completed


def test_one_archive_at_a_time_so_that_none_reads_what_the_end_of_another_has_released() -> None:
    run = run_to(3, num_steps=4)
    bench = run.bench
    settings = msgspec.structs.replace(bench.buffer.settings, keep_samples=True)
    bench.buffer.settings = bench.buffer.books.settings = settings
    asked: list[ArchiveSamples] = []
    for version in (1, 2, 3):
        commands = bench.hear(CheckpointSaved(version=version, path=f"c{version}"))
        asked += [command for command in commands if isinstance(command, ArchiveSamples)]
    assert asked == [ArchiveSamples(1, 1)]
    commands = bench.hear(SamplesArchived(last_version=1))
    assert [command for command in commands if isinstance(command, ArchiveSamples)] == [ArchiveSamples(2, 3)]
    assert drive.recorded(commands, PayloadsReleased) == []
    commands = bench.hear(SamplesArchived(last_version=3))
    assert [command for command in commands if isinstance(command, ArchiveSamples)] == []
    assert drive.recorded(commands, PayloadsReleased) == [PayloadsReleased(through_version=3)]


def test_a_run_that_was_done_but_for_its_archive_has_that_written_by_the_next_buffer() -> None:
    run = run_to(1, num_steps=1)
    run.bench.hear(CheckpointSaved(version=1, path="c1"))
    run.entries[:] = [entry for entry in run.entries if not isinstance(entry, PayloadsReleased)]
    driver = drive.Driver(run.restarted(keep_samples=True))
    commands = driver.hear(Started(epoch=1))
    assert ArchiveSamples(1, 1) in commands
    assert drive.sent(commands, RunFinished) == []
    assert drive.one_sent(driver.hear(SamplesArchived(last_version=1)), RunFinished).completed


def test_a_buffer_that_takes_anothers_place_archives_what_that_one_had_not_released() -> None:
    """Whether the archive that was asked for was written is not known; what was not released can be read again."""
    run = run_to(2)
    settings = msgspec.structs.replace(run.bench.buffer.settings, keep_samples=True)
    run.bench.buffer.settings = run.bench.buffer.books.settings = settings
    assert ArchiveSamples(1, 2) in run.bench.hear(CheckpointSaved(version=2, path="c2"))
    run.bench.train_in_order()
    driver = drive.Driver(run.restarted())
    driver.hear(Started(epoch=1), LearnerReady(epoch=0, version=3))
    assert ArchiveSamples(1, 3) in driver.hear(CheckpointSaved(version=3, path="c3"))
    assert drive.recorded(driver.hear(SamplesArchived(last_version=3)), PayloadsReleased) == [
        PayloadsReleased(through_version=3)
    ]
