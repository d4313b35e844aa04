"""Hooks for tests: some do what Penstock does itself, so that what comes of them can be compared; some are wrong."""

# Tensor.tolist is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backends.learners.hooks.protocols import ImportanceWeights
from penstock.backends.learners.objectives.protocol import ObjectiveTerms

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.hooks.protocols import (
        AdvantageInput,
        ConversionInput,
        GroupRewards,
        ImportanceInput,
        ReductionInput,
        RolloutLog,
        StepLog,
    )
    from penstock.backends.learners.objectives.protocol import PolicyTokens
    from penstock.backends.learners.options import ObjectiveOptions

# --- as Penstock itself -----------------------------------------------------------------------------------------------


def group_advantages(given: AdvantageInput, options: ObjectiveOptions) -> Tensor:
    found = torch.zeros_like(given.rewards)
    for group in set(given.group_ids.tolist()):
        own = given.group_ids == group
        rewards = given.rewards[own]
        found[own] = (rewards - rewards.mean()) / (rewards.std() + 1e-6) if len(rewards) > 1 else 0.0
    return given.samples.spread(found)


def less_the_values(given: AdvantageInput, options: ObjectiveOptions) -> Tensor:
    assert given.values is not None
    return given.samples.spread(given.rewards) - given.values.double()


def mean_over_samples(given: ReductionInput, options: ObjectiveOptions) -> Tensor:
    return 1.0 / (given.tokens_per_sample.clamp(min=1) * len(given.tokens_per_sample))


def truncated(given: ImportanceInput, options: ObjectiveOptions) -> ImportanceWeights:
    weights = (given.old_logprobs - given.rollout_logprobs).exp()
    return ImportanceWeights(weights.clamp(max=2.0), {"train/my_weight": weights})


def truncated_alone(given: ImportanceInput, options: ObjectiveOptions) -> Tensor:
    return truncated(given, options).weights


def same_rewards(given: GroupRewards) -> list[float]:
    return list(given.rewards)


def same_sequence(given: ConversionInput) -> TrainSequence:
    return given.sequence


def policy_gradient(tokens: PolicyTokens, options: ObjectiveOptions) -> ObjectiveTerms:
    loss = (tokens.weights * -tokens.advantages * tokens.logprobs).sum()
    return ObjectiveTerms(loss, {"train/mean_advantage": tokens.advantages.mean()})


# --- with an effect of their own --------------------------------------------------------------------------------------


def doubled_rewards(given: GroupRewards) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return 2.0 * np.asarray(given.rewards)


def without_last_token(given: ConversionInput) -> TrainSequence | None:
    own = given.sequence
    if len(own.trained) < 2:
        return None
    return own._replace(
        tokens=own.tokens[: own.trained[-2] + 1],
        trained=own.trained[:-1],
        rollout_logprobs=own.rollout_logprobs[:-1],
        positions=own.positions[:-1],
        versions=own.versions[:-1],
    )


def num_groups(given: RolloutLog) -> dict[str, float]:
    return {"rollout/num_groups": len(given.groups), "rollout/twice": 2 * given.figures["rollout/raw_reward"]}


def step_speed(given: StepLog) -> dict[str, float]:
    assert given.step_time_s > 0
    return {"train/version_seen": given.version, "train/half_loss": given.figures.get("train/loss", 0.0) / 2}


def silent(given: RolloutLog | StepLog) -> None:
    return None


# --- wrong ------------------------------------------------------------------------------------------------------------


def raising(*given: object) -> Tensor:
    raise KeyError("no such thing")


def exiting(*given: object) -> Tensor:
    sys.exit(3)


def interrupting(*given: object) -> Tensor:
    raise KeyboardInterrupt


def nothing(*given: object) -> None:
    return None


def too_short(*given: object) -> Tensor:
    return torch.zeros(1)


def not_finite(given: AdvantageInput, options: ObjectiveOptions) -> Tensor:
    return given.samples.spread(given.rewards / 0.0)


def whole_numbers(given: AdvantageInput, options: ObjectiveOptions) -> Tensor:
    return torch.zeros(len(given.positions), dtype=torch.int64)


def negative(given: ReductionInput, options: ObjectiveOptions) -> Tensor:
    return -torch.ones_like(given.tokens_per_sample)


def one_reward(given: GroupRewards) -> list[float]:
    return [0.5]


def texts(given: GroupRewards) -> list[str]:
    return ["good" for _ in given.rewards]


def nan_rewards(given: GroupRewards) -> list[float]:
    return [float("nan") for _ in given.rewards]


def other_tokens(given: ConversionInput) -> TrainSequence:
    return given.sequence._replace(tokens=given.sequence.tokens + 1)


def short_arrays(given: ConversionInput) -> TrainSequence:
    return given.sequence._replace(trained=given.sequence.trained[:-1])


def wide_arrays(given: ConversionInput) -> TrainSequence:
    return given.sequence._replace(tokens=given.sequence.tokens.astype(np.float32))


def context_too(given: ConversionInput) -> TrainSequence:
    own = given.sequence
    return own._replace(
        trained=np.concatenate([[1], own.trained]),
        rollout_logprobs=np.concatenate([[0.0], own.rollout_logprobs]).astype(np.float32),
        positions=np.concatenate([[-1], own.positions]),
        versions=np.concatenate([[0], own.versions]),
    )


def known_figure(given: RolloutLog) -> dict[str, float]:
    return {"rollout/raw_reward": 1.0}


def text_figure(given: RolloutLog) -> dict[str, str]:
    return {"rollout/mood": "good"}


def nan_loss(tokens: PolicyTokens, options: ObjectiveOptions) -> ObjectiveTerms:
    return ObjectiveTerms(tokens.logprobs.sum() / 0.0, {})


def drawn(given: AdvantageInput, options: ObjectiveOptions) -> Tensor:
    draw = random.SystemRandom()
    return torch.tensor([draw.random() for _ in given.positions])


def drawn_weights(given: ImportanceInput, options: ObjectiveOptions) -> Tensor:
    draw = random.SystemRandom()
    return torch.tensor([draw.random() for _ in given.logprobs])


def prefixed(name: str) -> str:
    return f"policy.{name}"


def one_name(name: str) -> str:
    return "weight"
