"""The rarer ways in which a run goes from phase to phase; the others are in the tests of what leads there."""

from __future__ import annotations

import actor_driver as drive
import msgspec
from buffer_bench import Bench, announced, ends
from test_actor_buffer_recovery import Ledgered, run_to
from test_actor_evaluation import E0, E1, E2, evaluate, evaluating, finish_training

from penstock.actors.buffer.goals import Evaluate
from penstock.actors.buffer.phases import Phase
from penstock.messages.commands import FailRun
from penstock.messages.evaluation import PublishDemanded
from penstock.messages.flow import FailuresTold, GroupAdmitted, GroupRejected
from penstock.messages.local import SamplesArchived, Started
from penstock.messages.operator import PolicyChanged
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState
from penstock.messages.training import (
    CheckpointDemanded,
    CheckpointSaved,
    LearnerReady,
    OnStale,
    RunFinished,
    StepFinished,
    StopAsked,
    UpdateMode,
)

MASK_TO_WAIT = PolicyChanged(policy="fully_async", max_staleness=1, update_mode=UpdateMode.IN_FLIGHT)


def replaced(run: Ledgered) -> Bench:
    """Another Buffer takes its place, and has heard nothing of a Learner."""
    run.bench.driver = drive.Driver(run.restarted())
    run.bench.hear(Started(epoch=1))
    return run.bench


def fresh(**fields: object) -> Ledgered:
    run = Ledgered(Bench(**fields))  # type: ignore[arg-type]
    run.bench.started()
    return run


def left_over(num_saved: int) -> Bench:
    """Everything else is trained, and so many batches are saved; one group that is too old is still being made."""
    bench = Bench(eta=1, on_stale=OnStale.MASK, num_prompts=7).started()
    for first in (1, 3, 5):
        bench.admit(first)
        bench.admit(first + 1)
        bench.train()
        bench.hear(announced(bench.buffer.version))
    bench.hear(CheckpointSaved(version=num_saved, path="c"))
    assert (bench.buffer.version, bench.outstanding) == (3, 1)
    return bench


def test_a_learner_that_is_ahead_of_the_ledger_stops_the_run_before_it_runs_and_later() -> None:
    bench = Bench()
    bench.hear(Started(epoch=0), LearnerReady(epoch=0, version=5))
    assert bench.buffer.run.phase is Phase.STOPPED
    bench = Bench().started()
    bench.hear(LearnerReady(epoch=1, version=5))
    assert bench.buffer.run.phase is Phase.STOPPED
    bench = Bench()
    bench.hear(Started(epoch=0), StepFinished(version=5, group_ids=(), num_trained_tokens=1, max_staleness=0))
    assert bench.buffer.run.phase is Phase.STOPPED
    bench = Bench().started()
    bench.hear(StepFinished(version=5, group_ids=(), num_trained_tokens=1, max_staleness=0))
    assert bench.buffer.run.phase is Phase.STOPPED


def test_the_last_receipt_may_come_to_a_buffer_that_knows_of_no_learner() -> None:
    run = fresh(num_steps=1)
    run.bench.admit(0)
    run.bench.admit(1)
    receipt = run.bench.receipt()
    bench = replaced(run)
    bench.hear(receipt)
    assert bench.buffer.run.phase is Phase.ENDING


def test_a_token_that_is_too_old_stops_a_run_that_does_not_run_yet() -> None:
    run = fresh()
    run.bench.hear(announced(1))
    newest = run.bench.granted - 1
    bench = replaced(run)
    bench.hear(GroupAdmitted(group=drive.group(newest, (0, 4))))
    assert bench.buffer.run.phase is Phase.STOPPED


def test_a_dataset_whose_last_group_is_turned_away_ends_a_run_that_does_not_run_yet() -> None:
    bench = replaced(fresh(num_prompts=1))
    bench.hear(GroupRejected(group_id=0, cause="zero_spread", ended=ends(0, TerminalState.FILTERED)))
    assert bench.buffer.run.phase is Phase.ENDING


