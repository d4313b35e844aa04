"""Rules of :mod:`.validity` for what makes advantages of rewards: estimators, what they take, and the critic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.backends.learners.options import ObjectiveOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.learners.objectives.validity import Problem


def advantage_rules(o: ObjectiveOptions) -> Iterator[Problem]:
    """Every problem of these options."""
    yield from _batch(o)
    yield from _components(o)
    yield from _critic(o)


def _batch(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.estimator.startswith("reinforce_plus_plus") and not o.whiten:
        yield "whiten", f"{o.estimator} is defined with whitened advantages; set whiten: true, or estimator: rloo"
    if o.discount != 1.0 and o.estimator not in ("reinforce_plus_plus", "gae"):
        yield (
            "discount",
            f"has an effect with estimator: reinforce_plus_plus only, or gae, found {o.estimator}; set it to 1",
        )
    if o.constant_tokens is not None and o.reduction != "constant":
        yield "constant_tokens", f"has no effect with reduction: {o.reduction}; remove it, or set reduction: constant"


def _components(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.estimator == "gdpo" and o.postprocess_function is not None:
        yield (
            "postprocess_function",
            "changes the sum of a reward, and estimator: gdpo reads its components; remove it, or set estimator: grpo",
        )
    if o.component_weights is None:
        return
    if o.estimator != "gdpo":
        yield "component_weights", f"has no effect with estimator: {o.estimator}; remove it, or set estimator: gdpo"
    if not o.component_weights:
        yield "component_weights", "names no component of the reward; add one, or remove it"
    for name, weight in o.component_weights.items():
        if weight == 0.0 or not math.isfinite(weight):
            yield "component_weights", f"a weight of {weight:g} for '{name}': expected a finite number other than 0"


def _critic(o: ObjectiveOptions) -> Iterator[Problem]:
    if o.estimator == "gae" and o.critic == "none":
        yield "critic", "estimator: gae needs the values of a critic; set critic: own or shared, or another estimator"
    if o.critic != "none" and o.estimator != "gae":
        yield (
            "critic",
            f"{o.critic} has no effect with estimator: {o.estimator}, which needs no values; set critic: none, or "
            "estimator: gae",
        )
    usual = ObjectiveOptions()
    for key in ("gae_lambda", "gae_length_alpha", "critic_lambda"):
        if o.estimator != "gae" and getattr(o, key) != getattr(usual, key):
            yield key, f"has an effect with estimator: gae only, found {o.estimator}; remove it"
    if o.gae_length_alpha is not None and o.gae_lambda != usual.gae_lambda:
        yield "gae_lambda", "gae_length_alpha takes its place; remove one of the two"
    for key in ("value_clip", "critic_learning_rate", "critic_warmup_steps", "critic_only_steps"):
        if o.critic == "none" and getattr(o, key) != getattr(usual, key):
            yield key, "has no effect without a critic; remove it, or set estimator: gae and critic: own or shared"
    if o.critic != "shared" and o.value_coef != usual.value_coef:
        yield (
            "value_coef",
            f"weighs the two losses of one model, which critic: {o.critic} is not; remove it, or set critic: shared",
        )
