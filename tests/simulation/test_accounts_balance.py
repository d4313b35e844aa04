"""Time and tokens of random runs, with kills and without: nothing is missing, and nothing counts twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from trials.draws import draw_trial
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.token_watch import TokenWatch
from trials.trial import Trial

from penstock.actors.buffer.accounts import Accounts
from penstock.actors.buffer.books import Books
from penstock.actors.engine_worker.machine import EngineWorker
from penstock.messages.names import SCORER, has_lane, is_engine
from penstock.messages.training import Activity, UpdateMode
from penstock.runtime.hosts.virtual.accounting import RunAccounts
from penstock.runtime.observability.figures import RunFigures

if TYPE_CHECKING:
    from collections.abc import Callable

    from trials.fuzz import Outcome

    from penstock.messages.ledger import GroupRecorded
    from penstock.runtime.hosts.virtual.process import Process

POLICIES = ("sync", "one_step_off", "fully_async")
NUM_TRIALS = 40


def calm(policy: str = "fully_async", faults: tuple[Fault, ...] = ()) -> Trial:
    """Nothing is drawn in it."""
    bound = {"sync": 0, "one_step_off": 1}.get(policy, 2)
    mode = UpdateMode.DRAIN if policy == "sync" else UpdateMode.IN_FLIGHT
    return Trial(seed=1, policy=policy, max_staleness=bound, update_mode=mode, num_steps=4, faults=faults)


def check_looks(process: Process) -> None:
    """What an engine shows at once, by a short cut, is what it says one by one."""
    machine = process.shell.machine
    if isinstance(machine, EngineWorker):
        assert machine.shows == (machine.activity, machine.occupancy, machine.outside)


def watched(trial: Trial) -> tuple[TrialRun, TokenWatch, RunAccounts, Outcome]:
    """A trial, with its tokens and its time watched."""
    run, watch = TrialRun(trial, with_digest=False), TokenWatch()
    accounts = RunAccounts(run.host.clock, RunFigures(progress_tokens=8))
    run.host.watch(watch)
    run.host.watch(accounts)
    run.host.turn_listeners.append(check_looks)
    outcome = run.run()
    accounts.close()
    return run, watch, accounts, outcome


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_balance_at_every_step_and_states_add_up_to_the_wall_time(policy: str) -> None:
    num_compared = num_faults = num_wasted = 0
    for seed in range(NUM_TRIALS):
        trial = draw_trial(policy, seed)
        run, watch, accounts, _ = watched(trial)
        now_s = run.host.clock.now_s
        for name in filter(has_lane, trial.names):
            lane = accounts.shares_of(name.__eq__)
            assert lane.total_s == pytest.approx(now_s, rel=0.005), f"{name} of seed {seed}"
            assert lane.occupied_s <= lane.seconds[Activity.WORKING] + 1e-9
        num_compared += watch.num_steps_compared
        num_faults += bool(trial.faults)
        num_wasted += any(state in ("filtered", "stale", "failed") for state, _ in watch.ended)
    assert num_compared > 2 * NUM_TRIALS
    assert 0 < num_faults < NUM_TRIALS
    assert num_wasted > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_an_engine_that_is_killed_takes_tokens_along_that_are_nowhere_in_the_balance(policy: str) -> None:
    faults = tuple(Fault(at_s=at_s, kind=FaultKind.KILL, target="engine/0") for at_s in (1.5, 5.0))
    run, watch, accounts, outcome = watched(calm(policy, faults=faults))
    assert outcome.num_restarts >= 1
    assert watch.num_steps_compared == 4
    engine = accounts.shares_of("engine/0".__eq__)
    assert engine.total_s == pytest.approx(run.host.clock.now_s, rel=0.005)
    assert engine.seconds[Activity.DOWN] > 0
    assert accounts.shares_of(is_engine).total_s == pytest.approx(
        len(run.trial.engines) * run.host.clock.now_s, rel=0.005
    )


def test_the_workers_of_the_scorer_have_a_lane_on_the_virtual_clock() -> None:
    _, _, accounts, _ = watched(calm())
    lane = accounts.shares_of(SCORER.__eq__)
    assert lane.seconds[Activity.WORKING] > 0
    assert lane.seconds[Activity.WAITING_FOR_SAMPLES] > 0
    assert {state for state, seconds in lane.seconds.items() if seconds} <= {
        Activity.STARTING, Activity.WORKING, Activity.WAITING_FOR_SAMPLES,
    }  # fmt: skip


def forgets_what_came(_: Callable[..., None]) -> Callable[..., None]:
    return lambda *_: None


def counts_twice_what_came(admitted: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: Accounts, entry: GroupRecorded) -> None:
        admitted(self, entry)
        admitted(self, entry)

    return wrong


def says_nothing(_: Books) -> None:
    """Books that do not look at themselves."""


@pytest.mark.parametrize("plant", [forgets_what_came, counts_twice_what_came])
def test_a_planted_miscount_is_found(plant: Callable[..., Any]) -> None:
    with (
        patch.object(Accounts, "admitted", plant(Accounts.admitted)),
        patch.object(Books, "validate", says_nothing),
        pytest.raises(AssertionError),
    ):
        watched(calm())
