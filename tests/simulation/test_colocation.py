"""Learner and engines on the same devices, under every fault: never both awake, and never both waiting."""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest
from trials.device_watch import DeviceWatch
from trials.draws import draw_trial
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun, UnfinishedError, failed_seeds, run_trial
from trials.trial import Trial

from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.learner.machine import Learner
from penstock.actors.learner.turns import Turns
from penstock.messages.names import LEARNER, is_engine
from penstock.messages.training import Activity, Holder, UpdateMode
from penstock.runtime.hosts.virtual.accounting import RunAccounts
from penstock.runtime.hosts.virtual.supervisor import SupervisionModel, Supervisor
from penstock.runtime.observability.figures import RunFigures

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.messages.membership import EngineJoined

MAX_SEED = 400
POLICIES = ("sync", "one_step_off")
NUM_TRIALS = 20_000


def colocated(seed: int = 1, **fields: Any) -> Trial:  # noqa: ANN401 - fields of a Trial
    fields = {"num_steps": 5, "policy": "sync", "max_staleness": 0, "update_mode": UpdateMode.DRAIN, **fields}
    return Trial(seed=seed, colocated=True, **fields)


def kill(target: str, at_s: float) -> Fault:
    return Fault(at_s=at_s, kind=FaultKind.KILL, target=target)


def test_the_learner_takes_one_turn_for_each_version_and_one_to_open() -> None:
    run = TrialRun(colocated())
    watch = DeviceWatch(run.trial.engines, run.host)
    run.host.watch(watch)
    run.run()
    assert watch.num_turns == run.trial.num_steps + 1


def test_every_second_is_somebodys_turn_and_the_other_side_is_asleep_in_it() -> None:
    run = TrialRun(colocated(num_steps=8))
    accounts = RunAccounts(run.host.clock, RunFigures(progress_tokens=8))
    run.host.watch(accounts)
    outcome = run.run()
    accounts.close()
    learner, engines = (accounts.shares_of(meant).seconds for meant in (LEARNER.__eq__, is_engine))
    assert learner[Activity.ASLEEP] > 0.2 * outcome.end_s
    assert engines[Activity.ASLEEP] > 0.2 * outcome.end_s
    busy = learner[Activity.WORKING] + learner[Activity.PUBLISHING]
    assert engines[Activity.ASLEEP] > 0.9 * busy * len(run.trial.engines)
    assert learner[Activity.WAITING_FOR_SAMPLES] < 0.1, "only after the last batch it is awake with nothing to do"
    assert engines[Activity.WAITING_FOR_DEMAND] < 0.2 * outcome.end_s


@pytest.mark.parametrize("num_engines", [1, 4])
def test_one_step_off_engines_work_on_the_next_batch_in_their_turn(num_engines: int) -> None:
    """What began with the weights before is trained one step later; nothing is older than that."""
    trial = colocated(policy="one_step_off", max_staleness=1, num_engines=num_engines, num_steps=8, num_slots=1)
    run = TrialRun(trial)
    watch = DeviceWatch(trial.engines, run.host)
    run.host.watch(watch)
    assert run.run().max_staleness == 1
    assert watch.num_turns == trial.num_steps + 1
    assert run_trial(colocated(num_engines=num_engines, num_steps=8, num_slots=1)).max_staleness == 0


@pytest.mark.parametrize("target", ["engine/0", "learner", "weight_publisher", "buffer", "prompt_source"])
def test_a_loss_at_any_moment_of_a_turn_leads_on(target: str) -> None:
    for tenths in range(0, 160, 5):
        run_trial(colocated(tenths, faults=(kill(target, tenths / 10),)), with_digest=False)


def test_learner_and_an_engine_may_be_lost_together() -> None:
    for tenths in range(0, 160, 5):
        faults = (kill("learner", tenths / 10), kill("engine/1", tenths / 10 + 0.3))
        run_trial(colocated(tenths, faults=faults), with_digest=False)


