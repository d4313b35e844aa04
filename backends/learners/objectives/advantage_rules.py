"""Rules of :mod:`.validity` for what makes advantages of rewards: estimators, what they take, and the critic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.backends.learners.objectives.spec import ESTIMATORS
from penstock.backends.learners.options import ObjectiveOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.learners.objectives.spec import Problem


def advantage_rules(o: ObjectiveOptions) -> Iterator[Problem]:
    """Every problem of these options."""
    yield from _batch(o)
    yield from _components(o)
    yield from _critic(o)


def _batch(o: ObjectiveOptions) -> Iterator[Problem]:
    if ESTIMATORS[o.estimator].whitens and not o.whiten:
        yield "whiten", f"{o.estimator} is defined with whitened advantages; set whiten: true, or estimator: rloo"


def _components(o: ObjectiveOptions) -> Iterator[Problem]:
    if ESTIMATORS[o.estimator].components and o.postprocess_function is not None:
        yield (
            "postprocess_function",
            "changes the sum of a reward, and estimator: gdpo reads its components; remove it, or set estimator: grpo",
        )
    if o.component_weights is None:
        return
    if not o.component_weights:
        yield "component_weights", "names no component of the reward; add one, or remove it"
    for name, weight in o.component_weights.items():
        if weight == 0.0 or not math.isfinite(weight):
            yield "component_weights", f"a weight of {weight:g} for '{name}': expected a finite number other than 0"


def _critic(o: ObjectiveOptions) -> Iterator[Problem]:
    needs_critic = ESTIMATORS[o.estimator].needs_critic
    if needs_critic and o.critic == "none":
        yield "critic", "estimator: gae needs the values of a critic; set critic: own or shared, or another estimator"
    if o.critic != "none" and not needs_critic:
        yield (
            "critic",
            f"{o.critic} has no effect with estimator: {o.estimator}, which needs no values; set critic: none, or "
            "estimator: gae",
        )
    if o.gae_length_alpha is not None and o.gae_lambda != ObjectiveOptions().gae_lambda:
        yield "gae_lambda", "gae_length_alpha takes its place; remove one of the two"
