"""The Buffer: what it gives up, how a run ends, how a policy is switched."""

from __future__ import annotations

import actor_driver as drive
from buffer_bench import NUM_SAMPLES, Bench, announced, states_of

from penstock.messages.commands import FailRun, Record
from penstock.messages.flow import DemandGranted, GrantSpan, GroupAdmitted, SamplesSettled
from penstock.messages.ledger import (
    BatchLeased,
    CheckpointRecorded,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    PolicyRecorded,
    StepRecorded,
)
from penstock.messages.operator import PolicyChanged
from penstock.messages.samples import Group, SampleEnd, SampleKey, TerminalState
from penstock.messages.training import (
    BatchReady,
    CheckpointDemanded,
    CheckpointSaved,
    LearnerReady,
    NoticeGiven,
    OnStale,
    RunFinished,
    StopAsked,
    UpdateMode,
)

# --- the other three on_stale -----------------------------------------------------------------------------------------


def test_drop_ends_a_group_past_its_deadline_as_stale_and_its_place_is_free_again() -> None:
    bench = Bench(eta=1, groups_per_batch=1, on_stale=OnStale.DROP).started()
    assert bench.granted == 2
    bench.admit(1)
    bench.train()
    bench.hear(announced(1))
    bench.admit(2)
    assert bench.batch() == (2,), "drop waits for nobody"
    closed = drive.recorded(bench.train(), GroupClosed)
    assert [(entry.group_id, {(e.state, e.cause) for e in entry.ended}) for entry in closed] == [
        (0, {(TerminalState.STALE, "past_deadline")})
    ]
    bench.hear(announced(2))
    assert bench.outstanding == 2


def test_drop_ends_ready_groups_too_with_their_tokens_on_the_books() -> None:
    bench = Bench(eta=0, groups_per_batch=1, on_stale=OnStale.DROP, over_sampling=2.0).started()
    bench.admit(1)
    bench.admit(0)
    closed = drive.recorded(bench.train(), GroupClosed)
    assert [(entry.group_id, [e.num_tokens for e in entry.ended]) for entry in closed] == [(0, [4, 4])]


def test_requeue_grants_the_prompt_anew_at_most_k_times() -> None:
    bench = Bench(eta=0, groups_per_batch=1, on_stale=OnStale.REQUEUE, over_sampling=2.0, max_requeues=1).started()
    ordinals = [tracked.ordinal for tracked in bench.buffer.books.table.outstanding()]
    assert ordinals == [0, 1]
    bench.admit(1)
    bench.train()
    bench.hear(announced(1))
    assert [tracked.ordinal for tracked in bench.buffer.books.table.outstanding()] == [0, 2]
    bench.admit(3)
    bench.train()
    bench.hear(announced(2))
    assert [tracked.ordinal for tracked in bench.buffer.books.table.outstanding()] == [3, 4]
    assert states_of(bench)["stale", "past_deadline"] == 2 * NUM_SAMPLES


def test_mask_trains_old_groups_and_says_so_in_the_batch() -> None:
    bench = Bench(eta=0, groups_per_batch=1, on_stale=OnStale.MASK, over_sampling=2.0).started()
    bench.admit(1)
    bench.train()
    bench.hear(announced(1))
    bench.admit(0, (0, 3), (1, 1))
    assert bench.batch() == (0,)
    assert bench.open_batch is not None
    assert bench.open_batch.mask_stale


def test_mask_ends_a_group_of_which_every_token_would_be_masked() -> None:
    bench = Bench(eta=0, groups_per_batch=1, on_stale=OnStale.MASK, over_sampling=2.0).started()
    bench.admit(1)
    bench.train()
    bench.hear(announced(1))
    bench.admit(0, (0, 4))
    assert bench.batch() is None
    assert states_of(bench)["stale", "fully_masked"] == NUM_SAMPLES


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_filter_that_turns_everything_away_stops_the_run_with_advice_once() -> None:
    bench = Bench(eta=2, groups_per_batch=2, max_rejected_batches=3).started()
    for group_id in range(5):
        assert drive.every(bench.reject(group_id), FailRun) == []
    story = drive.one(bench.reject(5, cause="too_long"), FailRun).story
    assert "6 groups in a row were turned away" in story
    assert "too_long" in story
    assert drive.every(bench.reject(6), FailRun) == []


