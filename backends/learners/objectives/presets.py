"""Objectives by name: what one word stands for.

Invariants:

* A preset is plain data: keys of ``learner.objective`` that differ from the defaults of the block. What a scenario
  says itself goes over it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.backends.learners.options import ObjectiveOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

_OF_PAIRS: Final[Mapping[str, Any]] = {"estimator": "uniform", "policy_loss": "dpo", "correction": "none"}
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "grpo": {"clip_high": 0.2, "reduction": "sequence_mean"},
    "dapo": {},
    "dr_grpo": {"clip_high": 0.2, "normalize_std": False, "reduction": "constant"},
    "gspo": {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean"},
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"estimator": "rloo", "clip_high": 0.2, "reduction": "constant"},
    "ppo": {"estimator": "gae", "critic": "own", "clip_high": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_plus_plus": {
        "estimator": "reinforce_plus_plus", "whiten": True, "clip_high": 0.2, "kl_in": "reward", "kl_estimator": "k1",
    },
    "reinforce_plus_plus_baseline": {
        "estimator": "reinforce_plus_plus_baseline", "whiten": True, "clip_high": 0.2, "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "gmpo": {"policy_loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "reduction": "sequence_mean"},
    "sapo": {"policy_loss": "sapo", "reduction": "sequence_mean"},
    "maxrl": {"estimator": "maxrl", "clip_high": 0.2, "reduction": "constant"},
    "gdpo": {"estimator": "gdpo", "clip_high": 0.2, "reduction": "sequence_mean"},
    "vapo": {"estimator": "gae", "critic": "own", "gae_length_alpha": 0.05, "critic_lambda": 1.0},
    "dppo": {"policy_loss": "dppo_tv", "clip_high": 0.2},
    "sft": {"estimator": "uniform", "policy_loss": "likelihood", "correction": "none"},
    "rejection_sampling": {"estimator": "best_of_group", "policy_loss": "likelihood", "correction": "none"},
    "reward_weighted": {"estimator": "exponential", "policy_loss": "likelihood", "correction": "none"},
    "dpo": _OF_PAIRS,
    "ln_dpo": {**_OF_PAIRS, "dpo_normalize_length": True, "dpo_beta": 5.0},
    "ipo": {**_OF_PAIRS, "dpo_loss": "ipo"},
    "kto": {"estimator": "uniform", "policy_loss": "kto", "correction": "none", "min_reward": 0.5},
    "gkd": {"estimator": "uniform", "policy_loss": "divergence", "correction": "none"},
    "distill": {"estimator": "teacher", "opd_kl_coef": 1.0, "clip_high": 0.2},
}  # fmt: skip
"""Sources in ``docs/objectives.md``. Without an entry here a key has the default of the block."""


def objective(name: str, **keys: object) -> ObjectiveOptions:
    """The options that ``learner.objective: {name: NAME, KEY: VALUE, …}`` means; a function of the user's own starts
    from the defaults of the block.

    Raises:
        msgspec.ValidationError: a key that does not exist, or a value that it cannot have.
    """
    return msgspec.convert({"name": name, **PRESETS.get(name, {}), **keys}, ObjectiveOptions)
