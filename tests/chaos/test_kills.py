"""SIGKILL and SIGSTOP of every actor and of the driver, at drawn moments, eight in one run."""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING

import pytest
from chaos_run import ChaosRun

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

TARGETS = (
    "driver", "buffer", "learner", "prompt_source", "scorer", "filter", "weight_publisher", "engine/0",
)  # fmt: skip
SEEDS = (1, 2, 3)
FAULTS_A_RUN = 8


def faults_of(seed: int, half: int) -> list[str]:
    """Half of all pairs of a signal and a target, mixed; the two halves of a seed have each of them once."""
    pairs = [f"{kind}:{target}" for kind, target in product(("kill", "stop"), TARGETS)]
    random.Random(seed).shuffle(pairs)
    return pairs[half * FAULTS_A_RUN : (half + 1) * FAULTS_A_RUN]


def test_every_actor_and_the_driver_are_killed_and_stopped_and_at_least_forty_faults_come() -> None:
    drawn = [fault for seed in SEEDS for half in (0, 1) for fault in faults_of(seed, half)]
    assert len(drawn) >= 40
    assert {fault.partition(":")[0::2] for fault in drawn} == set(product(("kill", "stop"), TARGETS))


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_survives_eight_kills_and_stops_and_loses_nothing(seed: int, half: int, tmp_path: Path) -> None:
    run = ChaosRun(tmp_path, "modelled.yaml", faults_of(seed, half), seed=2 * seed + half)
    run.assert_clean()
    num_driver_kills = faults_of(seed, half).count("kill:driver")
    assert len(run.verdict.exit_codes) == 1 + num_driver_kills
    killed = {fault.fault.partition(":")[2] for fault in run.verdict.faults if fault.fault.startswith("kill:")}
    assert killed - {"driver"} <= run.verdict.restarts.keys() | ({*TARGETS} if num_driver_kills else set())
