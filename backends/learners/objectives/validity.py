"""Which objectives make no sense, and why: the key to change, and one sentence with the remedy.

A key counts as given where it differs from what the preset of that name says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.objectives.correction_rules import correction_problems
from penstock.backends.learners.objectives.spec import ESTIMATORS, LOSSES, OBJECTIVES, loss_of, objective
from penstock.backends.learners.options import ObjectiveOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.backends.learners.objectives.spec import Problem

_CRITIC_KEYS: Final = ("value_clip", "critic_learning_rate", "critic_warmup_steps", "critic_only_steps")
_CHOICES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "critic": {"none": (), "own": _CRITIC_KEYS, "shared": (*_CRITIC_KEYS, "value_coef")},
    "estimator": {name: spec.keys for name, spec in ESTIMATORS.items()},
    "policy_loss": {name: spec.keys for name, spec in LOSSES.items()},
    "reduction": {"token_mean": (), "sequence_mean": (), "constant": ("constant_tokens",)},
    "correction": {"none": (), "tis": ("tis_clip_low",), "icepop": ("icepop_low", "icepop_high"), "mis": ("mis",)},
}
"""Keys that choose, and of each of their values those keys that take effect with it, and with others that have them."""


def needs_reference(options: ObjectiveOptions) -> bool:
    """Whether the policy as it was before the first step is asked."""
    return options.kl_coef != 0.0 or loss_of(options).needs_reference


def compares_rewards(options: ObjectiveOptions) -> bool:
    """Whether the samples of a group are compared with each other, so that a group of one teaches nothing and a group
    has to stay whole."""
    return (
        loss_of(options).unit == "pair"
        or options.advantage_function is not None
        or ESTIMATORS[options.estimator].compares
    )


def ignores_spread(options: ObjectiveOptions) -> bool:
    """Whether a group whose rewards are all equal is trained like any other."""
    reads_rewards = loss_of(options).unit != "pair" and not OBJECTIVES.spec(options.name).imitates
    return reads_rewards and ESTIMATORS[options.estimator].equals == "usual"


def learns_from_equals(options: ObjectiveOptions) -> bool:
    """Whether there may be something to learn from a group whose rewards are all equal: from how they compare with
    those of other groups, from a teacher, or by what functions of the user's make of them."""
    return loss_of(options).unit != "pair" and (
        ignores_spread(options)
        or ESTIMATORS[options.estimator].equals == "useful"
        or options.opd_kl_coef != 0.0
        or options.advantage_function is not None
        or options.postprocess_function is not None
    )


def weighs_tokens(options: ObjectiveOptions) -> bool:
    """Whether tokens count by how likely the policy finds what an engine has drawn: through a correction, or because
    the ratio itself is taken to the engine's log-probs."""
    has_tis = options.correction == "tis" and options.tis_clip is not None
    is_corrected = options.importance_function is not None or options.correction in ("icepop", "mis") or has_tis
    return is_corrected or options.old_logprobs == "engine"


def is_unbounded(options: ObjectiveOptions, *, num_steps: int = 1) -> bool:
    """Whether tokens of older policies are trained as if the policy had just drawn them: no ratio to whatever drew them
    is bounded, and none weighs them. Weights of a likelihood are imitation, which asks for no such thing.

    Args:
        options: the ``learner.objective:`` block.
        num_steps: optimizer steps a batch.
    """
    loss = loss_of(options)
    if loss.is_function or ESTIMATORS[options.estimator].is_weighting:
        return False
    if not loss.has_ratio:
        return True
    return num_steps == 1 and not weighs_tokens(options) and options.opsm_delta is None


def compares_with_drawn(options: ObjectiveOptions) -> bool:
    """Whether the loss of a token depends on the log-probs under which it was drawn, so that they have to be known."""
    needs = options.importance_function is not None or options.opsm_delta is not None or options.behaviour_kl_coef
    return loss_of(options).has_ratio and (
        bool(needs) or options.old_logprobs != "recompute" or options.correction != "none"
    )


