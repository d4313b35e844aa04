"""``engines.scale: by_bound`` on the virtual clock: where it settles, what it costs, and what it leaves untouched."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from trials.draws import draw_trial
from trials.fuzz import TrialRun

from penstock.backends.simulated import lengths
from penstock.messages.ledger import EnginesRecorded
from penstock.messages.names import LEARNER
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.resolve import resolve
from penstock.runtime.shell import engine_scaling

if TYPE_CHECKING:
    from penstock.backends.engines.options import LatencyOptions
    from penstock.backends.ledger.memory import MemoryLedger
    from penstock.messages.commands import Generate

pytestmark = pytest.mark.timeout(240)

SCENARIO = Path(__file__).parent / "by_bound.yaml"
FEWER = ("sampling.samples_per_group=2", "engines.slots=4")
"""Half of the samples for half of the slots: all are as busy, for half of the events."""
NUM_TRIALS = 20
"""Of those that follow the bound, for each policy."""


def simulation(*overrides: str) -> Simulation:
    return Simulation(resolve(load_scenario(SCENARIO, list(overrides))), with_digest=False)


def changes_of(ledger: MemoryLedger) -> list[EnginesRecorded]:
    """The engines from the start on, and each change of them."""
    return [entry for entry in ledger.entries if isinstance(entry, EnginesRecorded)]


def ran(simulated: Simulation) -> list[int]:
    """How many engines there were from the start on, and after each change."""
    assert simulated.run().completed
    changes = changes_of(simulated.host.ledger)
    assert all(change.reason for change in changes[1:])
    return [len(change.engines) for change in changes]


def slow_down(simulated: Simulation, factor: float) -> None:
    """The Learner takes so many times as long from now on."""
    simulated.host.supervisor.processes[LEARNER].slowness = factor


@functools.cache
def step_s(*overrides: str) -> float:
    simulated = simulation("engines.scale=fixed", "run.num_steps=60", *overrides)
    assert simulated.run().completed
    times = simulated.accounts.step_times
    return (times[-10] - times[15]) / (len(times) - 25)


@functools.cache
def load() -> float:
    """Engines of work: generation of a batch by one ÷ what the Learner needs for a batch."""
    return step_s("engines.count=1") / step_s("engines.count=8")


def is_right(num_engines: int, factor: float = 1.0) -> bool:
    """Within one of the fewest engines whose generation does not bind, for so many times the load."""
    return abs(num_engines + load() * factor // -1) <= 1


@pytest.mark.parametrize("first", [1, 8])
def test_from_either_end_it_settles_at_the_fewest_engines_that_do_not_bind(first: int) -> None:
    simulated = simulation(f"engines.count={first}")
    found = ran(simulated)
    assert is_right(found[-1])
    assert len(found) <= 4, found
    times = simulated.accounts.step_times
    settled_s = (times[-10] - times[-150]) / 140
    assert settled_s <= 1.1 * step_s("engines.count=8"), "no engine more would make it a tenth quicker"


def test_a_learner_that_becomes_slower_half_way_lets_engines_go() -> None:
    simulated = simulation(*FEWER, "engines.count=4", "run.num_steps=450")
    simulated.host.clock.at(500.0, slow_down, simulated, 2.0)
    found = ran(simulated)
    assert is_right(max(found))
    assert is_right(found[-1], 0.5)
    assert found[-1] < max(found)
    assert len(found) <= 5, found


def test_responses_that_become_longer_bring_engines() -> None:
    length_of = lengths.num_tokens_of

    def longer(model: LatencyOptions, max_tokens: int, command: Generate, *, run_seed: int) -> int:
        factor = min(1.6, 0.5 + command.key.group_id / 2500)
        return int(length_of(model, max_tokens, command, run_seed=run_seed) * factor) + 1

    with patch.object(lengths, "num_tokens_of", longer):
        found = ran(simulation(*FEWER, "engines.count=2", "run.num_steps=500"))
    assert found == sorted(found), "longer and longer: nobody has to go"
    assert is_right(found[-1], 1.6)
    assert len(found) <= 6, found


def test_a_thousand_steady_steps_with_noise_change_at_most_one_engine() -> None:
    found = ran(simulation(*FEWER, "engines.count=5", "run.num_steps=1000", "learner.simulated.jitter_sigma=0.3"))
    assert len(found) <= 2, found


def test_without_hysteresis_it_would_flap() -> None:
    """The planted bug: one threshold for both directions, and every reading counts."""
    with patch.multiple(engine_scaling, WAITS=0.02, WAITS_LONG=0.0, FULL=0.0, ROOM=1.0, READINGS=1, MAX_READINGS=1):
        found = ran(simulation(*FEWER, "engines.count=5", "learner.simulated.jitter_sigma=0.3"))
    assert len(found) > 8, found


@pytest.mark.parametrize("policy", ["sync", "one_step_off", "fully_async"])
def test_no_rule_is_broken_by_engines_that_follow_the_bound_whatever_dies(policy: str) -> None:
    num_played = num_changed = 0
    for seed in range(100_000, 102_000):
        trial = draw_trial(policy, seed)
        if trial.scale_hold_s is None:
            continue
        run = TrialRun(trial, with_digest=False)
        run.run()
        num_changed += any(change.reason for change in changes_of(run.host.ledger))
        num_played += 1
        if num_played == NUM_TRIALS:
            break
    assert num_played == NUM_TRIALS
    assert num_changed, "most runs end before there is a reading; some had one that changed the engines"


def test_a_lost_machine_goes_on_with_the_engines_that_were_recorded_and_follows_the_bound_again() -> None:
    simulated = simulation(*FEWER, "engines.count=1", "run.num_steps=250")
    simulated.host.run(200.0)
    before = changes_of(simulated.host.ledger)[-1].engines
    assert len(before) > 1
    simulated.host.lose_machine()
    found = ran(simulated)
    assert found[-1] >= len(before)
    assert is_right(found[-1])
