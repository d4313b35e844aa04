"""Runs with teachers on the virtual clock: every trained token has its teacher's word, whoever dies, whatever is lost.

The oracle knows what a teacher says of each sample, and asserts it of every group that is admitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import msgspec
import pytest
from trials.draws import draw_trial
from trials.faults import Fault, FaultKind
from trials.fuzz import StalledError, TrialRun, failures, run_trial
from trials.trial import Trial

from penstock.actors.scorer.machine import Scorer
from penstock.actors.scorer.teachers import Teachers, Verdict
from penstock.backends.engines.teacher_options import TeacherLatencyOptions
from penstock.messages.samples import TerminalState
from penstock.messages.teaching import GivenTokens
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import ScorerEvent
    from penstock.messages.samples import SampleKey

TRIAL = Trial(
    seed=7,
    policy="fully_async",
    max_staleness=2,
    update_mode=UpdateMode.IN_FLIGHT,
    num_teachers=2,
    teacher_slots=3,
    teacher_latency=TeacherLatencyOptions(sample_s=0.1, token_s=0.01),
)


def kill(at_s: float, target: str = "teacher/0", after_effects: int | None = None) -> Fault:
    return Fault(at_s=at_s, kind=FaultKind.KILL, target=target, after_effects=after_effects)


def changed(**fields: object) -> Trial:
    return msgspec.structs.replace(TRIAL, **fields)


def test_teachers_are_restarted_and_asked_again_and_no_sample_is_lost() -> None:
    faults = tuple(kill(at_s, f"teacher/{index % 2}") for index, at_s in enumerate((1.0, 2.0, 3.0, 4.5, 6.0)))
    run = TrialRun(changed(faults=faults))
    outcome = run.run()
    assert outcome.num_restarts == 5
    assert outcome.num_generated_twice == 0
    assert set(run.oracle.ends.values()) == {TerminalState.TRAINED}


def test_a_run_whose_only_teacher_dies_goes_on_with_its_successor() -> None:
    run = TrialRun(changed(num_teachers=1, faults=(kill(1.5, after_effects=2),)))
    assert run.run().num_restarts == 1
    assert set(run.oracle.ends.values()) == {TerminalState.TRAINED}


def test_a_scorer_that_dies_asks_the_teachers_anew_and_nothing_is_generated_again() -> None:
    run = TrialRun(changed(faults=(kill(2.0, "scorer"), kill(4.0, "scorer"))))
    outcome = run.run()
    assert (outcome.num_restarts, outcome.num_generated_twice, run.oracle.num_needless) == (2, 0, 0)


def test_a_teacher_that_is_only_stopped_is_given_up_and_its_late_answers_do_no_harm() -> None:
    stop = Fault(at_s=1.5, kind=FaultKind.STOP, target="teacher/1", duration_s=25.0, as_zombie=True)
    assert run_trial(changed(faults=(stop,))).num_restarts == 1


def test_questions_and_answers_that_a_cut_has_lost_are_asked_again() -> None:
    cuts = (
        Fault(at_s=1.0, kind=FaultKind.CUT, target="scorer", peer="teacher/0", duration_s=4.0),
        Fault(at_s=2.0, kind=FaultKind.CUT, target="teacher/1", peer="scorer", duration_s=4.0),
    )
    run = TrialRun(changed(faults=cuts))
    run.run()
    assert set(run.oracle.ends.values()) == {TerminalState.TRAINED}


def test_a_sample_that_no_teacher_can_judge_fails_and_its_group_is_closed() -> None:
    latency = TeacherLatencyOptions(sample_s=0.05, failure_rate=0.6)
    run = TrialRun(changed(teacher_latency=latency, on_failed_sample="shrink"))
    run.run()
    ends = set(run.oracle.ends.values())
    assert {TerminalState.TRAINED, TerminalState.FAILED} <= ends


def test_the_loss_of_the_machine_leaves_nothing_untaught() -> None:
    machine = Fault(at_s=5.0, kind=FaultKind.MACHINE, target="")
    run_trial(changed(num_steps=6, faults=(machine,)))


@pytest.mark.parametrize("policy", ["sync", "one_step_off", "fully_async"])
def test_random_trials_with_teachers_and_their_deaths_are_clean(policy: str) -> None:
    seeds = [seed for seed in range(9000, 9100) if draw_trial(policy, seed).num_teachers]
    assert len(seeds) > 10
    assert failures(policy, seeds) == []


# --- what the trials would find -----------------------------------------------------------------------------------


def test_without_asking_again_after_a_death_a_run_hangs() -> None:
    def lose_nothing(self: Teachers, name: str, epoch: int) -> list[Verdict]:
        return []

    with patch.object(Teachers, "lost", lose_nothing), pytest.raises((StalledError, AssertionError)):
        run_trial(changed(faults=(kill(1.5), kill(2.5))))


def test_without_a_sweep_a_lost_answer_hangs_a_run() -> None:
    cut = Fault(at_s=1.0, kind=FaultKind.CUT, target="teacher/0", peer="scorer", duration_s=4.0)
    alone = changed(num_teachers=1, faults=(cut,))
    run_trial(alone)

    def look_at_nothing(self: Teachers) -> list[AnyCommand]:
        return []

    with patch.object(Teachers, "sweep", look_at_nothing), pytest.raises(StalledError):
        run_trial(alone)


def test_a_sample_that_goes_on_without_its_teacher_is_found_out() -> None:
    def forgetful(self: Scorer, event: ScorerEvent) -> bool:
        return False

    with patch.object(Scorer, "_needs_teacher", forgetful), pytest.raises(AssertionError, match="other log-probs"):
        run_trial(TRIAL)


def test_a_question_with_another_context_is_found_out() -> None:
    def ask(self: Teachers, key: SampleKey, attempt: int, texts: tuple[GivenTokens, ...]) -> None:
        plain_ask(self, key, attempt, tuple(GivenTokens(text.context[:-4], text.tokens) for text in texts))

    plain_ask = Teachers.ask
    with patch.object(Teachers, "ask", ask), pytest.raises(AssertionError, match="other log-probs"):
        run_trial(TRIAL)
