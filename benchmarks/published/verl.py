"""verl's ablation of staleness: Qwen2.5-Math-7B, 64 H20 that generate and 64 that train, thresholds of 0 to 0.5.

Published are times of a step of 512 prompts with 16 responses each, in mini-batches of 32 prompts with new weights
after every sixteenth (``docs/advance/fully_async.md`` in volcengine/verl). Fitted are the generation of the synchronous
run on all 128 GPUs and the step with threshold 0; the training of a batch is that of the latter. The other three
thresholds are predicted, with verl's rule as a policy (:mod:`.verl_policies`).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

from penstock.benchmarks.published._model import Setting, bisected
from penstock.benchmarks.published.verl_policies import UPDATES
from penstock.runtime.prediction.steady import stretch_of

COLOCATED_GENERATION_S: Final = 177.85
TRAINING_S: Final = 98.77
MEASURED_S: Final = {0.0: 231.34, 0.1: 171.30, 0.3: 146.11, 0.5: 150.63}
"""Step, by threshold."""
SCALE: Final = 16
"""Of 16 engines of 4 GPUs and 32 prompts one and 2 are simulated: the parts are alike."""
POLICIES: Final = Path(__file__).with_name("verl_policies.py")
NO_BOUND: Final = 3 * UPDATES
"""Of the age of a sample, in mini-batches: verl has none, and none gets as old as this."""
LOAD_SHARE: Final = 0.005
MEDIAN: Final = 1000.0


def colocated(sigma: float, token_s: float) -> Setting:
    """Generation of the synchronous run."""
    return Setting(
        engines=2, group_size=16, groups_per_batch=2 * UPDATES, median=MEDIAN, sigma=sigma, token_s=token_s,
        token_load_s=LOAD_SHARE * token_s, num_steps=8,
    )  # fmt: skip


def streamed(threshold: float, sigma: float, token_s: float) -> Setting:
    """Generation and training on a half each."""
    return colocated(sigma, token_s)._replace(
        engines=1, groups_per_batch=2, step_s=TRAINING_S / UPDATES, publish_every=UPDATES, max_staleness=NO_BOUND,
        policy=f"{POLICIES}:Threshold{round(100 * threshold)}", update_mode="in_flight", num_steps=num_steps(NO_BOUND),
    )  # fmt: skip


def num_steps(max_staleness: int) -> int:
    """The fewest of which the steady part is a whole number of publishes, four or more."""
    for count in itertools.count(4 * UPDATES):
        stretch = stretch_of(count, max_staleness)
        if stretch is not None and (length := stretch[1] - stretch[0]) >= 4 * UPDATES and length % UPDATES == 0:
            return count
    raise AssertionError("unreachable: every length comes")


def predicted(seed: int) -> dict[float, float]:
    """Steps with each threshold, in seconds; that with 0 is fitted."""

    def unit(sigma: float) -> float:
        return 0.01 * COLOCATED_GENERATION_S / colocated(sigma, 0.01).step_time_s(seed)

    # The longer the tail, the less half of the engines costs.
    sigma = bisected(
        MEASURED_S[0.0], lambda each: streamed(0.0, each, unit(each)).step_time_s(seed), 0.05, 1.5, rounds=5
    )
    return {each: streamed(each, sigma, unit(sigma)).step_time_s(seed) for each in MEASURED_S}
