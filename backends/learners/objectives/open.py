"""The function that an objective's options mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.learners.hooks.objective import load_objective_hooks
from penstock.backends.learners.objectives.imitation import beside_imitation, likelihood_objective
from penstock.backends.learners.objectives.judged import kto_objective
from penstock.backends.learners.objectives.knobs import dead_knob
from penstock.backends.learners.objectives.objective import always_reported, checked_terms, policy_objective
from penstock.backends.learners.objectives.preference import preference_objective
from penstock.backends.learners.objectives.protocol import ObjectiveTerms
from penstock.backends.learners.objectives.spec import ESTIMATORS, OBJECTIVES
from penstock.backends.learners.objectives.validity import objective_problem
from penstock.backends.processes.hook_calling import Hook
from penstock.backends.processes.user_code import UserCodeError
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.backends.learners.objective_names import PolicyLoss
    from penstock.backends.learners.objectives.protocol import ObjectiveFunction, PolicyTokens
    from penstock.backends.learners.options import ObjectiveOptions


def open_objective(options: ObjectiveOptions, *, num_steps: int = 1) -> ObjectiveFunction:
    """The built-in objective, or the user's own, for batches of ``num_steps`` optimizer steps.

    Raises:
        UserFault: the options make no sense together, or one of them changes nothing.
        UserCodeError: the user's file cannot be loaded, or the name in it is no function.
    """
    if problem := objective_problem(options, num_steps=num_steps):
        key, text = problem
        raise UserFault(f"learner.objective.{key}: {text}")
    if options.reduction == "constant" and options.constant_tokens is None:
        raise UserFault("learner.objective.constant_tokens: reduction: constant needs it, the longest response")
    if ESTIMATORS[options.estimator].components and options.component_weights is None:
        raise UserFault("learner.objective.component_weights: estimator: gdpo needs it, the weight of each component")
    load_objective_hooks(options)
    open_function = OBJECTIVES.spec(options.name).open
    if open_function is not None:
        return beside_imitation(checked_function(open_function(options), f"learner.objective: {options.name}"))
    built_in = beside_imitation(_FUNCTIONS.get(options.policy_loss, policy_objective))
    if dead := dead_knob(options, built_in, num_steps=num_steps):
        raise UserFault(
            f"learner.objective.{dead}: changes neither the loss nor its gradient with the other keys of this "
            f"objective and {num_steps} optimizer step{'s' if num_steps > 1 else ''} a batch; remove it, or see "
            "docs/objectives.md for what it goes with"
        )
    return built_in


def checked_function(function: Callable[[PolicyTokens, ObjectiveOptions], object], name: str) -> ObjectiveFunction:
    """Somebody else's function, with what it returns checked.

    Args:
        function: of tokens and options.
        name: by which messages call it, where it is no :class:`~penstock.backends.processes.hook_calling.Hook`.
    """
    told = _place_of(function) or name

    def call(tokens: PolicyTokens, options: ObjectiveOptions, /) -> ObjectiveTerms:
        if not tokens.logprobs.numel():  # a rank without tokens of its own, which only takes part
            return ObjectiveTerms(tokens.logprobs.sum(dtype=torch.float64), always_reported(tokens))
        returned = function(tokens, options)
        try:
            return checked_terms(returned, tokens, name=told)
        except (TypeError, ValueError) as error:
            raise UserCodeError(str(error)) from None

    return call


def _place_of(function: object) -> str:
    return f"{function.key}: {function.name} ({function.place})" if isinstance(function, Hook) else ""


_FUNCTIONS: Final[Mapping[PolicyLoss, ObjectiveFunction]] = {
    "likelihood": likelihood_objective,
    "divergence": likelihood_objective,
    "dpo": preference_objective,
    "kto": kto_objective,
}
"""The functions of losses that take no ratio; :func:`policy_objective` is that of the others."""
