"""A run that never was: steps with known physics, and the files that each system would write of it."""

from __future__ import annotations

import csv
import json
import random
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TOKEN_S: Final = 0.012
TOKEN_LOAD_S: Final = 0.00006
PREFILL_S: Final = 0.4
STEP_S: Final = 6.0
TRAIN_TOKEN_S: Final = 0.0002
PUBLISH_S: Final = 1.5
PROMPT_TOKENS: Final = 120
ENGINES: Final = 4


class Made(NamedTuple):
    """A step."""

    number: int
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def generation_s(self) -> float:
        """As long as the last of all responses, on engines that have as many tokens each."""
        longest = max(self.lengths)
        return PREFILL_S + longest * TOKEN_S + (sum(self.lengths) / ENGINES - longest) * TOKEN_LOAD_S

    @property
    def training_s(self) -> float:
        return STEP_S + sum(self.lengths) * TRAIN_TOKEN_S

    @property
    def step_s(self) -> float:
        return self.generation_s + self.training_s + PUBLISH_S


def run(num_steps: int = 24, num_samples: int = 256, *, seed: int = 7, limit: int = 4096) -> list[Made]:
    """Lengths are log-normal, and cut off."""
    chance = random.Random(seed)

    def length() -> int:
        return min(limit, max(1, round(chance.lognormvariate(6.2, 0.7))))

    return [Made(number, tuple(length() for _ in range(num_samples))) for number in range(1, num_steps + 1)]


def verl(step: Made) -> dict[str, float]:
    """Of the synchronous trainer."""
    size = len(step.lengths)
    return {
        "critic/score/mean": 0.5, "response_length/mean": step.mean, "response_length/max": float(max(step.lengths)),
        "response_length/min": float(min(step.lengths)), "response_length/clip_ratio": 0.0,
        "prompt_length/mean": float(PROMPT_TOKENS), "timing_s/gen": step.generation_s,
        "timing_s/old_log_prob": 0.3 * step.training_s, "timing_s/update_actor": 0.7 * step.training_s,
        "timing_s/update_weights": PUBLISH_S, "timing_s/step": step.step_s, "training/global_step": float(step.number),
        "perf/total_num_tokens": float(sum(step.lengths) + PROMPT_TOKENS * size), "perf/time_per_step": step.step_s,
    }  # fmt: skip


def slime_rollout(step: Made) -> dict[str, float]:
    """Of the rollout manager."""
    return {
        "rollout/response_len/mean": step.mean, "rollout/response_len/max": float(max(step.lengths)),
        "rollout/truncated_ratio": 0.0, "perf/rollout_time": step.generation_s,
    }  # fmt: skip


def slime_train(step: Made, *, step_s: float | None = None) -> dict[str, float]:
    """Of the trainer."""
    step_s = step.step_s if step_s is None else step_s
    return {
        "perf/update_weights_time": PUBLISH_S, "perf/actor_train_time": 0.8 * step.training_s,
        "perf/train_time": step.training_s, "perf/train_wait_time": step_s - step.training_s, "perf/step_time": step_s,
    }  # fmt: skip


def trl(step: Made) -> dict[str, float]:
    """What ``log`` of GRPOTrainer is given."""
    return {
        "loss": 0.01, "completions/mean_length": step.mean, "completions/max_length": float(max(step.lengths)),
        "completions/clipped_ratio": 0.0, "reward": 0.5, "frac_reward_zero_std": 0.25, "step_time": step.step_s,
    }  # fmt: skip


def nemo(step: Made) -> dict[str, float]:
    """Of the synchronous loop."""
    return {
        "train/mean_gen_tokens_per_sample": step.mean, "train/max_gen_tokens_per_sample": float(max(step.lengths)),
        "train/mean_prompt_length": float(PROMPT_TOKENS), "train/reward": 0.5, "train/truncation_rate": 0.0,
        "train/total_num_tokens": float(sum(step.lengths) + PROMPT_TOKENS * len(step.lengths)),
        "timing/train/total_step_time": step.step_s, "timing/train/generation": step.generation_s,
        "timing/train/policy_and_reference_logprobs": 0.2 * step.training_s,
        "timing/train/policy_training": 0.8 * step.training_s, "timing/train/prepare_for_generation/total": PUBLISH_S,
    }  # fmt: skip


def write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Comma-separated, with a column for every name."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(rows)
    return path
