"""Which reported figures share a chart of the report."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.runtime.observability.figures import MAX_STALENESS, REWARD, REWARD_COMPONENT, REWARD_STD


class Plan(NamedTuple):
    """Reported figures that share a chart; a name that ends in ``*`` stands for all that begin so."""

    title: str
    names: tuple[str, ...]
    note: str
    y_label: str = ""
    from_zero: bool = False
    missing: float | None = None
    """Value of a figure that a step does not report."""


LEARNING: Final = (
    Plan("Components of the reward", (f"{REWARD_COMPONENT}*",), "What the reward function names beside the reward."),
    Plan("pass@k", ("passrate/*",), "Chance that one of k samples of a prompt earns exactly 1, of the trained groups."),
    Plan(
        "Ends of responses",
        ("rollout/truncated_ratio", "rollout/repetition_frac"),
        "Shares of the trained ones.",
        "",
        True,
    ),
    Plan(
        "Groups without spread",
        ("rollout/zero_std/*",),
        "Trained groups whose samples all earned so much.",
        "",
        True,
        0.0,
    ),
    Plan("Sources of prompts", ("data/*",), "Prompts that were taken so far.", "", True),
)
OBJECTIVE: Final = (
    Plan(
        "Loss",
        ("train/loss", "train/pg_loss", "train/sft_loss", "train/nll", "train/value_loss"),
        "The loss, and its parts before their coefficients.",
    ),
    Plan(
        "KL divergence",
        ("train/kl_loss", "train/kl_reward", "train/ppo_kl", "train/train_rollout_kl", "train/opd_reverse_kl"),
        "To the reference (kl_loss, kl_reward), to the policy before the updates (ppo_kl), to the engine that sampled "
        "(train_rollout_kl), to the teacher (opd_reverse_kl).",
        "nats a token",
    ),
    Plan("Entropy", ("train/entropy_loss",), "Of the policy, a mean over the trained tokens.", "nats a token", True),
    Plan("Gradient norm", ("train/grad_norm*", "train/critic-grad_norm"), "Before clipping.", "", True),
    Plan(
        "Clip fraction",
        ("train/pg_clipfrac", "train/tis_clipfrac", "train/opsm_clipfrac", "train/value_clipfrac"),
        "Share of the tokens where a bound decided.",
        from_zero=True,
    ),
    Plan("Learning rate", ("train/lr*", "train/critic-lr*"), "At the end of the step.", "", True),
    Plan("Preferences", ("train/dpo_accuracy", "train/dpo_margin"), "Pairs told apart, and by how much."),
    Plan("Rewards of pairs", ("train/dpo_chosen_reward", "train/dpo_rejected_reward"), "β · (log π − log π_ref)."),
    Plan("Critic", ("train/critic-explained_variance",), "Share of the returns' variance that the values explain."),
    Plan("Balance of experts", ("train/moe_*",), "Auxiliary losses without their coefficients."),
)
AGREEMENT: Final = (
    Plan(
        "Training against inference",
        ("train/train_rollout_logprob_abs_diff", "train/fresh_logprob_abs_diff", "train/mixed_logprob_abs_diff"),
        "Log-probability of the sampled tokens, learner against engine: of all, where older weights count into it; of "
        "samples that the trained weights made (fresh); of samples that older weights began (mixed).",
        "mean |difference| in nats",
        True,
    ),
    Plan("Effective sample size", ("train/ess_ratio",), "(Σw)² / (n Σw²) of w = exp(learner − engine).", "", True),
    Plan("Importance weights", ("train/ois", "train/tis"), "exp(new − old); exp(old − engine) before its bound."),
)
SPEED: Final = (
    Plan(
        "Time of a step",
        ("perf/step_time", "perf/train_time", "perf/train_wait_time"),
        "From the end of the training before; of it training; of it without anything to do.",
        "seconds",
        True,
    ),
    Plan(
        "Work that engines were spared",
        ("rollout/prefix_cache_hit_rate", "rollout/spec_accept_rate"),
        "Of the tokens that they read, those that were in their prefix cache; of the drafted ones, those that were "
        "kept. Of the trained samples, where engines tell it.",
        "",
        True,
    ),
    Plan("Use of the device", ("perf/mfu",), "Operations of the learner as a share of the device's peak.", "", True),
)
SHOWN_OTHERWISE: Final = (
    *(REWARD, REWARD_STD, "rollout/response_len/*", "buffer/staleness_*", MAX_STALENESS, "train/global_batch_size"),
)
"""Figures that are in charts of their own."""
PLANS: Final = LEARNING + OBJECTIVE + AGREEMENT + SPEED


def matches(name: str, pattern: str) -> bool:
    """Whether a figure is meant by a name of a plan."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def short_name(name: str, plan: Plan) -> str:
    """What a figure is called in the chart of its plan: without the part that all of them share."""
    return name.removeprefix(plan.names[0].rpartition("/")[0] + "/")
