"""A simulated week: a run may be as long as it likes, its memory is that of its first day."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil
import pytest

from penstock.runtime.hosts.virtual.simulate import Simulation
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from penstock.messages.training import StepReported

DAY_S: Final = 24 * 3600.0
FILE: Final = Path(__file__).parents[2] / "scenarios" / "simulated_1024_engines.yaml"
WEEK: Final = (
    "engines.count=256",
    "engines.slots=8",
    "engines.progress_tokens=4096",
    "engines.simulated.response_tokens_median=4000",
    "engines.simulated.token_s=0.5",
    "sampling.max_response_tokens=20000",
    "model.max_context=1000000",
    "prompt_source.lease_timeout_s=7200",
    "learner.groups_per_batch=64",
    "learner.simulated.step_s=60",
    "learner.save_every=10",
    "runtime.heartbeat_s=60",
    "runtime.heartbeat_timeout_s=300",
    "run.num_steps=490",
)
"""Responses take about an hour, and a step 21 minutes: so many of them are a little more than a week."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_week_with_256_engines_takes_the_memory_of_its_first_day(capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[int, int] = {}

    def told(_: StepReported) -> None:
        day = int(simulation.host.clock.now_s / DAY_S)
        if day not in sizes:
            gc.collect()
            sizes[day] = psutil.Process().memory_info().rss

    simulation = Simulation(load_scenario(FILE, WEEK), on_step=told, may_lose=False)
    ending = simulation.run()
    assert ending.completed, ending.story
    assert ending.at_s > 7 * DAY_S, f"{ending.at_s / DAY_S:.1f} days"
    with capsys.disabled():
        print(*(f"day {day}: {size / 1e6:.0f} MB" for day, size in sizes.items()), sep=", ")
    assert sizes[7] < 1.1 * sizes[1], sizes
