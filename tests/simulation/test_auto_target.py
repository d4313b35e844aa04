"""The bound is a limit, not a target: ``target_outstanding: auto`` keeps as few groups outstanding as keep the learner
busy."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.runtime.hosts.virtual.simulate import simulate_scenario
from penstock.runtime.observability.summary import RunSummary, read_summary
from penstock.runtime.scenario import load_scenario
from penstock.runtime.scenario.resolve import resolve

SCENARIO = Path(__file__).parents[2] / "scenarios" / "simulated_1024_engines.yaml"
QUICK_ENGINES = (
    "run.num_steps=100",
    "engines.count=16",
    "learner.groups_per_batch=4",
    "staleness.max_staleness=8",
    "sampling.max_response_tokens=400",
    "engines.simulated.response_tokens_median=100",
    "engines.simulated.response_tokens_sigma=0.5",
)


def simulated(target: str, folder: Path) -> RunSummary:
    """The outcome with this target."""
    scenario = resolve(load_scenario(SCENARIO, [*QUICK_ENGINES, f"staleness.target_outstanding={target}"]))
    folder.mkdir()
    assert simulate_scenario(scenario, seed=7, console=Console(file=io.StringIO()), run_folder=folder) == 0
    summary = read_summary(folder)
    assert summary is not None
    return summary


@pytest.mark.timeout(120)
def test_auto_is_as_fast_as_the_full_bound_at_less_than_half_its_staleness(tmp_path: Path) -> None:
    auto = simulated("auto", tmp_path / "auto")
    full = simulated("36", tmp_path / "full")  # (η + 1)·B
    assert auto.version == full.version == 100
    assert full.training_s / auto.training_s >= 0.97
    assert auto.mean_staleness is not None
    assert full.mean_staleness is not None
    assert auto.mean_staleness < full.mean_staleness / 2
