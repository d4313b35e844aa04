"""AReaL's sweeps of the bound η: a 1.5B model, three quarters of the GPUs generate, a quarter trains.

Published are trained tokens a second by η (arXiv 2505.24298v5: figure 5c with responses of up to 27,648 tokens, and
the ablation with up to 8,192 on 8 GPUs), of 512 prompts with 16 responses a step. A step takes a batch's tokens ÷
these, so only ratios count. Of the long responses η = 0, 2 and 16 are fitted, and 1, 4 and 8 predicted; of the short
ones 0 and 16 are fitted, with the lengths of the long ones cut off, and 4 and 8 predicted. AReaL's rule is played as a
policy (:mod:`.areal_policy`); what ``fully_async`` would take, which bounds every sample's age, is simulated beside it.
So are systems that generate and train on all GPUs in turns, which the paper compares it with.

Training takes what a step takes at η = 16: nothing is left to wait for there. What the step takes at η = 0 beyond it
is the generation of a batch up to its longest response, which gives the time of a token. The step at η = 2 gives the
median of the lengths: the shorter it is beside the longest response, the more of the generation further batches hide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from penstock.benchmarks.published._model import Setting, bisected
from penstock.benchmarks.published.areal_policy import SLACK
from penstock.runtime.prediction.steady import fewest_steps

POLICY: Final = f"{Path(__file__).with_name('areal_policy.py')}:Capacity"
WEIGHT_BYTES: Final = 2 * 1.54e9
"""Read for each token of all requests together: Qwen2.5-1.5B in 16 bits."""
CONTEXT_BYTES: Final = 28 * 2 * 2 * 128 * 2
"""Read besides for each token that is held: keys and values of 28 layers with two heads of 128."""
SLOTS: Final = 256
"""Requests that an engine runs at a time: what some 60 GB hold of contexts of 8,000 tokens."""
SIGMA: Final = 1.0
"""Of the logarithm of the lengths."""
SCALE: Final = 32
"""Of 96 engines and 512 prompts 3 and 16 are simulated, of the short ones' 6 and 64 half: the parts are alike."""
UNIT_S: Final = 1e-3
HOURS: Final = {"AReaL": 14.8, "verl": 33.6, "Sync.AReaL": 41.0}
"""Of 250 steps of the 1.5B model on 16 nodes (table 1): AReaL with η = 8, the others in turns on all GPUs."""
LAST_S: Final = 100.0
"""A step at η = 16, in the unit of all that is fitted and predicted."""


class Sweep(NamedTuple):
    """Throughput by η."""

    name: str
    engines: int
    groups_per_batch: int
    longest: int
    tokens_a_second: dict[int, float]
    fitted: tuple[int, ...]

    def published_s(self, eta: int) -> float:
        """A step."""
        return LAST_S * self.tokens_a_second[16] / self.tokens_a_second[eta]


LONG: Final = Sweep(
    "27,648 tokens", 96 // SCALE, 512 // SCALE, 27_648,
    {0: 128.7e3, 1: 269.3e3, 2: 356.6e3, 4: 356.6e3, 8: 371.7e3, 16: 396.8e3}, (0, 2, 16),
)  # fmt: skip
SHORT: Final = Sweep("8,192 tokens", 3, 32, 8_192, {0: 27.1e3, 4: 49.0e3, 8: 51.5e3, 16: 52.0e3}, (0, 16))
SWEEPS: Final = (LONG, SHORT)


class Predicted(NamedTuple):
    """Steps by sweep and η, where that of η = 16 takes 100 s."""

    median: float
    """Of the lengths, in tokens."""
    as_areal: dict[str, dict[int, float]]
    as_here: dict[int, float]
    """Of the long ones with ``fully_async``, by the bound of a sample's age."""
    in_turns: float
    """Of the long ones with generation and training on all GPUs in turns."""


def setting(sweep: Sweep, eta: int, median: float, *, unit_s: float, training_s: float) -> Setting:
    """The run with this bound under AReaL's rule; ``unit_s`` is a token's time without any context to read."""
    made = Setting(
        engines=sweep.engines, group_size=16, groups_per_batch=sweep.groups_per_batch, median=median, sigma=SIGMA,
        longest=sweep.longest, token_s=unit_s, context_token_s=unit_s * CONTEXT_BYTES / WEIGHT_BYTES, slots=SLOTS,
        step_s=training_s,
    )  # fmt: skip
    if eta == 0:
        return made
    return made._replace(
        policy=POLICY, max_staleness=eta + SLACK, update_mode="in_flight", num_steps=fewest_steps(eta + SLACK) + 10
    )


def fitted(sweep: Sweep, median: float, seed: int) -> dict[int, Setting]:
    """Every run of the sweep: with lengths of this median, and the step at η = 0 that was published."""
    generation_s = setting(sweep, 0, median, unit_s=UNIT_S, training_s=1e-6).step_time_s(seed)
    unit_s = UNIT_S * (sweep.published_s(0) - LAST_S) / generation_s
    return {eta: setting(sweep, eta, median, unit_s=unit_s, training_s=LAST_S) for eta in sweep.tokens_a_second}


def predicted(seed: int) -> Predicted:
    """Fit, and play all of both sweeps."""

    def at_two(shortness: float) -> float:
        return fitted(LONG, LONG.longest / shortness, seed)[2].step_time_s(seed)

    median = LONG.longest / bisected(LONG.published_s(2), at_two, 2.0, 30.0, rounds=6)
    runs = {sweep.name: fitted(sweep, median, seed) for sweep in SWEEPS}
    as_areal = {name: {eta: run.step_time_s(seed) for eta, run in each.items()} for name, each in runs.items()}
    as_here = {
        eta: run._replace(policy="fully_async", max_staleness=eta).step_time_s(seed)
        for eta, run in runs[LONG.name].items()
        if 0 < eta < 16
    }
    on_all = runs[LONG.name][0]._replace(engines=128 // SCALE, step_s=LAST_S / 4)
    return Predicted(median, as_areal, as_here, on_all.step_time_s(seed))
