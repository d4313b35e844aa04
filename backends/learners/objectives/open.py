"""The function that an objective's options mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.backends.learners.hooks.objective import load_objective_hooks
from penstock.backends.learners.objectives.imitation import beside_imitation, likelihood_objective
from penstock.backends.learners.objectives.judged import kto_objective
from penstock.backends.learners.objectives.knobs import dead_knob
from penstock.backends.learners.objectives.objective import always_reported, checked_terms, policy_objective
from penstock.backends.learners.objectives.preference import preference_objective
from penstock.backends.learners.objectives.protocol import ObjectiveTerms
from penstock.backends.learners.objectives.validity import is_user_objective, objective_problem
from penstock.backends.processes.hook_calling import Hook
from penstock.backends.processes.user_code import UserCodeError, load_object
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.backends.learners.objectives.protocol import (
        ObjectiveFunction,
        PolicyTokens,
    )
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
    if options.estimator == "gdpo" and options.component_weights is None:
        raise UserFault("learner.objective.component_weights: estimator: gdpo needs it, the weight of each component")
    load_objective_hooks(options)
    if not is_user_objective(options.name):
        built_in = beside_imitation(_built_in(options))
        if dead := dead_knob(options, built_in, num_steps=num_steps):
            raise UserFault(
                f"learner.objective.{dead}: changes neither the loss nor its gradient with the other keys of this "
                f"objective and {num_steps} optimizer step{'s' if num_steps > 1 else ''} a batch; remove it, or see "
                "docs/objectives.md for what it goes with"
            )
        return built_in
    found = load_object(options.name)
    if not callable(found):
        raise UserCodeError(f"{options.name}: expected a function of tokens and options, found {type(found).__name__}")
    return beside_imitation(user_objective(Hook(options.name, "learner.objective")))


def user_objective(hook: Hook[object]) -> ObjectiveFunction:
    """The user's function, with what it returns checked."""

    def call(tokens: PolicyTokens, options: ObjectiveOptions, /) -> ObjectiveTerms:
        if not tokens.logprobs.numel():  # a rank without tokens of its own, which only takes part
            return ObjectiveTerms(tokens.logprobs.sum(dtype=torch.float64), always_reported(tokens))
        returned = hook(tokens, options)
        try:
            return checked_terms(returned, tokens, name=f"{hook.key}: {hook.name} ({hook.place})")
        except (TypeError, ValueError) as error:
            raise UserCodeError(str(error)) from None

    return call


def _built_in(options: ObjectiveOptions) -> ObjectiveFunction:
    match options.policy_loss:
        case "likelihood" | "divergence":
            return likelihood_objective
        case "dpo":
            return preference_objective
        case "kto":
            return kto_objective
        case _:
            return policy_objective
