"""Which objectives make no sense, and why: the key to change, and one sentence with the remedy.

A key counts as given where it differs from what the preset of that name says.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from penstock.backends.learners.objectives.advantage_rules import advantage_rules
from penstock.backends.learners.objectives.correction_rules import correction_problems
from penstock.backends.learners.objectives.presets import PRESETS, objective
from penstock.backends.learners.options import ObjectiveOptions
from penstock.messages.option_keys import is_user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Problem = tuple[str, str]
IMITATION = "sft"
"""The objective that imitates what rows hold, and reads no reward."""
LIKELIHOODS = ("likelihood", "divergence", "dpo", "kto")
"""Losses of a token that take no ratio to whatever drew it."""
WEIGHTINGS = ("uniform", "best_of_group", "threshold", "exponential")
"""Estimators that give weights of a likelihood, not advantages: never negative."""
GROUPED = ("grpo", "maxrl", "gdpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the samples of a group."""
ABSOLUTE = ("gae", "reinforce_plus_plus")
"""Estimators that compare a reward with what is expected of the prompt, or with the whole batch."""


def is_user_objective(name: str) -> bool:
    """Whether it is a function of the user's own, ``file.py:function``."""
    return is_user_code(name)


def needs_rollout_logprobs(options: ObjectiveOptions) -> bool:
    """Whether the loss compares the policy with whatever drew a response. A function of the user's own is believed to
    know what it is given."""
    return not is_user_objective(options.name) and options.policy_loss not in LIKELIHOODS


def needs_reference(options: ObjectiveOptions) -> bool:
    """Whether the policy as it was before the first step is asked."""
    return options.kl_coef != 0.0 or judges_responses(options)


def prefers_pairs(options: ObjectiveOptions) -> bool:
    """Whether the loss is one of pairs of responses."""
    return options.policy_loss == "dpo" and not is_user_objective(options.name)


def needs_teacher_top(options: ObjectiveOptions) -> bool:
    """Whether the loss is the distance to a teacher's distribution."""
    return options.policy_loss == "divergence" and not is_user_objective(options.name)


def judges_responses(options: ObjectiveOptions) -> bool:
    """Whether the loss is one of whole responses, in pairs or each alone: a mean over these, and not over tokens."""
    return options.policy_loss in ("dpo", "kto") and not is_user_objective(options.name)


def needs_reference_point(options: ObjectiveOptions) -> bool:
    """Whether the loss compares responses with the KL to the reference."""
    return options.policy_loss == "kto" and not is_user_objective(options.name)


def compares_rewards(options: ObjectiveOptions) -> bool:
    """Whether the samples of a group are compared with each other, so that a group of one teaches nothing and a group
    has to stay whole."""
    return (
        prefers_pairs(options)
        or options.advantage_function is not None
        or options.estimator in (*GROUPED, "best_of_group", "exponential")
    )


def ignores_spread(options: ObjectiveOptions) -> bool:
    """Whether a group whose rewards are all equal is trained like any other."""
    return options.estimator in (*WEIGHTINGS, "teacher") and not prefers_pairs(options) and options.name != IMITATION


def learns_from_equals(options: ObjectiveOptions) -> bool:
    """Whether there may be something to learn from a group whose rewards are all equal: from how they compare with
    those of other groups, from a teacher, or by what functions of the user's make of them."""
    return not prefers_pairs(options) and (
        ignores_spread(options)
        or options.estimator in (*ABSOLUTE, "gdpo")  # equal sums of different components
        or options.opd_kl_coef != 0.0
        or options.advantage_function is not None
        or options.postprocess_function is not None
    )


def is_unbounded(options: ObjectiveOptions, *, num_steps: int = 1) -> bool:
    """Whether tokens of older policies are trained as if the policy had just drawn them: no ratio to whatever drew them
    is bounded, and none weighs them. Weights of a likelihood are imitation, which asks for no such thing.

    Args:
        options: the ``learner.objective:`` block.
        num_steps: optimizer steps a batch.
    """
    if is_user_objective(options.name) or options.estimator in WEIGHTINGS or prefers_pairs(options):
        return False
    if options.policy_loss == "likelihood":
        return True
    is_corrected = options.importance_function is not None or (
        options.correction in ("icepop", "mis") or (options.correction == "tis" and options.tis_clip is not None)
    )
    return options.old_logprobs == "recompute" and num_steps == 1 and not is_corrected and options.opsm_delta is None


def objective_problem(options: ObjectiveOptions, *, num_steps: int = 1) -> Problem | None:
    """The first thing that is wrong with these options: the key, and what to do; None where all is well.

    Args:
        options: the ``learner.objective:`` block.
        num_steps: optimizer steps a batch, ``learner.num_updates · learner.num_passes``.
    """
    found = (problem for rule in _RULES for problem in rule(options))
    return next(found, None) or next(_single_step(options, num_steps), None)


