"""Runs whose checkpoints take longer than their steps, whose samples are archived meanwhile, and whose teachers and
exports are not what they should be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from trials.draws import draw_trial
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.requests import Request
from trials.trial import Trial

from penstock.actors.buffer.run_state import RunState
from penstock.actors.learner.saving import Saving
from penstock.actors.scorer import teachers
from penstock.backends.learners.options import SimulatedLearnerOptions
from penstock.messages.arrays import ArrayLengthError
from penstock.messages.names import BUFFER, LEARNER
from penstock.messages.operator import SaveAsked
from penstock.messages.training import UpdateMode
from penstock.messages.weights import PublishFailed
from penstock.runtime.hosts.virtual.host import IdleWatcher

if TYPE_CHECKING:
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process

SLOW = SimulatedLearnerOptions(step_s=0.5, publish_s=0.1, snapshot_s=0.2, checkpoint_s=8.0)


def trial(*faults: Fault, **fields: Any) -> Trial:  # noqa: ANN401 - fields of a Trial
    own: dict[str, Any] = {"learner": SLOW, "save_every": 1, "num_steps": 6, "num_engines": 3, **fields}
    modes: dict[str, Any] = {"policy": "fully_async", "max_staleness": 4, "update_mode": UpdateMode.IN_FLIGHT}
    return Trial(seed=3, faults=faults, **modes, **own)


class Failures(IdleWatcher):
    """Publishes that have failed."""

    def __init__(self, run: TrialRun) -> None:
        self.failed: set[int] = set()
        run.host.watch(self)

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        if isinstance(event, PublishFailed):
            self.failed.add(event.publish)


def test_with_save_every_1_the_disk_decides_how_fast_a_run_goes_and_no_version_is_left_out() -> None:
    run = TrialRun(trial())
    outcome = run.run()
    assert run.oracle.checkpoints == [1, 2, 3, 4, 5, 6]
    assert outcome.end_s > 6 * 8.2
    assert run.publishes.num_beside_saves == 5, "each step but the first, and none waited for the one before it"


def test_training_goes_on_beside_a_checkpoint_up_to_the_next_one_that_is_due() -> None:
    run = TrialRun(trial(save_every=3))
    outcome = run.run()
    assert run.oracle.checkpoints == [3, 6]
    assert outcome.end_s < 25.0
    assert run.publishes.num_beside_saves == 3


@pytest.mark.parametrize("at_s", [3.0, 8.0, 13.0, 20.0])
@pytest.mark.parametrize("target", [LEARNER, BUFFER])
def test_whoever_is_lost_while_a_checkpoint_is_written_goes_on_from_the_one_before(target: str, at_s: float) -> None:
    run = TrialRun(trial(Fault(at_s=at_s, kind=FaultKind.KILL, target=target), archive_s=3.0))
    assert run.run().num_restarts == 1
    assert run.oracle.checkpoints[-1] == 6


@pytest.mark.parametrize("at_s", [3.0, 8.0, 13.0, 20.0])
def test_a_stop_in_the_middle_of_a_checkpoint_waits_for_the_version_at_hand_and_the_run_goes_on_from_it(
    at_s: float,
) -> None:
    run = TrialRun(trial(stops_s=(at_s,), archive_s=3.0))
    run.run()
    assert (run.stops.num_stops, run.stops.num_saving) == (1, 1)


def test_a_learner_that_leaves_a_checkpoint_out_is_found() -> None:
    start = Saving.start

    def forgetful(self: Saving, version: int) -> list[AnyCommand]:
        commands = start(self, version)
        self.is_due = False
        return commands

    with patch.object(Saving, "start", forgetful), pytest.raises(AssertionError, match="is due for a checkpoint"):
        TrialRun(trial()).run()


def trial_with_a_demand_that_is_met() -> Trial:
    """The last demand is repeated to the Learner's successor, which has loaded what its predecessor wrote for it."""
    demand = Request(at_s=3.0, event=SaveAsked())
    return trial(
        Fault(at_s=20.0, kind=FaultKind.KILL, target=LEARNER), num_steps=40, save_every=1000, requests=(demand,)
    )


def test_a_demand_that_is_met_has_no_successor_write_what_it_has_loaded() -> None:
    run = TrialRun(trial_with_a_demand_that_is_met())
    assert run.run().num_restarts == 1
    assert len(run.oracle.checkpoints) == 2, "what was asked for, and the last version"


def test_a_learner_that_writes_again_what_it_has_loaded_is_found() -> None:
    with patch.object(Saving, "loads"), pytest.raises(AssertionError, match="is written again"):
        TrialRun(trial_with_a_demand_that_is_met()).run()


def test_payloads_that_go_before_they_are_archived_are_found() -> None:
    with (
        patch.object(RunState, "_are_samples_archived", new=True),
        pytest.raises(AssertionError, match="archived are only"),
    ):
        TrialRun(trial(archive_s=3.0)).run()


def test_an_export_that_no_engine_finds_right_is_made_again() -> None:
    run = TrialRun(trial(learner=SimulatedLearnerOptions(publish_s=0.1), bad_exports_rate=0.4))
    watch = Failures(run)
    run.run()
    assert watch.failed


@pytest.mark.parametrize(("misfit_rate", "silence_rate"), [(0.2, 0.0), (0.0, 0.1), (0.1, 0.1)])
def test_a_teacher_that_answers_for_other_tokens_or_not_at_all_spoils_no_sample(
    misfit_rate: float, silence_rate: float
) -> None:
    run = TrialRun(trial(num_teachers=2, misfit_rate=misfit_rate, silence_rate=silence_rate))
    assert bool(run.run().num_restarts) == bool(silence_rate), "who is silent is replaced, and nobody else"


def test_an_answer_for_other_tokens_that_is_taken_is_found() -> None:
    with patch.object(teachers, "_misfit", return_value=""), pytest.raises(ArrayLengthError):
        TrialRun(trial(num_teachers=2, misfit_rate=0.2)).run()


def test_the_trials_draw_all_of_it() -> None:
    drawn = [draw_trial("fully_async", seed) for seed in range(400)]
    slow = [each for each in drawn if each.learner.checkpoint_s is not None]
    assert {each.save_every for each in slow} == {1, 2, 3}
    assert any(each.stops_s for each in slow)
    assert {each.archive_s for each in drawn} == {None, 0.0, 0.5, 6.0, 30.0}
    assert {each.bad_exports_rate for each in drawn} == {0.0, 0.1, 0.4}
    assert {(each.misfit_rate, each.silence_rate) for each in drawn} == {(0.0, 0.0), (0.1, 0.0), (0.0, 0.1), (0.2, 0.1)}
    assert any(each.hang_rate and each.save_share is not None for each in drawn)