def objective_problem(options: ObjectiveOptions, *, num_steps: int = 1) -> Problem | None:
    """The first thing that is wrong with these options: the key, and what to do; None where all is well.

    Args:
        options: the ``learner.objective:`` block.
        num_steps: optimizer steps a batch, ``learner.num_updates · learner.num_passes``.
    """
    if problem := OBJECTIVES.problem(options.name):
        return "name", problem
    found = (problem for rule in (*_RULES, OBJECTIVES.spec(options.name).rules) for problem in rule(options))
    return next(found, None) or next(_single_step(options, num_steps), None)


def _owned(o: ObjectiveOptions) -> Iterator[Problem]:
    """Keys that have no effect with what other keys choose."""
    choices = {"critic": _CHOICES["critic"]} if loss_of(o).is_function else _CHOICES
    for key in dict.fromkeys(key for table in choices.values() for keys in table.values() for key in keys):
        default = objective(o.name) if key.startswith("clip_") else ObjectiveOptions()
        is_heeded = any(key in table[getattr(o, choice)] for choice, table in choices.items())
        if is_heeded or getattr(o, key) == getattr(default, key):
            continue
        owners = {choice: [name for name in table if key in table[name]] for choice, table in choices.items()}
        remedies = [f"{choice}: {' or '.join(names)}" for choice, names in owners.items() if names]
        choice = remedies[0].partition(":")[0]
        yield key, f"has no effect with {choice}: {getattr(o, choice)}; remove it, or set {', or '.join(remedies)}"


def _advantages(o: ObjectiveOptions) -> Iterator[Problem]:
    """What makes advantages of rewards: estimators, what they take, and the critic."""
    estimator = ESTIMATORS[o.estimator]
    if estimator.whitens and not o.whiten:
        yield "whiten", f"{o.estimator} is defined with whitened advantages; set whiten: true, or estimator: rloo"
    if estimator.components and o.postprocess_function is not None:
        yield (
            "postprocess_function",
            "changes the sum of a reward, and estimator: gdpo reads its components; remove it, or set estimator: grpo",
        )
    if o.component_weights == {}:
        yield "component_weights", "names no component of the reward; add one, or remove it"
    for name, weight in (o.component_weights or {}).items():
        if weight == 0.0 or not math.isfinite(weight):
            yield "component_weights", f"a weight of {weight:g} for '{name}': expected a finite number other than 0"
    if estimator.needs_critic and o.critic == "none":
        yield "critic", "estimator: gae needs the values of a critic; set critic: own or shared, or another estimator"
    if o.critic != "none" and not estimator.needs_critic:
        yield (
            "critic",
            f"{o.critic} has no effect with estimator: {o.estimator}, which needs no values; set critic: none, or "
            "estimator: gae",
        )
    if o.gae_length_alpha is not None and o.gae_lambda != ObjectiveOptions().gae_lambda:
        yield "gae_lambda", "gae_length_alpha takes its place; remove one of the two"