def _names(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.name in PRESETS or is_user_objective(o.name):
        return
    near = difflib.get_close_matches(o.name, PRESETS, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(PRESETS)}, and file.py:function"
    yield "name", f"no objective is called '{o.name}'; {hint}"


def _distillation(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.estimator == "teacher" and not o.opd_kl_coef:
        yield (
            "opd_kl_coef",
            "with estimator: teacher nothing is learnt from rewards, and with 0 here nothing from the teacher; set it "
            "above 0, or another estimator",
        )
    if o.estimator == "teacher" and o.kl_in == "reward" and o.kl_coef:
        yield "kl_in", "estimator: teacher leaves rewards out, and with them a KL in them; set kl_in: loss"
    if o.policy_loss == "divergence" and o.estimator not in WEIGHTINGS:
        yield "estimator", f"a distance to a teacher is made smaller, and {o.estimator} may make it larger; set uniform"
    if o.distill_beta != ObjectiveOptions().distill_beta and o.policy_loss != "divergence":
        yield (
            "distill_beta",
            f"has no effect with policy_loss: {o.policy_loss}; remove it, or set policy_loss: divergence",
        )
    if o.opd_kl_coef and o.policy_loss in LIKELIHOODS:
        yield (
            "opd_kl_coef",
            f"is taken off advantages, and policy_loss: {o.policy_loss} has none; remove it, or set policy_loss: ppo",
        )


def _policy_loss(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.dual_clip is not None and o.policy_loss not in ("ppo", "gspo"):
        yield "dual_clip", f"bounds a clipped loss, and policy_loss: {o.policy_loss} is none; remove it"
    if o.dual_clip is not None and o.dual_clip <= 1.0 + o.clip_high:
        yield (
            "dual_clip",
            f"must be above 1 + clip_high = {1.0 + o.clip_high:g}, or it cuts off what the clip leaves; "
            f"found {o.dual_clip:g}",
        )
    if o.max_ratio != ObjectiveOptions().max_ratio and not _is_masked(o):
        yield "max_ratio", f"bounds the ratio of DPPO, and policy_loss: {o.policy_loss} is not; remove it"
    if o.policy_loss in ("ppo", "gspo", "gmpo") and o.clip_low == o.clip_high == 0.0:
        yield "clip_high", "with clip_low and clip_high of 0 no token that has moved is trained; set one above 0"
    usual = objective(o.name) if o.name in PRESETS else ObjectiveOptions()
    is_gated = o.policy_loss == "sapo"
    for key in ("clip_low", "clip_high") if is_gated else ("tau_pos", "tau_neg"):
        if getattr(o, key) != getattr(usual, key) and not is_user_objective(o.name):
            advice = "set tau_pos and tau_neg" if is_gated else "set policy_loss: sapo"
            yield key, f"has no effect with policy_loss: {o.policy_loss}; remove it, or {advice}"


def _single_step(o: ObjectiveOptions, num_steps: int) -> Iterator[Problem]:
    # In the only optimiser step of a batch the policy that opened it is the one that is trained.
    if num_steps == 1 and o.old_logprobs == "recompute" and _is_masked(o):
        yield (
            "policy_loss",
            "has no effect with old_logprobs: recompute and one optimizer step a batch, as the policy has not moved "
            "from itself; set old_logprobs: engine or interpolate, or learner.num_updates above 1",
        )


def _is_masked(o: ObjectiveOptions) -> bool:
    return o.policy_loss.startswith("dppo")


def _weightings(o: ObjectiveOptions) -> Iterator[Problem]:
    if is_user_objective(o.name):
        return
    if o.estimator in WEIGHTINGS and o.policy_loss not in LIKELIHOODS:
        yield (
            "estimator",
            f"{o.estimator} gives weights of a likelihood, and policy_loss: {o.policy_loss} wants advantages; set "
            "policy_loss: likelihood, or another estimator",
        )
    if o.estimator in WEIGHTINGS and o.opd_kl_coef:
        yield "opd_kl_coef", f"a teacher corrects advantages, and estimator: {o.estimator} gives none; set it to 0"
    if o.estimator in WEIGHTINGS and o.whiten:
        yield "whiten", f"a weight of a likelihood is not negative, and {o.estimator} gives such; set whiten: false"
    if o.estimator == "threshold" and o.min_reward is None:
        yield "min_reward", "estimator: threshold needs it: the reward from which on a response is imitated"
    if o.min_reward is None and o.policy_loss == "kto":
        yield "min_reward", "policy_loss: kto needs it: the reward from which on a response is desirable"
    if o.min_reward is not None and o.estimator not in ("best_of_group", "threshold") and o.policy_loss != "kto":
        yield (
            "min_reward",
            f"has no effect with estimator: {o.estimator}; remove it, or set best_of_group or threshold",
        )
    usual = ObjectiveOptions()
    for key, value in (("reward_scale", "exponential"), ("max_weight", "exponential")):
        if o.estimator != value and getattr(o, key) != getattr(usual, key):
            yield key, f"has no effect with estimator: {o.estimator}; remove it, or set estimator: {value}"
    if o.name == IMITATION and (o.estimator, o.policy_loss) != ("uniform", "likelihood"):
        key = "estimator" if o.estimator != "uniform" else "policy_loss"
        yield key, f"{IMITATION} weighs every token alike and reads no reward; remove it, or take rejection_sampling"
    if o.name == IMITATION and o.sft_coef != usual.sft_coef:
        yield "sft_coef", "weighs imitation beside an objective, and there is none beside it; remove it"


def _likelihood(o: ObjectiveOptions) -> Iterator[Problem]:
    if is_user_objective(o.name) or o.policy_loss not in LIKELIHOODS:
        return
    usual = objective(o.name) if o.name in PRESETS else ObjectiveOptions()
    without: list[tuple[str, object]] = [("old_logprobs", "engine"), ("opsm_delta", None), ("unbiased_kl", False)]
    without += [("behaviour_kl_coef", 0.0)]
    without += [("clip_low", usual.clip_low), ("clip_high", usual.clip_high)]
    for key, value in without:
        if getattr(o, key) != value:
            yield (
                key,
                f"has no effect with policy_loss: {o.policy_loss}, which takes no ratio to an older policy; remove it",
            )
    if o.kl_in == "reward" and o.kl_coef and o.estimator in WEIGHTINGS:
        yield "kl_in", f"estimator: {o.estimator} gives weights of a likelihood, not rewards; set kl_in: loss"


def _pairs(o: ObjectiveOptions) -> Iterator[Problem]:
    usual = ObjectiveOptions()
    without = {
        "dpo": ("desirable_weight", "undesirable_weight"),
        "kto": ("dpo_label_smoothing", "dpo_pairs", "dpo_loss", "dpo_normalize_length"),
    }
    others = without.get(o.policy_loss, (*without["dpo"], *without["kto"], "dpo_beta"))
    for key in others:
        if getattr(o, key) != getattr(usual, key):
            name = "kto" if key in without["dpo"] else "dpo"
            yield key, f"has no effect with policy_loss: {o.policy_loss}; remove it, or set learner.objective: {name}"
    if not judges_responses(o):
        return
    if o.dpo_loss == "ipo" and o.dpo_label_smoothing:
        yield "dpo_label_smoothing", "smooths the labels of dpo_loss: sigmoid, which ipo is not; set it to 0"
    if o.estimator != "uniform":
        yield "estimator", f"{o.name} reads from rewards which response is better, and nothing else; set it to uniform"
    for key, advice in (
        ("kl_coef", "dpo_beta holds the policy to the reference already; set it to 0"),
        ("entropy_coef", f"{o.name} has no such term; set it to 0"),
    ):
        if getattr(o, key):
            yield key, advice
    if o.reduction != usual.reduction:
        yield "reduction", "has no effect on a mean over whole responses; remove it"


def _kl(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.reference_every is not None and not needs_reference(o):
        yield "reference_every", "has no effect with kl_coef: 0, which needs no reference; remove it, or set kl_coef"
    if is_user_objective(o.name):
        return
    is_normalized = o.estimator in ("grpo", "maxrl", "gdpo") and o.advantage_function is None
    if o.kl_in == "reward" and o.kl_coef and is_normalized:
        yield (
            "kl_in",
            f"estimator: {o.estimator} normalizes rewards within a group, and a KL in them would be normalized too; "
            "set kl_in: loss, or estimator: rloo",
        )
    if o.kl_in == "loss" and o.kl_estimator == "k1" and o.kl_coef and not o.unbiased_kl:
        yield (
            "kl_estimator",
            "k1 in the loss has an expected gradient of 0 and pulls nowhere; set kl_estimator: k2 or k3, "
            "unbiased_kl: true, or kl_in: reward",
        )
    if o.unbiased_kl and (o.kl_in == "reward" or not o.kl_coef):
        found = "kl_in: reward, where no gradient flows" if o.kl_in == "reward" else "kl_coef: 0"
        yield "unbiased_kl", f"has no effect with {found}; set it to false"


def _functions(o: ObjectiveOptions) -> Iterator[Problem]:
    """Functions of the user's own in place of parts of the objective."""
    if o.advantage_function is not None and (judges_responses(o) or o.name == IMITATION):
        yield "advantage_function", f"has no effect with {o.name}, which reads no advantages; remove it"
    if o.reduction_function is not None and judges_responses(o):
        yield "reduction_function", "has no effect on a mean over whole responses; remove it"
    if o.importance_function is None:
        return
    if is_user_objective(o.name) or o.policy_loss in LIKELIHOODS:
        whose = "your own loss" if is_user_objective(o.name) else f"policy_loss: {o.policy_loss}"
        yield "importance_function", f"has no effect with {whose}, which has no such weights; remove it"
    if o.old_logprobs == "engine":
        yield (
            "importance_function",
            "has no effect with old_logprobs: engine, where the ratio is taken to the engine's log-probs already; set "
            "old_logprobs: recompute or interpolate",
        )
    if o.correction in ("icepop", "mis"):
        yield "importance_function", f"takes the place of correction: {o.correction}; remove one of the two"


_RULES: tuple[Callable[[ObjectiveOptions], Iterator[Problem]], ...] = (
    _names,
    _functions,
    _weightings,
    _likelihood,
    _pairs,
    advantage_rules,
    _distillation,
    _policy_loss,
    _kl,
    correction_problems,
)