@pytest.mark.parametrize("target", ["engine/0", "learner"])
def test_nobody_takes_a_device_before_the_last_process_of_who_is_lost_has_ended(target: str) -> None:
    """What it had started dies seconds after it; the watch knows that it holds memory until then."""
    trials = [slow_to_end(tenths, kill(target, tenths / 10)) for tenths in range(0, 160, 5)]
    for trial in trials:
        run_trial(trial, with_digest=False)
    with supervisor_tells_of_a_loss_at_once():
        assert any(fails_in(trial) for trial in trials)


def test_an_engine_that_stands_still_out_of_reach_keeps_its_device() -> None:
    """It cannot be killed before it goes on; nobody takes its device until then, and the run goes on after it."""
    for tenths in range(0, 160, 10):
        zombie = Fault(
            at_s=tenths / 10, kind=FaultKind.STOP, target="engine/0", duration_s=30.0, as_zombie=True
        )  # fmt: skip
        run_trial(slow_to_end(tenths, zombie), with_digest=False)


def test_one_that_is_never_reached_again_ends_the_run() -> None:
    stopped = Fault(at_s=3.0, kind=FaultKind.STOP, target="engine/0", as_zombie=True)
    with pytest.raises(UnfinishedError, match="engine/0 could not be ended within 70 s"):
        run_trial(slow_to_end(1, stopped), with_digest=False)


def test_other_policies_take_turns_as_well() -> None:
    """An operator may change the policy of a run."""
    for seed in range(60):
        trial = draw_trial("fully_async", seed)
        run_trial(msgspec.structs.replace(trial, colocated=True, num_lent=0), with_digest=False)


def slow_to_end(seed: int, *faults: Fault) -> Trial:
    """What actors have started outlives them by up to five seconds."""
    return colocated(seed, supervision=SupervisionModel(end_s=5.0), faults=faults)


# --- bugs that are planted --------------------------------------------------------------------------------------------


def learner_does_not_wait() -> AbstractContextManager[Any]:
    """The Learner asks for the devices and takes them."""
    return patch.object(Turns, "is_ours", property(lambda self: self.holder is Holder.LEARNER))


def engine_opens_at_any_time() -> AbstractContextManager[Any]:
    return patch.object(EngineWorker, "_is_our_turn", property(lambda _: True))


def successor_believes_that_engines_sleep() -> AbstractContextManager[Any]:
    """A new Learner waits for no engine that was there before it."""
    joined = Turns.joined

    def forgetful(self: Turns, event: EngineJoined) -> Any:  # noqa: ANN401 - as the method that it stands for
        told = joined(self, event)
        self._awaited.clear()
        return told

    return patch.object(Turns, "joined", forgetful)


def learner_keeps_the_turn() -> AbstractContextManager[Any]:
    """Nobody hears that it sleeps."""
    return patch.object(Turns, "free", lambda _: [])


def supervisor_tells_of_a_loss_at_once() -> AbstractContextManager[Any]:
    """What is left of who is lost may live on."""
    return patch.object(Supervisor, "_end", lambda _, __, then: then())


PLANTED = (
    supervisor_tells_of_a_loss_at_once,
    learner_does_not_wait,
    engine_opens_at_any_time,
    successor_believes_that_engines_sleep,
    learner_keeps_the_turn,
)


def fails(seed: int) -> bool:
    trial = draw_trial("sync", seed)
    return trial.colocated and fails_in(trial)


def fails_in(trial: Trial) -> bool:
    try:
        with patch.object(Learner, "validate", lambda _: None):
            run_trial(trial, with_digest=False)
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return True
    return False


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bug_is_found(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    with plant():
        assert any(fails(seed) for seed in range(MAX_SEED))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_trial_of_three_is_colocated_where_engines_are_one_batch_ahead_at_most(policy: str) -> None:
    assert 100 < sum(draw_trial(policy, seed).colocated for seed in range(400)) < 170
    assert not any(draw_trial("fully_async", seed).colocated for seed in range(50))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_in_twenty_thousand_trials_there_is_no_moment_with_both_awake(policy: str) -> None:
    """``python -m trials.fuzz --colocated --policy sync`` runs them by hand; a part is in every ``make test``."""
    assert not list(failed_seeds(policy, range(NUM_TRIALS // len(POLICIES)), 2, are_colocated=True))
