"""Actors that fall silent: who is dear to replace is waited for longer, and nothing is lost by it."""

from __future__ import annotations

import msgspec
import pytest
from trials.draws import draw_trial
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun, run_trial
from trials.trial import Trial

from penstock.messages.names import LEARNER
from penstock.messages.training import UpdateMode
from penstock.runtime.shell.restarts import MAX_PATIENCE_S, patience_s

USUAL_S = 3.0
DEAR_S = 100.0
"""A start that buys 10 s of patience."""
ENGINE = "engine/0"
POLICIES = ("fully_async", "one_step_off", "sync")


@pytest.mark.parametrize(
    ("start_s", "given_s"),
    [(None, USUAL_S), (0.0, USUAL_S), (29.0, USUAL_S), (DEAR_S, 10.0), (599.0, 59.9), (86400.0, MAX_PATIENCE_S)],
)
def test_a_tenth_of_a_start_is_waited_and_a_minute_at_most(start_s: float | None, given_s: float) -> None:
    assert patience_s(USUAL_S, start_s) == pytest.approx(given_s)
    assert patience_s(2 * MAX_PATIENCE_S, start_s) == 2 * MAX_PATIENCE_S, "what a user has set is the least"


def silent(target: str, start_s: float, silence_s: float, *, at_s: float | None = None) -> TrialRun:
    """A run in which an actor that took so long to start falls silent for a while soon after, and then goes on."""
    trial = Trial(seed=3, policy="fully_async", max_staleness=2, update_mode=UpdateMode.IN_FLIGHT, num_steps=40)
    stop = Fault(
        at_s=start_s + 5.0 if at_s is None else at_s,
        kind=FaultKind.STOP,
        target=target,
        duration_s=silence_s,
        as_zombie=True,
    )
    trial = msgspec.structs.replace(
        trial,
        faults=(stop,),
        supervision=msgspec.structs.replace(trial.supervision, heartbeat_timeout_s=USUAL_S),
        latency=msgspec.structs.replace(trial.latency, start_s=start_s),
        learner=msgspec.structs.replace(trial.learner, start_s=start_s),
    )
    run = TrialRun(trial, with_digest=False)
    run.run()
    return run


@pytest.mark.parametrize("target", [ENGINE, LEARNER])
@pytest.mark.parametrize(
    ("start_s", "silence_s", "num_restarts"), [(0.0, 2.5, 0), (0.0, 6.0, 1), (DEAR_S, 6.0, 0), (DEAR_S, 15.0, 1)]
)
def test_a_silence_is_forgiven_where_a_start_is_dear(
    target: str, start_s: float, silence_s: float, num_restarts: int
) -> None:
    assert silent(target, start_s, silence_s).host.supervisor.num_restarts == num_restarts


def test_who_has_not_started_yet_has_earned_no_patience() -> None:
    assert silent(ENGINE, DEAR_S, 6.0, at_s=DEAR_S / 2).host.supervisor.num_restarts == 1


def test_what_is_light_is_given_no_more_beside_dear_engines() -> None:
    assert silent("scorer", DEAR_S, 6.0).host.supervisor.num_restarts == 1


@pytest.mark.parametrize("seed", range(90))
def test_whatever_happens_to_actors_that_are_dear_every_rule_holds(seed: int) -> None:
    trial = draw_trial(POLICIES[seed % len(POLICIES)], seed)
    faults = tuple(msgspec.structs.replace(fault, at_s=fault.at_s + DEAR_S * (seed % 2)) for fault in trial.faults)
    latency = msgspec.structs.replace(trial.latency, start_s=DEAR_S)
    learner = msgspec.structs.replace(trial.learner, start_s=DEAR_S)
    supervision = msgspec.structs.replace(trial.supervision, heartbeat_timeout_s=USUAL_S)
    dear = msgspec.structs.replace(trial, faults=faults, latency=latency, learner=learner, supervision=supervision)
    run_trial(dear, with_digest=False)
