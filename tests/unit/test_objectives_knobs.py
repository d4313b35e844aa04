"""Keys of an objective that change nothing are refused by name, whichever they are."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backends.learners.objectives.knobs import BOUNDS, TRIED
from penstock.backends.learners.objectives.open import open_objective
from penstock.backends.learners.objectives.spec import OBJECTIVES, objective
from penstock.backends.learners.options import ObjectiveOptions
from penstock.messages.errors import UserFault

RECOMPUTED = {"old_logprobs": "recompute"}


@pytest.mark.parametrize(
    ("keys", "dead"),
    [
        ({"name": "grpo", "tis_clip": 3.0}, "tis_clip"),
        ({"name": "rloo", "constant_tokens": 64, "normalize_std": False}, "normalize_std"),
        ({"name": "grpo", "kl_estimator": "k2"}, "kl_estimator"),
        ({"name": "grpo", "kl_in": "reward"}, "kl_in"),
        ({"name": "dppo", "policy_loss": "cispo", "clip_low": 5e-1, "kl_estimator": "k2"}, "kl_estimator"),
        ({"name": "grpo", **RECOMPUTED, "correction": "mis", "mis": {"reject_upper": 1.5}}, "mis.reject_upper"),
        ({"name": "grpo", "old_logprobs": "interpolate", "correction": "icepop", "tis_clip": 5.0}, "tis_clip"),
        ({"name": "maxrl", "constant_tokens": 64, "normalize_std": False}, "normalize_std"),
        ({"name": "ppo", "critic_lambda": 1.0}, "critic_lambda"),
        ({"name": "sft", "dpo_pairs": "best_worst", "normalize_std": False}, "normalize_std"),
    ],
)
def test_a_key_that_moves_nothing_is_refused_by_its_name(keys: dict[str, Any], dead: str) -> None:
    with pytest.raises(UserFault, match=rf"learner\.objective\.{dead}: changes neither the loss nor its gradient"):
        open_objective(objective(**keys))


LIVE: list[dict[str, Any]] = [
    {"name": "grpo", "clip_low": 0.3, "clip_high": 0.25, "normalize_std": False, "dual_clip": 3.0, "whiten": True},
    {"name": "grpo", "kl_coef": 0.1, "kl_estimator": "k2", "unbiased_kl": True, "entropy_coef": 0.01},
    {"name": "grpo", "reduction": "token_mean", "opsm_delta": 0.3, "opd_kl_coef": 0.2},
    {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "low_var_kl", "constant_tokens": 90},
    {"name": "grpo", **RECOMPUTED, "tis_clip": 3.0, "tis_clip_low": 0.2},
    {"name": "grpo", **RECOMPUTED, "tis_clip": 1000.0},
    {"name": "grpo", **RECOMPUTED, "correction": "icepop", "icepop_low": 0.7, "icepop_high": 1.4},
    {
        "name": "grpo", **RECOMPUTED, "correction": "mis",
        "mis": {
            "level": "sequence", "mode": "clip", "upper": 3.0, "lower": 0.2, "normalize": True,
            "reject_level": "geometric", "reject_upper": 1.1, "reject_lower": 0.7,
        },
    },
    {"name": "grpo", **RECOMPUTED, "correction": "mis", "mis": {"veto": 1e-4}},
    {"name": "dppo", "clip_low": 0.3, "clip_high": 0.1, "max_ratio": 30.0},
    {"name": "dppo", "policy_loss": "dppo_kl", "clip_low": 0.05, "clip_high": 0.05, "max_ratio": 10.0},
    {"name": "gspo", "clip_low": 1e-3, "clip_high": 1e-3},
    {"name": "cispo", "clip_low": 0.8, "clip_high": 3.0},
    {"name": "ppo", "discount": 0.9, "gae_lambda": 0.8, "whiten": True, "kl_coef": 0.1},
    {"name": "reinforce_plus_plus", "discount": 0.9, "kl_coef": 0.1, "kl_estimator": "k3"},
    {"name": "reward_weighted", "reward_scale": 2.0, "max_weight": 5.0},
    {"name": "dpo", "dpo_beta": 0.3, "dpo_label_smoothing": 0.1, "dpo_pairs": "all"},
    {"name": "ipo", "dpo_beta": 0.3, "dpo_normalize_length": True, "dpo_pairs": "all"},
    {"name": "ln_dpo", "dpo_beta": 2.0, "dpo_loss": "ipo"},
    {"name": "kto", "dpo_beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 0.5},
    {"name": "distill", "opd_kl_coef": 0.5},
    {"name": "sapo", "tau_pos": 0.5, "tau_neg": 2.0, "behaviour_kl_coef": 0.1},
    {"name": "gmpo", "clip_low": 0.3, "clip_high": 0.5},
    {"name": "maxrl", "whiten": True},
    {"name": "gdpo", "component_weights": {"a": 1.0, "b": 2.0}, "normalize_std": False, "whiten": True},
    {"name": "vapo", "gae_length_alpha": 0.1, "critic_lambda": 0.9, "discount": 0.9},
    {"name": "gkd", "distill_beta": 1.0, "kl_coef": 0.1},
]  # fmt: skip


def needed(name: str) -> dict[str, Any]:
    """What a scenario gives a preset."""
    options = objective(name)
    constant: dict[str, Any] = {"constant_tokens": 64} if options.reduction == "constant" else {}
    return constant | ({"component_weights": {"a": 1.0, "b": 0.5}} if options.estimator == "gdpo" else {})


@pytest.mark.parametrize("keys", LIVE, ids=lambda keys: str(keys["name"]))
def test_a_key_that_moves_something_is_not(keys: dict[str, Any]) -> None:
    open_objective(objective(**{**needed(keys["name"]), **keys}))


@pytest.mark.parametrize("name", sorted(OBJECTIVES.builtin))
def test_no_preset_has_a_dead_key(name: str) -> None:
    open_objective(objective(name, **needed(name)))


def test_bounds_at_rest_are_left_to_the_next_step() -> None:
    for keys in ({"clip_high": 0.28}, {"clip_low": 0.1}, {"dual_clip": 3.0}):
        open_objective(objective("grpo", **keys, **RECOMPUTED))
    assert set(BOUNDS) < set(TRIED) <= set(ObjectiveOptions.__struct_fields__)
