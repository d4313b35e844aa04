"""``penstock bench objectives``: a cell is a function of preset, seed and age; cells are compared at equal tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from penstock.benchmarks._aged_training import TrainedStep
from penstock.benchmarks.objectives import Cell, Settings, markdown, report_on, study
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

TINY = Settings(size="xs", num_steps=3, groups_per_batch=2, age=1, learning_rate=1e-2, warm_start_steps=2)
QUIET = Console(quiet=True)


def cell(preset: str, seed: int, rewards: list[float], tokens: int, error: str = "") -> Cell:
    steps = [
        TrainedStep(version=version, reward=reward, generated_tokens=tokens, figures={})
        for version, reward in enumerate(rewards, start=1)
    ]
    return Cell(preset=preset, seed=seed, settings=TINY, needs={}, steps=steps, error=error, cpu_s=1.0)


def test_cells_of_a_seed_are_compared_at_the_tokens_of_the_shortest() -> None:
    short = cell("dapo", 0, [0.1, 0.1, 0.4], tokens=100)
    long = cell("grpo", 0, [0.1, 0.1, 0.5, 0.6, 0.9], tokens=100)
    fewer = cell("grpo", 1, [0.1, 0.1, 0.2], tokens=50)
    report = report_on([short, long, fewer], TINY, [("dapo", 0), ("grpo", 0), ("dapo", 1), ("grpo", 1)])
    dapo, grpo = report.rows
    assert (dapo.reward, dapo.num_tokens, dapo.num_diverged) == (0.4, 300, 0)
    assert (grpo.lowest, grpo.highest, grpo.num_seeds) == (0.2, 0.5, 2)
    assert report.missing == ["dapo, seed 1"]
    assert "Missing: dapo, seed 1." in markdown(report)


def test_a_cell_that_ends_below_its_start_or_with_an_error_has_diverged() -> None:
    worse = cell("dapo", 0, [0.3, 0.3, 0.2], tokens=10)
    broken = cell("dapo", 1, [0.3, 0.9], tokens=10, error="step 3: the loss is nan")
    fine = cell("dapo", 2, [0.3, 0.3, 0.4], tokens=10)
    assert report_on([worse, broken, fine], TINY, []).num_diverged == 2


@pytest.mark.slow
def test_a_study_keeps_its_cells_goes_on_and_repeats_itself(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    (folder / "cells").mkdir(parents=True)
    assert study(folder, TINY, ["dapo"], [0], QUIET).rows[0].num_seeds == 1
    first = (folder / "cells" / "dapo-0.json").read_bytes()
    study(folder, TINY, ["dapo", "cispo"], [0], QUIET)
    assert (folder / "cells" / "dapo-0.json").read_bytes() == first
    table = (folder / "objectives.md").read_text()
    assert "\n| dapo | 1 |" in table
    assert "\n| cispo (learning_rate 0.0005) | 1 |" in table
    (folder / "cells" / "dapo-0.json").unlink()
    study(folder, TINY, ["dapo"], [0], QUIET)
    again = (folder / "cells" / "dapo-0.json").read_bytes()
    kept, repeated = (msgspec.json.decode(data, type=Cell) for data in (first, again))
    assert repeated.steps == kept.steps
    with pytest.raises(UserFault, match="name another --folder"):
        study(folder, msgspec.structs.replace(TINY, age=2), ["dapo"], [0], QUIET)