def _distillation(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.estimator == "teacher" and not o.opd_kl_coef:
        yield (
            "opd_kl_coef",
            "with estimator: teacher nothing is learnt from rewards, and with 0 here nothing from the teacher; set it "
            "above 0, or another estimator",
        )
    if o.estimator == "teacher" and o.kl_in == "reward" and o.kl_coef:
        yield "kl_in", "estimator: teacher leaves rewards out, and with them a KL in them; set kl_in: loss"
    if LOSSES[o.policy_loss].needs_teacher_top and not ESTIMATORS[o.estimator].is_weighting:
        yield "estimator", f"a distance to a teacher is made smaller, and {o.estimator} may make it larger; set uniform"
    if o.opd_kl_coef and not LOSSES[o.policy_loss].has_ratio:
        yield (
            "opd_kl_coef",
            f"is taken off advantages, and policy_loss: {o.policy_loss} has none; remove it, or set policy_loss: ppo",
        )


def _policy_loss(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.dual_clip is not None and o.dual_clip <= 1.0 + o.clip_high:
        yield (
            "dual_clip",
            f"must be above 1 + clip_high = {1.0 + o.clip_high:g}, or it cuts off what the clip leaves; "
            f"found {o.dual_clip:g}",
        )
    if o.policy_loss in ("ppo", "gspo", "gmpo") and o.clip_low == o.clip_high == 0.0:
        yield "clip_high", "with clip_low and clip_high of 0 no token that has moved is trained; set one above 0"


def _single_step(o: ObjectiveOptions, num_steps: int) -> Iterator[Problem]:
    # In the only optimiser step of a batch the policy that opened it is the one that is trained.
    if num_steps == 1 and o.old_logprobs == "recompute" and o.policy_loss.startswith("dppo"):
        yield (
            "policy_loss",
            "has no effect with old_logprobs: recompute and one optimizer step a batch, as the policy has not moved "
            "from itself; set old_logprobs: engine or interpolate, or learner.num_updates above 1",
        )


def _weightings(o: ObjectiveOptions) -> Iterator[Problem]:
    loss, is_weighting = loss_of(o), ESTIMATORS[o.estimator].is_weighting
    if loss.is_function:
        return
    if is_weighting and loss.has_ratio:
        yield (
            "estimator",
            f"{o.estimator} gives weights of a likelihood, and policy_loss: {o.policy_loss} wants advantages; set "
            "policy_loss: likelihood, or another estimator",
        )
    if is_weighting and o.opd_kl_coef:
        yield "opd_kl_coef", f"a teacher corrects advantages, and estimator: {o.estimator} gives none; set it to 0"
    if is_weighting and o.whiten:
        yield "whiten", f"a weight of a likelihood is not negative, and {o.estimator} gives such; set whiten: false"
    if o.estimator == "threshold" and o.min_reward is None:
        yield "min_reward", "estimator: threshold needs it: the reward from which on a response is imitated"
    if o.min_reward is None and o.policy_loss == "kto":
        yield "min_reward", "policy_loss: kto needs it: the reward from which on a response is desirable"
    if not OBJECTIVES.spec(o.name).imitates:
        return
    if (o.estimator, o.policy_loss) != ("uniform", "likelihood"):
        key = "estimator" if o.estimator != "uniform" else "policy_loss"
        yield key, f"{o.name} weighs every token alike and reads no reward; remove it, or take rejection_sampling"
    if o.sft_coef != ObjectiveOptions().sft_coef:
        yield "sft_coef", "weighs imitation beside an objective, and there is none beside it; remove it"


def _likelihood(o: ObjectiveOptions) -> Iterator[Problem]:
    loss, usual = loss_of(o), ObjectiveOptions()
    if loss.is_function or loss.has_ratio:
        return
    for key in ("old_logprobs", "opsm_delta", "unbiased_kl", "behaviour_kl_coef"):
        if getattr(o, key) != getattr(usual, key):
            yield (
                key,
                f"has no effect with policy_loss: {o.policy_loss}, which takes no ratio to an older policy; remove it",
            )
    if o.kl_in == "reward" and o.kl_coef and ESTIMATORS[o.estimator].is_weighting:
        yield "kl_in", f"estimator: {o.estimator} gives weights of a likelihood, not rewards; set kl_in: loss"


def _responses(o: ObjectiveOptions) -> Iterator[Problem]:
    if loss_of(o).unit == "token":
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
    if o.reduction != ObjectiveOptions().reduction:
        yield "reduction", "has no effect on a mean over whole responses; remove it"


def _kl(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.reference_every is not None and not needs_reference(o):
        yield "reference_every", "has no effect with kl_coef: 0, which needs no reference; remove it, or set kl_coef"
    if loss_of(o).is_function:
        return
    is_normalized = ESTIMATORS[o.estimator].normalizes and o.advantage_function is None
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
    loss = loss_of(o)
    if o.advantage_function is not None and (loss.unit != "token" or OBJECTIVES.spec(o.name).imitates):
        yield "advantage_function", f"has no effect with {o.name}, which reads no advantages; remove it"
    if o.reduction_function is not None and loss.unit != "token":
        yield "reduction_function", "has no effect on a mean over whole responses; remove it"
    if o.importance_function is None:
        return
    if not loss.has_ratio or loss.is_function:
        whose = "your own loss" if loss.is_function else f"policy_loss: {o.policy_loss}"
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
    _functions, _owned, _weightings, _likelihood, _responses, _advantages, _distillation, _policy_loss, _kl,
    correction_problems,
)  # fmt: skip
