"""Killing engines costs time and changes nothing in what is learnt: the quickstart's curve with and without kills."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.runtime.chaos.faults import plan_faults
from penstock.runtime.chaos.verdict import CHAOS_FILE
from penstock.runtime.cli.chaos import play
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.trackers import read_steps
from penstock.runtime.run.wiring import actor_names
from penstock.runtime.scenario import load_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

QUICKSTART = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
SEEDS = (0, 1, 2)
KILLS = ("kill:engine/0", "kill:engine/1", "kill:engine/0", "kill:engine/1", "kill:engine/0")
NUM_PARTS = 4
NUM_ERRORS = 3.0
RUN_TIMEOUT_S = 1800.0


def curve(folder: Path, seed: int, faults: Sequence[str], overrides: Sequence[str] = ()) -> list[float]:
    """Mean reward of each part of a run, in order."""
    keys = (*overrides, f"run.seed={seed}", f"run.folder={folder}", "runtime.heartbeat_timeout_s=60")
    scenario = load_scenario(QUICKSTART, keys)
    planned = plan_faults(faults, num_faults=None if faults else 0, seed=seed, names=actor_names(scenario))
    verdict = play(scenario, QUICKSTART, keys, planned, seed=seed, timeout_s=RUN_TIMEOUT_S)
    assert verdict.is_clean, verdict
    assert sum(verdict.restarts.values()) == len(faults)
    (chaos,) = folder.glob(f"*/runs/*/{CHAOS_FILE}")
    rewards = [reward for step in read_steps(chaos.parent) if (reward := step.metrics[REWARD]) is not None]
    length = len(rewards) // NUM_PARTS
    return [statistics.fmean(rewards[i * length : (i + 1) * length]) for i in range(NUM_PARTS)]


def disagreements(plain: Sequence[Sequence[float]], killed: Sequence[Sequence[float]]) -> list[str]:
    """Parts in which the means of the two arms differ by more than ``NUM_ERRORS`` standard errors.

    The spread over seeds is pooled over all parts and both arms. That of three seeds in one part alone is a matter of
    luck: where kills change nothing, the means still differ by more than its range in one part of seven.
    """
    parts = list(zip(zip(*plain, strict=True), zip(*killed, strict=True), strict=True))
    spread = math.sqrt(statistics.fmean(statistics.variance(arm) for part in parts for arm in part))
    allowed = NUM_ERRORS * spread * math.sqrt(1 / len(plain) + 1 / len(killed))
    return [
        f"part {number}: {without} without kills, {with_kills} with them; {allowed:.3f} is allowed"
        for number, (without, with_kills) in enumerate(parts)
        if abs(statistics.fmean(with_kills) - statistics.fmean(without)) > allowed
    ]


def test_curves_that_differ_are_told_apart() -> None:
    plain = [[0.2, 0.5], [0.3, 0.6], [0.25, 0.55]]
    assert not disagreements(plain, [[0.22, 0.52], [0.31, 0.58], [0.2, 0.5]])
    assert disagreements(plain, [[0.22, 0.3], [0.31, 0.4], [0.2, 0.35]])


def test_curves_with_and_without_five_engine_kills_agree_within_the_spread_of_three_seeds(tmp_path: Path) -> None:
    plain = [curve(tmp_path / f"plain-{seed}", seed, ()) for seed in SEEDS]
    killed = [curve(tmp_path / f"killed-{seed}", seed, KILLS) for seed in SEEDS]
    print(f"without kills {plain}, with five {killed}")
    assert not disagreements(plain, killed)
