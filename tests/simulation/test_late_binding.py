"""Two rounds of nearly equal responses exactly: samples that are bound early make a third one at one of the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from penstock.actors.prompt_source.routing import EngineView, Router
from penstock.benchmarks import routing

if TYPE_CHECKING:
    from pathlib import Path


def compared(file: Path, num_engines: int, sigma: float, rounds: float) -> float:
    return routing.ratio(routing.Comparison(file, "prefix_affine", 1.5, 0.0, num_engines, sigma, rounds, seed=0))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "scenario.yaml"
    found.write_text(routing.SCENARIO)
    return found


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize(("sigma", "rounds"), [(0.05, 1.0), (0.05, 2.0), (0.8, 2.5)])
def test_a_step_is_as_quick_as_with_the_best_routing(file: Path, num_engines: int, sigma: float, rounds: float) -> None:
    assert compared(file, num_engines, sigma, rounds) < routing.MOST


def test_without_the_rule_it_takes_a_third_round(file: Path) -> None:
    def has_room(_: Router, view: EngineView, num_waiting: int) -> bool:
        return view.has_room and num_waiting > 0

    with patch.object(Router, "_takes", has_room):
        assert compared(file, 2, 0.05, 2.0) > 1.2
