"""NeMo-RL v0.6's table of performance: on-policy on all GPUs in turns against one step off on two halves of them.

The table has sizes, mean lengths and the time of a step (``docs/about/performance-summary.md`` in NVIDIA-NeMo/RL), and
not how it divides. Assumed is that decoding reads weights and contexts at 45 % of the memory's bandwidth; what the
on-policy step takes beyond that is training. One step off, half of the GPUs train: as long as the on-policy run on so
many GPUs did, where the table has one, else twice as long.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from penstock.benchmarks.published._model import Setting
from penstock.runtime.prediction.imports.lengths import mean_of_cut

BANDWIDTH_SHARE: Final = 0.45
"""Nothing in the table tells it: from 0.36 to 0.48 the sign of every gain is right."""
SIGMA: Final = 0.5
"""Of the logarithm of lengths; the median follows from the mean, and the longest of a batch is cut off."""
PROMPT_TOKENS: Final = 128
BYTES: Final = 2
"""Of a weight or of an entry of the cache: bfloat16."""
HBM: Final = {"H100": 3.35e12, "GB200": 8.0e12}
"""Bytes a second of a GPU."""


class Mixture(NamedTuple):
    """A model, from its ``config.json``."""

    num_parameters: float
    expert_share: float
    """Of them, in experts that are chosen among."""
    num_experts: int
    num_chosen: int
    context_bytes: float
    """Of a token that is held."""

    def read_bytes(self, num_running: float) -> float:
        """Of weights, for a token of each request: experts that none has chosen are not read."""
        touched = 1.0 - math.pow(1 - self.num_chosen / self.num_experts, num_running)
        return self.num_parameters * BYTES * (1 - self.expert_share * (1 - touched))


QWEN3_30B: Final = Mixture(30.5e9, 0.95, 128, 8, 48 * 2 * 4 * 128 * BYTES)
QWEN3_235B: Final = Mixture(235e9, 0.97, 128, 8, 94 * 2 * 4 * 128 * BYTES)
DEEPSEEK_V3: Final = Mixture(671e9, 0.97, 256, 8, 61 * 576 * BYTES)


class Pair(NamedTuple):
    """Two rows of the table with equally many GPUs."""

    name: str
    model: Mixture
    gpu: str
    num_gpus: int
    num_samples: int
    limit: int
    """Of prompt and response."""
    mean: float
    """Likewise."""
    gpus_an_engine: int
    gpus_an_engine_off: int
    on_policy_s: float
    one_off_s: float
    half_s: float | None
    """On-policy with half of the GPUs."""
    scale: int
    """Engines and samples are simulated as one of so many alike parts."""


PAIRS: Final = (
    Pair("Qwen3-30B-A3B, 32 H100", QWEN3_30B, "H100", 32, 2048, 4096, 3203, 2, 2, 192, 152, None, 8),
    Pair("Qwen3-235B-A22B, 256 H100", QWEN3_235B, "H100", 256, 512, 8192, 5713, 16, 8, 312, 231, 395, 4),
    Pair("DeepSeek-V3, 512 H100", DEEPSEEK_V3, "H100", 512, 512, 1536, 697, 32, 32, 111, 64.1, 134, 4),
    Pair("DeepSeek-V3, 256 GB200", DEEPSEEK_V3, "GB200", 256, 512, 1536, 700, 32, 16, 98.7, 61.7, 108, 4),
    Pair("Qwen3-235B-A22B, 128 GB200", QWEN3_235B, "GB200", 128, 512, 8192, 5693, 8, 8, 345, 278, 286, 4),
    Pair("Qwen3-30B-A3B, 16 GB200", QWEN3_30B, "GB200", 16, 2048, 4096, 3199, 1, 1, 221, 301, None, 8),
)


class Predicted(NamedTuple):
    """Seconds a step, and what they are made of."""

    one_off_s: float
    generation_s: float
    """On-policy, on all GPUs."""
    training_s: float
    """One step off, on half of them."""


def setting(pair: Pair, num_gpus: int, gpus_an_engine: int, bandwidth_share: float) -> Setting:
    """Generation on so many GPUs, on-policy and without training."""
    engines = num_gpus // gpus_an_engine
    scale = min(pair.scale, engines)
    read = HBM[pair.gpu] * gpus_an_engine * bandwidth_share
    limit, mean = pair.limit - PROMPT_TOKENS, pair.mean - PROMPT_TOKENS
    return Setting(
        engines=engines // scale, group_size=8, groups_per_batch=pair.num_samples // scale // 8,
        median=_median(mean, limit), sigma=SIGMA, longest=limit,
        token_s=pair.model.read_bytes(pair.num_samples / engines) / read,
        context_token_s=pair.model.context_bytes / read, num_steps=10,
    )  # fmt: skip


def predicted(pair: Pair, seed: int, bandwidth_share: float = BANDWIDTH_SHARE) -> Predicted:
    """The step of the run one step off; nothing of its time is used."""
    half = pair.num_gpus // 2
    generation_s = setting(pair, pair.num_gpus, pair.gpus_an_engine, bandwidth_share).step_time_s(seed)
    if pair.half_s is None:
        training_s = 2 * (pair.on_policy_s - generation_s)
    else:
        training_s = pair.half_s - setting(pair, half, pair.gpus_an_engine, bandwidth_share).step_time_s(seed)
    run = setting(pair, half, pair.gpus_an_engine_off, bandwidth_share)._replace(
        step_s=max(1e-6, training_s), policy="fully_async", max_staleness=1, num_steps=14
    )
    return Predicted(run.step_time_s(seed), generation_s, training_s)


def _median(mean: float, limit: float) -> float:
    low, high = mean / 4, limit * 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_of_cut(middle, SIGMA, limit) < mean else (low, middle)
    return (low + high) / 2
