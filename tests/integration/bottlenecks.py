"""Scenarios with one planted bottleneck each, and one without: what ``penstock explain`` has to find in their runs.

All of them start from :data:`BALANCED` (modelled engines and learner) or :data:`REAL` (the embedded engine and learner
on a model of 0.1 million parameters, with functions of a user's), and differ in the keys of their plant alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import yaml

from penstock.runtime.observability.explain.causes import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Keys = dict[str, Any]

FUNCTIONS: Final = """
import asyncio
import os
import time

SLOW_S = float(os.environ.get("BOTTLENECK_S", "0.06"))

def quick(index):
    return float(index % 2)

def slow(index):
    time.sleep(SLOW_S)
    return float(index % 2)

def mostly_the_same(row, index):
    return float(row % 4 == 0 and index % 2)

def late(prompt, history):
    time.sleep(SLOW_S / 2)
    return 0.0

async def tool(play):
    await play.generate()
    await play.call(asyncio.sleep(10 * SLOW_S))
    return 1.0
"""

BALANCED: Final[Keys] = {
    "run.name": "balanced",
    "run.num_steps": 16,
    "data.path": "lines:2000",
    "sampling.samples_per_group": 4,
    "sampling.max_response_tokens": 400,
    "reward.function": "lines",
    "filter.drop_zero_spread": False,
    "staleness.policy": "fully_async",
    "staleness.max_staleness": 3,
    "engines.backend": "simulated",
    "engines.count": 2,
    "engines.slots": 16,
    "engines.progress_tokens": 50,
    "engines.simulated.response_tokens_median": 60,
    "engines.simulated.response_tokens_sigma": 0.2,
    "engines.simulated.prefill_s": 0.005,
    "engines.simulated.token_s": 0.004,
    "engines.simulated.token_load_s": 0.0,
    "engines.simulated.apply_weights_s": 0.005,
    "engines.simulated.fetch_weights_s": 0.005,
    "learner.backend": "simulated",
    "learner.groups_per_batch": 8,
    "learner.save_every": 1000,
    "learner.simulated.step_s": 0.24,
    "learner.simulated.publish_s": 0.005,
    "runtime.host": "local",
    "runtime.heartbeat_s": 0.25,
    "runtime.heartbeat_timeout_s": 60,
    "observability.trace_fraction": 1.0,
    "observability.report": False,
}


class Plant(NamedTuple):
    """A bottleneck, and the keys that make it."""

    cause: Cause
    keys: Keys
    base: Mapping[str, Any] = BALANCED


Draw = Callable[[float, float, float], float]
"""A number from the first to the last; the one between them is usual."""


def usual(_low: float, middle: float, _high: float) -> float:
    """The number of the table."""
    return middle


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario from dotted keys."""
    scenario: dict[str, Any] = {}
    for key, value in keys.items():
        *path, last = key.split(".")
        block = scenario
        for name in path:
            block = block.setdefault(name, {})
        block[last] = copy.deepcopy(value)
    return scenario


REAL: Final[Keys] = {
    "run.name": "real",
    "run.num_steps": 12,
    "data.path": "lines:200",
    "model.make": "xs",
    "sampling.samples_per_group": 4,
    "sampling.max_response_tokens": 12,
    "reward.function": "bottleneck_functions.py:quick",
    "filter.drop_zero_spread": False,
    "staleness.policy": "one_step_off",
    "engines.slots": 16,
    "engines.progress_tokens": 6,
    "learner.groups_per_batch": 4,
    "learner.save_every": 1000,
    "runtime.host": "local",
    "runtime.heartbeat_s": 0.25,
    "runtime.heartbeat_timeout_s": 60,
    "observability.trace_fraction": 1.0,
    "observability.report": False,
}


def plants(draw: Draw) -> dict[str, Plant]:
    """Every bottleneck by its name, as hard as is drawn."""
    return {
        "balanced": Plant(Cause.HARDWARE, {}),
        "too_few_engines": Plant(
            Cause.FEW_ENGINES, {"engines.count": 1, "learner.simulated.step_s": draw(0.05, 0.1, 0.2)}
        ),
        "tiny_eta": Plant(
            Cause.SMALL_BOUND,
            {
                "staleness.policy": "sync",
                "staleness.max_staleness": 0,
                "engines.simulated.response_tokens_sigma": 0.0,
                "learner.simulated.step_s": draw(0.2, 0.24, 0.3),
            },
        ),
        "long_tail": Plant(
            Cause.LONG_TAIL,
            {
                "staleness.max_staleness": 1,
                "learner.simulated.step_s": 0.1,
                "engines.simulated.response_tokens_sigma": draw(1.3, 1.4, 1.6),
                "engines.simulated.response_tokens_median": round(draw(16, 20, 24)),
            },
        ),
        "slow_publish": Plant(Cause.SLOW_PUBLISH, {"learner.simulated.publish_s": draw(0.15, 0.2, 0.4)}),
        "heavy_learner": Plant(Cause.HEAVY_LEARNER, {"learner.simulated.step_s": draw(0.5, 0.6, 1.0)}),
        "low_concurrency": Plant(Cause.LOW_CONCURRENCY, {"staleness.max_concurrent": round(draw(2, 3, 4))}),
        "filter": Plant(
            Cause.FILTER,
            {  # a step takes ten times as many samples as elsewhere, so that half as many steps show as much
                "run.num_steps": 8,
                "filter.max_response_tokens": round(draw(60, 62, 66)),
                "learner.simulated.step_s": 0.1,
            },
        ),
        "slow_engine": Plant(
            Cause.SLOW_ENGINE,
            {
                "engines.count": 1,
                "engines.more": [
                    {"backend": "simulated", "count": 1, "slots": 16, "simulated_speed": draw(0.4, 0.5, 0.55)}
                ],
            },
        ),
        "slow_reward": Plant(Cause.SLOW_REWARD, {"reward.function": "bottleneck_functions.py:slow"}, REAL),
        "slow_tool": Plant(
            Cause.SLOW_TOOL,
            {"episode.kind": "function", "episode.generate": "bottleneck_functions.py:tool"},
            REAL,
        ),
        "slow_dataset": Plant(
            Cause.SLOW_ROWS,
            {
                "prompt_source.priority": "bottleneck_functions.py:late",
                "prompt_source.priority_candidates": round(draw(6, 8, 12)),
            },
            REAL,
        ),
        "mostly_rejected": Plant(
            Cause.FILTER,
            {"reward.function": "bottleneck_functions.py:mostly_the_same", "filter.drop_zero_spread": True},
            REAL,
        ),
    }


def write(folder: Path, plant: Plant) -> Path:
    """Its scenario, with the functions beside it; returns the file."""
    (folder / "bottleneck_functions.py").write_text(FUNCTIONS)
    file = folder / "bottleneck.yaml"
    file.write_text(yaml.safe_dump(nested({**plant.base, **plant.keys})))
    return file
