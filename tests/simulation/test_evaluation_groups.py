"""Evaluation with rewards that score whole groups, on the virtual host: the answers to a prompt are scored together,
once, and those that failed for good are not waited for."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec
import pytest
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import EvaluationTrial, Trial

from penstock.backends.engines.options import LatencyOptions
from penstock.backends.simulated.rewards import JudgingModel
from penstock.messages.commands import Score, ScoreGroup
from penstock.messages.flow import SampleFailed
from penstock.messages.names import BUFFER, FILTER, PROMPT_SOURCE, SCORER
from penstock.messages.samples import TerminalState, is_evaluation
from penstock.messages.training import UpdateMode
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.evaluation import EvaluationFinished
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

SIZES = (3, 1)
"""Answers to a prompt, of the two datasets."""
EVALUATION = EvaluationTrial(
    every=2,
    before_first=True,
    at_end=True,
    num_rows=(3, 2),
    samples_per_prompt=SIZES,
    max_running=4,
    scores_groups=True,
)
TRIAL = Trial(
    seed=3,
    policy="fully_async",
    max_staleness=2,
    update_mode=UpdateMode.IN_FLIGHT,
    num_steps=5,
    evaluation=EVALUATION,
)
FAILING = LatencyOptions(response_tokens_median=12.0, prefill_s=0.05, token_s=0.05, failure_rate=0.3)


class Calls(IdleWatcher):
    """What the Scorers ask their backend, and what of an evaluation they have heard to have failed."""

    def __init__(self) -> None:
        self.groups: list[tuple[bool, tuple[int, list[int]]]] = []
        """Whether of an evaluation; group and indices."""
        self.singles = Counter[bool]()
        """By whether it is of an evaluation."""
        self.failed: defaultdict[int, set[int]] = defaultdict(set)

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if process.name != SCORER:
            return
        if isinstance(event, SampleFailed):
            self.failed[event.key.group_id].add(event.key.index)
        for command in commands:
            if isinstance(command, ScoreGroup):
                keys = [sample.key for sample in command.samples]
                group_id = keys[0].group_id
                self.groups.append((is_evaluation(group_id), (group_id, [key.index for key in keys])))
            elif isinstance(command, Score):
                self.singles[is_evaluation(command.sample.key.group_id)] += 1

    @property
    def evaluated(self) -> list[tuple[int, list[int]]]:
        """Group and indices of each call for answers of an evaluation."""
        return [call for is_evaluated, call in self.groups if is_evaluated]


def run(trial: Trial, **changes: object) -> tuple[TrialRun, Calls]:
    trial_run, calls = TrialRun(msgspec.structs.replace(trial, **changes)), Calls()
    trial_run.host.watch(calls)
    trial_run.run()
    return trial_run, calls


def told(trial_run: TrialRun) -> list[EvaluationFinished]:
    return list(trial_run.oracle.evaluations.told.values())


@pytest.mark.parametrize("trains_by_group", [False, True])
def test_the_answers_to_a_prompt_are_scored_in_one_call_whatever_training_does(trains_by_group: bool) -> None:
    trial_run, calls = run(TRIAL, scores_groups=trains_by_group)
    watch = trial_run.oracle.evaluations
    assert watch.ended == {TerminalState.EVALUATED: watch.num_issued}
    groups = [group_id for group_id, _ in calls.evaluated]
    assert len(groups) == len(set(groups)) == sum(EVALUATION.num_rows) * len(watch.evaluations)
    assert {tuple(indices) for _, indices in calls.evaluated} == {(0, 1, 2), (0,)}
    assert calls.singles[True] == 0
    assert bool(calls.singles[False]) is not trains_by_group
    assert any(not is_evaluated for is_evaluated, _ in calls.groups) is trains_by_group


def test_an_evaluation_may_score_answers_one_by_one_where_training_scores_groups() -> None:
    evaluation = msgspec.structs.replace(EVALUATION, scores_groups=False)
    trial_run, calls = run(TRIAL, scores_groups=True, evaluation=evaluation)
    watch = trial_run.oracle.evaluations
    assert watch.ended == {TerminalState.EVALUATED: watch.num_issued}
    assert calls.singles == {True: watch.num_issued}
    assert calls.evaluated == []


def test_rewards_are_those_that_the_same_answers_get_one_by_one() -> None:
    """Nothing is mixed up between the samples of a call."""
    by_group, one_by_one = (
        told(run(TRIAL, evaluation=msgspec.structs.replace(EVALUATION, scores_groups=scores_groups))[0])
        for scores_groups in (True, False)
    )
    rewards = [
        [[s.reward for s in row.samples] for each in finished for dataset in each.datasets for row in dataset.rows]
        for finished in (by_group[:1], one_by_one[:1])
    ]
    assert rewards[0] == rewards[1]
    assert {reward for row in rewards[0] for reward in row} == {0.0, 1.0}


def test_answers_that_failed_for_good_are_not_waited_for_and_nothing_replaces_them() -> None:
    """Of engines that fail, with no retry; and of a reward that raises for some of a group."""
    judging = JudgingModel(failure_rate=0.2)
    evaluation = msgspec.structs.replace(EVALUATION, num_rows=(9, 4))
    failing = {"latency": FAILING, "num_retries": 0, "judging": judging, "on_failed_sample": "refill"}
    trial_run, calls = run(TRIAL, evaluation=evaluation, **failing)
    watch = trial_run.oracle.evaluations
    assert watch.ended[TerminalState.FAILED] > 0
    assert watch.ended[TerminalState.EVALUATED] > 0
    assert watch.ended.total() == watch.num_issued
    sizes = {len(indices) for _, indices in calls.evaluated}
    assert sizes >= {1, 2, 3}, "whole groups, and such as lack one or two"
    for group_id, indices in calls.evaluated:
        assert max(indices) < max(SIZES), "no index of a replacement"
        expected = {0} if is_of_second(trial_run, group_id) else {0, 1, 2}
        assert set(indices) | calls.failed[group_id] == expected
    assert len(told(trial_run)) == len(watch.evaluations)


def is_of_second(trial_run: TrialRun, group_id: int) -> bool:
    """Whether this group belongs to the dataset of one answer to a prompt."""
    places = (watched.opened.place_of(group_id) for watched in trial_run.oracle.evaluations.evaluations)
    return next(place.dataset for place in places if place is not None) == 1


@pytest.mark.parametrize("target", [SCORER, FILTER, PROMPT_SOURCE, BUFFER, "engine/0", ""])
def test_whoever_dies_each_evaluation_ends_and_no_call_shows_half_a_group(target: str) -> None:
    kind = FaultKind.KILL if target else FaultKind.MACHINE
    for at_s in (1.0, 2.0, 4.5):
        trial_run, calls = run(TRIAL, faults=(Fault(at_s=at_s, kind=kind, target=target),))
        watch = trial_run.oracle.evaluations
        assert watch.ended == {TerminalState.EVALUATED: watch.num_issued}
        assert sorted(watch.told) == list(range(len(watch.evaluations)))
        assert {tuple(indices) for _, indices in calls.evaluated} == {(0, 1, 2), (0,)}