def test_failures_alone_stop_a_run_that_does_not_run_yet() -> None:
    bench = replaced(fresh(stop_after_failures=1))
    end = SampleEnd(key=SampleKey(0, 0), state=TerminalState.FAILED, cause="scoring_failed", reason="ValueError: no")
    bench.hear(FailuresTold(ends=(end,), has_scored=False))
    assert bench.buffer.run.phase is Phase.STOPPED


def test_a_stop_does_not_wait_for_a_learner_that_has_never_come() -> None:
    bench = Bench()
    bench.hear(Started(epoch=0), StopAsked(reason="enough"))
    assert bench.buffer.run.phase is Phase.STOPPED


def test_a_policy_that_waits_for_nothing_too_old_may_leave_nothing_to_do() -> None:
    bench = left_over(num_saved=2)
    bench.hear(MASK_TO_WAIT)
    assert bench.buffer.run.phase is Phase.ENDING
    bench = left_over(num_saved=3)
    bench.hear(MASK_TO_WAIT)
    assert bench.buffer.run.phase is Phase.ENDED


def test_a_run_that_has_nothing_to_evaluate_ends_when_its_learner_has_loaded() -> None:
    bench = Bench(goal=Evaluate()).started()
    assert bench.buffer.run.phase is Phase.ENDED


def test_a_token_that_is_too_old_stops_the_last_evaluation() -> None:
    bench = evaluating(at_end=True).started()
    finish_training(bench)
    evaluate(bench, E0, version=3)
    assert bench.buffer.run.phase is Phase.STOPPED


def test_what_is_turned_away_last_ends_a_run_that_is_saved() -> None:
    bench = Bench(num_prompts=3).started()
    bench.train_in_order()
    bench.hear(CheckpointSaved(version=1, path="c1"))
    bench.reject(2)
    assert bench.buffer.run.phase is Phase.ENDED


def test_a_stop_waits_for_the_archive_of_what_is_trained() -> None:
    bench = run_to(1).bench
    settings = msgspec.structs.replace(bench.buffer.settings, keep_samples=True)
    bench.buffer.settings = bench.buffer.books.settings = settings
    bench.hear(StopAsked(reason="enough"), CheckpointSaved(version=1, path="c1"))
    assert bench.buffer.state == "stopping"
    bench.hear(SamplesArchived(last_version=1))
    assert bench.buffer.state == "stopped"


def test_a_stop_that_waits_for_an_archive_demands_what_is_trained_meanwhile() -> None:
    bench = run_to(1).bench
    settings = msgspec.structs.replace(bench.buffer.settings, keep_samples=True)
    bench.buffer.settings = bench.buffer.books.settings = settings
    bench.admit(2)
    bench.admit(3)
    saved = CheckpointSaved(version=1, path="c1")
    bench.hear(saved, StopAsked(reason="enough"), saved)
    assert drive.one_sent(bench.train(), CheckpointDemanded).version == 2
    bench.hear(SamplesArchived(last_version=1), CheckpointSaved(version=2, path="c2"))
    assert bench.buffer.state == "stopping"
    bench.hear(SamplesArchived(last_version=2))
    assert bench.buffer.state == "stopped"


def test_a_successor_goes_on_counting_the_groups_that_are_turned_away_in_a_row() -> None:
    run = fresh(max_rejected_batches=1)
    run.bench.reject(0)
    bench = replaced(run)
    bench.hear(LearnerReady(epoch=0, version=0))
    assert "2 groups in a row were turned away" in drive.one(bench.reject(1), FailRun).story


def test_the_last_evaluation_is_not_made_again_by_a_buffer_that_finds_the_run_done() -> None:
    run = Ledgered(evaluating(at_end=True))
    run.bench.started()
    finish_training(run.bench)
    evaluate(run.bench, E0, E1, E2, version=4)
    assert run.bench.buffer.run.phase is Phase.ENDED
    said = drive.Driver(run.restarted()).hear(Started(epoch=1))
    assert drive.one_sent(said, RunFinished).completed
    assert drive.sent(said, PublishDemanded) == []