def test_a_batch_ends_the_row_of_rejections() -> None:
    bench = Bench(eta=2, groups_per_batch=2, max_rejected_batches=1).started()
    bench.reject(0)
    bench.admit(1)
    bench.admit(2)
    assert drive.every(bench.reject(3), FailRun) == []


def test_the_end_of_the_dataset_allows_one_short_last_batch() -> None:
    bench = Bench(eta=2, groups_per_batch=2, num_prompts=3).started()
    assert bench.granted == 3
    bench.admit(1)
    bench.admit(2)
    bench.train()
    bench.hear(announced(1))
    assert bench.batch() is None
    bench.admit(0)
    assert bench.batch() == (0,)
    assert bench.open_batch is not None
    assert bench.open_batch.is_last
    assert drive.one_sent(bench.train(), CheckpointDemanded).version == 2
    finished = drive.one_sent(bench.hear(CheckpointSaved(version=2, path="c")), RunFinished)
    assert finished.completed
    assert "2 batches trained of 100: the dataset ended" in finished.story


def test_the_run_ends_too_when_the_rest_of_the_dataset_is_turned_away() -> None:
    bench = Bench(eta=2, groups_per_batch=2, num_prompts=3).started()
    bench.admit(1)
    bench.admit(2)
    bench.train()
    assert drive.one_sent(bench.reject(0), CheckpointDemanded).version == 1


def test_a_dataset_of_which_nothing_is_worth_training_on_ends_the_run_at_version_0() -> None:
    bench = Bench(num_prompts=1).started()
    assert drive.one_sent(bench.reject(0), CheckpointDemanded).version == 0


def test_the_last_step_cancels_what_is_left_over_and_demands_the_checkpoint() -> None:
    bench = Bench(eta=2, groups_per_batch=2, num_steps=1, over_sampling=2.0, on_stale=OnStale.DROP).started()
    assert bench.granted == 4
    bench.admit(0)
    bench.admit(1)
    assert bench.open_batch is not None
    assert bench.open_batch.is_last
    commands = bench.train()
    assert drive.sent(commands, CheckpointDemanded, to="learner") == [CheckpointDemanded(version=1, ends_run=True)]
    assert drive.sent(commands, RunFinished) == []
    assert drive.one_sent(commands, SamplesSettled, to="engine/0").settled.floor == 4
    assert states_of(bench) == {("trained", ""): 4, ("cancelled", "run_end"): 4}


def test_the_run_is_finished_when_the_checkpoint_of_the_last_receipt_is_recorded_and_not_before() -> None:
    bench = Bench(eta=0, groups_per_batch=2, num_steps=1).started()
    bench.admit(0)
    bench.admit(1)
    bench.driver.ignores(CheckpointSaved(version=1, path="c1"))  # ahead of its receipt
    assert drive.sent(bench.hear(CheckpointSaved(version=0, path="c0")), RunFinished) == []
    assert drive.one_sent(bench.train(), CheckpointDemanded).version == 1
    commands = bench.hear(CheckpointSaved(version=1, path="c1"))
    assert isinstance(commands[0], Record)
    assert drive.recorded(commands, CheckpointRecorded) == [CheckpointRecorded(version=1, path="c1")]
    finished = drive.one_sent(commands, RunFinished, to="supervisor")
    assert (finished.completed, finished.version, finished.checkpoint) == (True, 1, "c1")
    assert finished.balance.is_balanced
    assert finished.balance.in_system == 0
    bench.driver.ignores(CheckpointSaved(version=1, path="c1"))


def test_a_stopped_run_grants_and_offers_nothing_more_and_still_balances() -> None:
    bench = Bench(eta=0, groups_per_batch=2).started()
    bench.admit(0)
    finished = drive.one_sent(bench.hear(StopAsked(reason="ctrl-c")), RunFinished)
    assert (finished.completed, finished.story) == (False, "ctrl-c")
    assert finished.balance.is_balanced
    assert finished.balance.in_system == 2 * NUM_SAMPLES
    commands = bench.admit(1)
    assert drive.recorded(commands, GroupRecorded) != []
    assert drive.recorded(commands, BatchLeased) == []
    assert drive.sent(bench.hear(announced(1)), DemandGranted) == []
    bench.driver.ignores(StopAsked(reason="again"))


