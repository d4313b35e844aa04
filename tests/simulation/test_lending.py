"""The learner's device, lent to an engine while it waits (``engines.lent``), on the virtual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import msgspec
import pytest
from trials.draws import draw_trial
from trials.fuzz import TrialRun, fails

from penstock.benchmarks.lending import ARMS, LENT, SCENARIO
from penstock.messages.ledger import EnginesRecorded
from penstock.messages.names import BUFFER, LEARNER, engine_name
from penstock.messages.operator import EnginesAsked
from penstock.messages.training import Activity
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.hosts.virtual.supervisor import Supervisor
from penstock.runtime.scenario.load import load_scenario
from penstock.runtime.scenario.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.runtime.hosts.virtual.process import Process

pytestmark = pytest.mark.timeout(240)

NUM_TRIALS = 12
"""Of those that lend, for each policy."""
NUM_LEAVING = 16


def simulation(folder: Path, *overrides: str) -> Simulation:
    file = folder / "lending.yaml"
    file.write_text(SCENARIO)
    return Simulation(resolve(load_scenario(file, ["run.num_steps=24", *ARMS[LENT], *overrides])), with_digest=False)


def changes_of(simulated: Simulation) -> list[EnginesRecorded]:
    return [entry for entry in simulated.host.ledger.entries if isinstance(entry, EnginesRecorded)]


def lends_from_the_start(simulated: Simulation) -> None:
    asked = EnginesAsked(engines=tuple(map(engine_name, range(3))))
    simulated.host.clock.at(1.0, lambda host, event: host.say(BUFFER, event), simulated.host, asked)


def step_s(simulated: Simulation) -> float:
    assert simulated.run().completed
    times = simulated.accounts.step_times
    return (times[-1] - times[8]) / (len(times) - 9)


def test_a_learner_that_waits_most_of_its_time_makes_more_steps_when_it_lends(tmp_path: Path) -> None:
    waits = ("engines.scale=fixed", "learner.simulated.step_s=5")
    without = simulation(tmp_path, *waits)
    lent = simulation(tmp_path, *waits)
    lends_from_the_start(lent)
    assert step_s(lent) < 0.9 * step_s(without)
    seconds = lent.accounts.shares_of(LEARNER.__eq__).seconds
    assert seconds[Activity.ASLEEP] > seconds[Activity.WAITING_FOR_SAMPLES]


def test_the_bound_lends_and_says_why(tmp_path: Path) -> None:
    simulated = simulation(tmp_path, "learner.simulated.step_s=5", "engines.scale_hold_s=60")
    assert simulated.run().completed
    assert [len(change.engines) for change in changes_of(simulated)] == [2, 3]
    assert changes_of(simulated)[1].reason.startswith("generation binds: ")


def test_lending_that_costs_more_than_it_makes_is_given_up_and_says_why(tmp_path: Path) -> None:
    dear = ("learner.simulated.wake_s=40", "learner.simulated.step_s=20", "engines.scale_hold_s=60")
    simulated = simulation(tmp_path, *dear)
    assert simulated.run().completed
    assert [len(change.engines) for change in changes_of(simulated)] == [2, 3, 2]
    assert changes_of(simulated)[2].reason.startswith("lending does not pay: ")


@pytest.mark.parametrize("policy", ["sync", "one_step_off", "fully_async"])
def test_no_rule_is_broken_by_lending_whatever_dies(policy: str) -> None:
    num_played = num_lent = 0
    for seed in range(200_000, 204_000):
        trial = draw_trial(policy, seed)
        if not trial.num_lent:
            continue
        run = TrialRun(msgspec.structs.replace(trial, scale_hold_s=None), with_digest=False)
        run.run()
        num_played += 1
        num_lent += run.lending.num_lent
        if num_played == NUM_TRIALS:
            break
    assert num_played == NUM_TRIALS
    assert num_lent > NUM_TRIALS


def test_a_lent_engine_that_is_scaled_away_gives_its_device_back_when_nothing_of_it_is_left() -> None:
    """Trials in which engines on the learner's devices leave, and their servers die seconds after them."""
    trials = [
        msgspec.structs.replace(
            trial,
            scale_hold_s=None,
            supervision=msgspec.structs.replace(trial.supervision, end_s=5.0, leave_timeout_s=0.5),
        )
        for trial in (draw_trial("fully_async", seed) for seed in range(200_000, 202_000))
        if trial.num_lent and any(isinstance(request.event, EnginesAsked) for request in trial.requests)
    ][:NUM_LEAVING]
    assert len(trials) == NUM_LEAVING
    assert not any(map(fails, trials))

    def end_at_once(_self: Supervisor, _process: Process, then: Callable[[], None]) -> None:
        then()

    with patch.object(Supervisor, "_end", end_at_once):
        assert any(map(fails, trials))
