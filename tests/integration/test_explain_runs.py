"""``penstock explain`` of real runs with one planted bottleneck each: it names that one first."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
from bottlenecks import REAL, Plant, plants, usual, write
from live_run import LiveRun
from msgspec.structs import replace

from penstock.runtime.observability.explain import Explanation, explain
from penstock.runtime.observability.explain.bindings import bindings_of
from penstock.runtime.observability.explain.causes import Cause
from penstock.runtime.observability.lives import STAGES

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.observability.explain.causes import Binding

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

NAMES = tuple(plants(usual))
NUM_DRAWN = 24


def explained(plant: Plant, folder: Path, *overrides: str) -> tuple[Explanation, Path]:
    with LiveRun(write(folder, plant), folder, overrides) as live:
        live.finish()
        return explain(live.folder), live.folder


def of_its_own(found: Explanation) -> tuple[Binding, ...]:
    """What binds a run besides the cores of this machine, which other tests use too."""
    assert found.facts is not None
    return bindings_of(replace(found.facts, cores=None))


def costs(found: Explanation) -> str:
    """For the message of a test that fails."""
    told = ", ".join(f"{each.cause} {each.share:.2f}" for each in found.bindings)
    return f"{told}; {found.facts}"


@pytest.mark.parametrize("name", NAMES)
def test_the_planted_cause_comes_first(name: str, tmp_path: Path) -> None:
    plant = plants(usual)[name]
    found, folder = explained(plant, tmp_path)
    first = of_its_own(found)[0]
    assert first.cause is plant.cause, costs(found)
    assert first.binds is (plant.cause is not Cause.HARDWARE)
    assert all((folder / each.source).exists() for binding in found.bindings for each in binding.evidence)
    assert found.typical is not None
    assert {stage.name for stage in found.typical.stages} == set(STAGES)
    assert not found.missing
    assert found.alarms or found.knobs or plant.cause is Cause.HARDWARE
    assert found.bound is not None
    assert found.bound.least_s <= 1.05 * found.bound.measured_s
    if plant.cause is Cause.SLOW_REWARD:
        longest = [path.longest for path in found.paths]
        assert {None if stage is None else stage.name for stage in longest} == {"score"}, "what a step waited for last"


def test_a_run_that_goes_on_is_explained(tmp_path: Path) -> None:
    plant = plants(usual)["low_concurrency"]
    with LiveRun(write(tmp_path, plant), tmp_path, ("run.num_steps=1000",)) as live:
        live.await_steps(12)
        found = explain(live.folder)
        live.interrupt()
    assert of_its_own(found)[0].cause is plant.cause, costs(found)
    assert not found.missing


def test_without_traces_it_does_not_guess(tmp_path: Path) -> None:
    found, _ = explained(plants(usual)["low_concurrency"], tmp_path, "observability.tracing=false")
    assert of_its_own(found)[0].cause is Cause.UNKNOWN, costs(found)
    assert any("observability.tracing" in text for text in found.missing)


def test_engine_and_learner_on_one_core_have_too_few(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    keys = {"staleness.policy": "fully_async", "staleness.max_staleness": 4, "learner.groups_per_batch": 8}
    os.sched_setaffinity(0, {min(cores)})  # the run's processes inherit it
    try:
        found, _ = explained(Plant(Cause.FEW_CORES, keys, REAL), tmp_path)
    finally:
        os.sched_setaffinity(0, cores)
    assert found.bindings[0].cause is Cause.FEW_CORES, costs(found)
    assert found.bindings[0].binds


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_DRAWN))
def test_of_what_is_drawn_the_planted_cause_comes_first(number: int, tmp_path: Path) -> None:
    draw = random.Random(number)
    name = draw.choice(NAMES)
    plant = plants(lambda low, _middle, high: draw.uniform(low, high))[name]
    found, _ = explained(plant, tmp_path, f"run.seed={number}")
    assert of_its_own(found)[0].cause is plant.cause, f"{name} {plant.keys}: {costs(found)}"