def test_the_receipt_of_a_batch_in_training_still_counts_after_a_stop() -> None:
    bench = Bench(eta=0, groups_per_batch=2).started()
    bench.admit(0)
    bench.admit(1)
    receipt = bench.receipt()
    demanded = drive.one_sent(bench.hear(StopAsked(reason="ctrl-c")), CheckpointDemanded, to="learner")
    assert demanded == CheckpointDemanded(version=0, ends_run=True)
    assert [entry.version for entry in drive.recorded(bench.hear(receipt), StepRecorded)] == [1]
    assert bench.buffer.state == "stopping"
    finished = drive.one_sent(bench.hear(CheckpointSaved(version=1, path="c1")), RunFinished)
    assert (finished.completed, finished.story, finished.checkpoint) == (False, "ctrl-c", "c1")


def test_a_stop_demands_what_is_trained_beside_the_checkpoint_that_it_has_demanded() -> None:
    """The Learner, which was still writing an older one, has then begun this one and its next batch at once."""
    bench = Bench(eta=2, groups_per_batch=2).started()
    bench.train_in_order()
    bench.admit(2)
    bench.admit(3)
    demanded = drive.one_sent(bench.hear(StopAsked(reason="ctrl-c")), CheckpointDemanded, to="learner")
    assert demanded == CheckpointDemanded(version=1, ends_run=True)
    again = drive.one_sent(bench.train(), CheckpointDemanded, to="learner")
    assert again == CheckpointDemanded(version=2, ends_run=True)
    assert drive.sent(bench.hear(CheckpointSaved(version=1, path="c1")), RunFinished) == []
    finished = drive.one_sent(bench.hear(CheckpointSaved(version=2, path="c2")), RunFinished)
    assert (finished.completed, finished.version, finished.checkpoint) == (False, 2, "c2")


def test_under_a_stop_the_batch_that_is_out_is_not_offered_again() -> None:
    """Its Learner repeats an older receipt; what is wanted of it now is a checkpoint."""
    bench = Bench(eta=2, groups_per_batch=2).started()
    bench.admit(0)
    bench.admit(1)
    receipt = bench.receipt()
    bench.train()
    bench.admit(2)
    bench.admit(3)
    assert bench.open_batch is not None
    bench.hear(StopAsked(reason="ctrl-c"))
    assert drive.sent(bench.hear(receipt), BatchReady) == []


def test_a_stop_with_nothing_to_save_ends_at_once() -> None:
    bench = Bench(eta=0, groups_per_batch=2).started()
    bench.admit(0)
    bench.admit(1)
    bench.train()
    bench.hear(CheckpointSaved(version=1, path="c1"))
    assert not drive.one_sent(bench.hear(StopAsked(reason="ctrl-c")), RunFinished).completed


def test_a_stop_does_not_wait_for_a_learner_that_has_to_train_old_batches_first() -> None:
    bench = Bench(eta=0, groups_per_batch=2).started()
    bench.admit(0)
    bench.admit(1)
    bench.train()
    bench.hear(LearnerReady(epoch=1, version=-1))
    assert not drive.one_sent(bench.hear(StopAsked(reason="ctrl-c")), RunFinished).completed


def test_a_learner_that_dies_while_it_was_to_save_ends_the_stop() -> None:
    bench = Bench(eta=0, groups_per_batch=2).started()
    bench.admit(0)
    bench.admit(1)
    bench.train()
    assert drive.sent(bench.hear(StopAsked(reason="ctrl-c")), RunFinished) == []
    assert not drive.one_sent(bench.hear(LearnerReady(epoch=1, version=-1)), RunFinished).completed


def test_a_run_that_has_only_its_last_checkpoint_to_write_is_completed_in_spite_of_a_stop() -> None:
    bench = Bench(eta=0, groups_per_batch=2, num_steps=1).started()
    bench.train_in_order()
    assert drive.sent(bench.hear(StopAsked(reason="ctrl-c")), RunFinished) == []
    assert drive.one_sent(bench.hear(CheckpointSaved(version=1, path="c1")), RunFinished).completed
    bench = Bench(eta=0, groups_per_batch=2, num_steps=1).started()
    bench.train_in_order()
    bench.hear(LearnerReady(epoch=1, version=-1))
    assert drive.sent(bench.hear(StopAsked(reason="ctrl-c")), RunFinished) == [], "it is trained again, and saved"


def test_a_stop_of_a_run_that_has_ended_changes_nothing() -> None:
    bench = Bench(eta=0, groups_per_batch=2, num_steps=1).started()
    bench.admit(0)
    bench.admit(1)
    bench.train()
    bench.hear(CheckpointSaved(version=1, path="c"))
    bench.driver.ignores(StopAsked(reason="ctrl-c"))


