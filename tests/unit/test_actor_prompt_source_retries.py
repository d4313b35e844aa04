"""The PromptSource where rows have a retry budget of their own: who spends it, and what it outlives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
import pytest
from source_bench import SourceBench, held, keys

from penstock.actors.prompt_source.machine import SWEEP_TIMER
from penstock.messages.commands import ReplaceActor
from penstock.messages.evaluation import Evaluation, EvaluationDue, EvaluationShape
from penstock.messages.flow import RefillAsked, SampleFailed, SampleIssued, SettledState
from penstock.messages.local import TimerFired
from penstock.messages.membership import LeaseStage
from penstock.messages.samples import SampleKey, evaluation_group_id
from penstock.messages.training import NoticeGiven

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand

FIRST = SampleKey(0, 0)


def failures_until_given_up(bench: SourceBench, key: SampleKey, *, attempt: int = 0) -> int:
    """Attempts that fail one after the other on engine/0, up to the one after which the sample counts as failed."""
    for number in range(1, 50):
        commands = bench.failed("engine/0", key, attempt=attempt)
        if drive.sent(commands, SampleFailed):
            assert keys(commands) == []
            return number
        assert (key.group_id, key.index) in keys(commands)
        attempt += 1
    raise AssertionError("it is never given up")


@pytest.mark.parametrize("usual", [0, 1, 6])
@pytest.mark.parametrize("own", [0, 1, 4])
def test_a_sample_fails_as_often_as_its_row_says_whatever_others_may(usual: int, own: int) -> None:
    bench = SourceBench(num_retries=usual, own_retries={0: own}).started(num_engines=1)
    bench.grant(2)
    assert failures_until_given_up(bench, FIRST) == own + 1
    assert failures_until_given_up(bench, SampleKey(0, 1)) == own + 1, "each sample of the row has all of it"
    assert failures_until_given_up(bench, SampleKey(1, 0)) == usual + 1, "row 1 says nothing"


def test_the_failure_tells_how_many_attempts_there_were() -> None:
    bench = SourceBench(own_retries={0: 0}).started(num_engines=1)
    bench.grant(1)
    event = drive.one_sent(bench.failed("engine/0", FIRST), SampleFailed, to="scorer")
    assert (event.attempt, event.reason) == (0, "out of memory (1 attempts)")


def test_the_first_failure_of_a_kind_is_told_at_once_and_the_others_are_not() -> None:
    bench = SourceBench(own_retries={0: 3}).started(num_engines=1)
    bench.grant(1)
    (notice,) = drive.sent(bench.failed("engine/0", FIRST), NoticeGiven, to="supervisor")
    assert notice.text == "sample 0/0 on engine/0 failed: out of memory"
    assert drive.sent(bench.failed("engine/0", FIRST, attempt=1), NoticeGiven) == []


def test_a_replacement_has_the_budget_of_its_row() -> None:
    bench = SourceBench(num_retries=5, own_retries={0: 2}).started(num_engines=1)
    bench.grant(1)
    bench.hear(RefillAsked(missing=(SampleKey(0, 2),)))
    assert failures_until_given_up(bench, SampleKey(0, 2)) == 3


def test_a_sample_without_retries_outlives_the_loss_of_its_engine() -> None:
    """That an engine died is not the sample's doing, and has a cap of its own."""
    bench = SourceBench(own_retries={0: 0}, max_engine_losses=2).started(num_engines=1)
    bench.grant(1)
    for epoch in (1, 2):
        bench.loses("engine/0")
        bench.joins("engine/0", epoch=epoch)
        again = drive.sent(bench.answers(), SampleIssued)
        assert [(issued.key.index, issued.attempt) for issued in again] == [(0, epoch), (1, epoch)]
    assert failures_until_given_up(bench, FIRST, attempt=2) == 1


@pytest.mark.parametrize(("own", "goes_on"), [(0, False), (1, True)])
def test_what_a_census_finds_failed_is_held_against_the_budget_of_its_row(own: int, goes_on: bool) -> None:
    """The message of the failure was lost; word of it comes with the answer of the engine that had it."""
    bench = SourceBench(num_retries=1 - own, own_retries={0: own}).started(num_engines=2)
    bench.grant(1)
    bench.loses("engine/1")
    commands = bench.answers(engine_0=(held(0, 0, LeaseStage.FAILED), held(0, 1, LeaseStage.RUNNING)))
    assert (keys(commands) == [(0, 0)]) is goes_on
    assert bool(drive.sent(commands, SampleFailed)) is not goes_on


def test_a_new_prompt_source_reads_the_budget_with_the_prompt() -> None:
    """Nothing of it is handed over: attempts come with the census, the budget with the row."""
    bench = SourceBench(epoch=1, num_retries=0, own_retries={0: 3}).started(num_engines=1)
    bench.grant(1)
    bench.answers(engine_0=(held(0, 0, attempt=2), held(0, 1, LeaseStage.FAILED, attempt=2)))
    assert failures_until_given_up(bench, FIRST, attempt=2) == 4
    assert failures_until_given_up(bench, SampleKey(0, 1), attempt=3) == 3, "one of them was spent when it was found"


@pytest.mark.parametrize(("own", "goes_on"), [(0, False), (2, True)])
def test_a_sample_that_stands_still_spends_a_retry_of_its_row(own: int, goes_on: bool) -> None:
    bench = SourceBench(num_samples=3, own_retries={0: own}).started(num_engines=2)
    assert keys(bench.grant(1), "engine/0") == [(0, 0), (0, 1), (0, 2)]
    commands: list[AnyCommand] = []
    for sweep in range(1, 8):  # of the three the last one moves
        bench.progressed("engine/0", SampleKey(0, 2), 2 * sweep, drive.part((0, 2)))
        commands += bench.hear(TimerFired(key=SWEEP_TIMER))
        if bench.source.census.is_open:
            commands += bench.answers(engine_0=(held(0, 0), held(0, 1), held(0, 2, num_tokens=2 * sweep + 2)))
    assert drive.every(commands, ReplaceActor) == []
    assert ((0, 0) in keys(commands)) is goes_on
    assert bool(drive.sent(commands, SampleFailed)) is not goes_on


def test_an_evaluated_row_has_its_budget_too() -> None:
    """Row 0 of an evaluation is another than row 0 that is trained on; here both say something, and row 1 nothing."""
    shapes = (EvaluationShape(name="easy", num_rows=2, samples_per_prompt=1),)
    opened = Evaluation(number=0, version=0, deadline_version=4, first_place=0, datasets=shapes)
    bench = SourceBench(num_samples=1, num_retries=1, own_retries={0: 3}).started(num_engines=1)
    bench.hear(EvaluationDue(evaluation=opened, settled=SettledState(0, 0, ())))
    with_own, without = (SampleKey(evaluation_group_id(place), 0) for place in range(2))
    assert failures_until_given_up(bench, with_own) == 4
    assert failures_until_given_up(bench, without) == 2
