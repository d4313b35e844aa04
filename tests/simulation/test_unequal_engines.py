"""Engines of unequal speed: a slot takes its next sample when it is free, so each has as many as it can make. And
engines whose weights come late, which make what their weights can make."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.messages.ledger import GroupRecorded
from penstock.messages.samples import TerminalState
from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.resolve import resolve

if TYPE_CHECKING:
    from penstock.messages.training import Balance

pytestmark = pytest.mark.timeout(120)

SCENARIO = Path(__file__).parent / "by_bound.yaml"
SPEEDS = (1.0, 0.5, 0.25)
GENERATION_BINDS = (
    "engines.scale=fixed",
    "engines.min=null",
    "engines.max=null",
    "engines.simulated.start_s=0",
    "learner.simulated.step_s=0.05",
    "run.num_steps=120",
)


def ran(*overrides: str, speeds: tuple[float, ...] = SPEEDS) -> tuple[float, list[float]]:
    """Seconds of a step, and the share of the samples that each engine has made."""
    more = ", ".join(f"{{backend: simulated, slots: 8, simulated_speed: {speed}}}" for speed in speeds[1:])
    scenario = load_scenario(SCENARIO, [*GENERATION_BINDS, f"engines.more=[{more}]", *overrides])
    simulated = Simulation(resolve(scenario))
    assert simulated.run().completed
    made = Counter(
        sample.engine
        for entry in simulated.host.ledger.entries
        if isinstance(entry, GroupRecorded)
        for sample in entry.samples
    )
    times = simulated.accounts.step_times
    shares = [made[f"engine/{index}"] / made.total() for index in range(len(speeds))]
    return (times[-20] - times[20]) / (len(times) - 40), shares


@pytest.mark.parametrize("routing", ["prefix_affine", "least_loaded"])
def test_load_follows_speed_to_within_a_twentieth_of_the_best_split(routing: str) -> None:
    with_all, shares = ran("staleness.max_staleness=8", f"prompt_source.routing={routing}")
    alone, _ = ran("staleness.max_staleness=8", speeds=(1.0,))
    assert with_all <= 1.05 * alone / sum(SPEEDS), "no split of these samples is quicker than all slots in use"
    assert shares == pytest.approx([speed / sum(SPEEDS) for speed in SPEEDS], abs=0.03)


def late(fetch_s: float | None, *overrides: str) -> tuple[float, Balance]:
    """Seconds of a step, and what became of all samples, with an engine whose weights take so long; None: without."""
    more = [] if fetch_s is None else [f"engines.more=[{{backend: simulated, slots: 8, simulated_fetch_s: {fetch_s}}}]"]
    scenario = load_scenario(SCENARIO, [*GENERATION_BINDS, "run.num_steps=50", *more, *overrides])
    simulated = Simulation(resolve(scenario))
    ending = simulated.run()
    assert ending.completed
    times = simulated.accounts.step_times
    return (times[-5] - times[5]) / (len(times) - 10), simulated.last_word(ending).balance


ETAS = {0: ("staleness.policy=sync", "staleness.max_staleness=0"), 1: ("staleness.max_staleness=1",),
        2: ("staleness.max_staleness=2",), 8: ("staleness.max_staleness=8",)}  # fmt: skip


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("eta", [0, 1, 2])
def test_an_engine_whose_weights_take_longer_than_a_step_makes_no_token_that_is_lost(eta: int, on_stale: str) -> None:
    step_s, balance = late(20.0, *ETAS[eta], f"staleness.on_stale={on_stale}")
    assert step_s <= 1.02 * late(None, *ETAS[eta], f"staleness.on_stale={on_stale}")[0]
    lost = [each for each in balance.ended if each.state != TerminalState.TRAINED]
    assert sum(each.num_tokens for each in lost) == 0, "what is past its deadline had not begun"
    if on_stale == "wait":
        assert lost == []


def test_an_engine_whose_weights_come_late_costs_nothing_and_pays_with_a_large_bound() -> None:
    """As docs/clusters.md has it."""
    assert late(20.0, *ETAS[1])[0] <= 1.02 * late(None, *ETAS[1])[0]
    assert late(40.0, *ETAS[2])[0] <= 1.02 * late(None, *ETAS[2])[0]
    assert late(20.0, *ETAS[8])[0] < 0.9 * late(None, *ETAS[8])[0]


def test_a_small_bound_waits_for_what_the_slowest_engine_began() -> None:
    """The limit of it, as docs/staleness.md has it: what a step waits for is then the longest response, and that of an
    engine at a quarter of the speed takes four times as long."""
    with_all, _ = ran("staleness.max_staleness=2")
    without, _ = ran("staleness.max_staleness=2", speeds=SPEEDS[:2])
    assert with_all > 1.1 * without