# --- policy switch ----------------------------------------------------------------------------------------------------


def test_a_refused_policy_leaves_everything_as_it_is() -> None:
    bench = Bench(eta=2, publish_every=2).started()
    before = bench.buffer.policy
    commands = bench.hear(PolicyChanged(policy="sync", max_staleness=0, update_mode=UpdateMode.DRAIN))
    assert "publish_every is 2" in drive.one_sent(commands, NoticeGiven).text
    assert drive.every(commands, Record) == []
    assert bench.buffer.policy == before


def test_an_accepted_policy_is_recorded_and_holds_for_new_grants() -> None:
    bench = Bench(eta=1, groups_per_batch=1).started()
    commands = bench.hear(PolicyChanged(policy="fully_async", max_staleness=4, update_mode=UpdateMode.INTERRUPT))
    assert drive.recorded(commands, PolicyRecorded) == [
        PolicyRecorded(policy="fully_async", max_staleness=4, update_mode=UpdateMode.INTERRUPT, on_stale=OnStale.WAIT)
    ]
    granted = drive.recorded(commands, GroupsGranted)
    assert [entry.span for entry in granted] == [GrantSpan(2, 3, 2, 0, 4)]
    records = [command for command in commands if isinstance(command, Record)]
    assert isinstance(records[0].entries[0], PolicyRecorded)


def test_admission_pauses_until_what_is_outstanding_fits_a_smaller_bound() -> None:
    bench = Bench(eta=4, groups_per_batch=1).started()
    bench.hear(PolicyChanged(policy="one_step_off", max_staleness=1, update_mode=UpdateMode.DRAIN))
    for left in (4, 3, 2):
        bench.train_in_order()
        assert (bench.granted, bench.outstanding) == (5, left)
    bench.train_in_order()
    assert (bench.granted, bench.outstanding) == (6, 2)


def test_after_a_switch_to_wait_no_group_is_left_that_cannot_be_trained_in_time() -> None:
    """Under ``drop`` two groups may be due at once where one place is left. ``wait`` would wait for a batch that no
    rule allows; so what does not fit ends as stale at the switch."""
    bench = Bench(eta=2, groups_per_batch=1, on_stale=OnStale.DROP).started()
    bench.admit(0)
    bench.train()
    bench.hear(announced(1))
    bench.admit(3)
    bench.train()
    bench.hear(announced(2))
    assert [(t.group_id, t.deadline) for t in bench.buffer.books.table.outstanding()] == [(1, 2), (2, 2), (4, 4)]
    commands = bench.hear(PolicyChanged(policy="fully_async", max_staleness=2, update_mode=UpdateMode.IN_FLIGHT))
    closed = drive.recorded(commands, GroupClosed)
    assert [(entry.group_id, {e.state for e in entry.ended}) for entry in closed] == [(2, {TerminalState.STALE})]
    bench.admit(1)
    assert bench.batch() == (1,)


# --- the books --------------------------------------------------------------------------------------------------------


def test_the_balance_holds_through_every_way_in_which_a_group_can_end() -> None:
    """``validate`` compares both sides after every event; this is the sum at the end."""
    bench = Bench(eta=1, groups_per_batch=2, num_steps=2, over_sampling=2.0).started()
    failed = SampleEnd(key=SampleKey(0, 0), state=TerminalState.FAILED, cause="generation_failed", num_tokens=1)
    replaced = drive.group(0, ended=(failed,))
    samples = (drive.sample(0, 2, reward=1.0), drive.sample(0, 1, reward=0.0))
    bench.hear(GroupAdmitted(group=Group(group_id=0, prompt=replaced.prompt, samples=samples, ended=(failed,))))
    bench.reject(1)
    bench.admit(2)
    bench.train()
    bench.hear(announced(1))
    bench.train_in_order()
    bench.hear(CheckpointSaved(version=2, path="c"))
    balance = bench.buffer.books.accounts.balance()
    assert balance.is_balanced
    assert balance.in_system == 0
    ended = states_of(bench)
    assert ended["trained", ""] == 4 * NUM_SAMPLES
    assert ended["failed", "generation_failed"] == 1
    assert ended["filtered", "why"] == NUM_SAMPLES
    assert balance.issued == bench.granted * NUM_SAMPLES + 1
