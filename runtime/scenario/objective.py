"""``learner.objective`` as it may be written: one word, or a block whose name brings defaults of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.learners.objectives.spec import ESTIMATORS, keys_of

if TYPE_CHECKING:
    from penstock.runtime.scenario.source import Plain, Source
    from penstock.runtime.scenario.structure import Scenario

BLOCK: Final = "learner"
KEY: Final = "objective"
OBJECTIVE: Final = (BLOCK, KEY)
OBJECTIVE_NAME: Final = (BLOCK, KEY, "name")


def name_objective(source: Source) -> None:
    """``objective: dapo`` becomes ``objective: {name: dapo}``, so that overrides can be set in it."""
    learner = source.data.get(BLOCK)
    if isinstance(learner, dict) and isinstance(name := learner.get(KEY), str):
        learner[KEY] = {"name": name}


def fill_objective(data: dict[str, Plain]) -> None:
    """Add what the name stands for, where the scenario does not say it itself."""
    learner = data.get(BLOCK)
    given = learner.get(KEY) if isinstance(learner, dict) else None
    if isinstance(learner, dict) and isinstance(given, dict) and isinstance(name := given.get("name"), str):
        learner[KEY] = {**keys_of(name), **given}


def with_objective(scenario: Scenario) -> Scenario:
    """The scenario with what its objective takes from other blocks given, not null: of a constant denominator the
    longest response, of GDPO the weights of the reward's components."""
    objective = filled = scenario.learner.objective
    if objective.reduction == "constant" and objective.constant_tokens is None:
        filled = msgspec.structs.replace(filled, constant_tokens=scenario.sampling.max_response_tokens)
    weights = {each.name: each.weight for each in scenario.reward.components if each.weight}
    if ESTIMATORS[objective.estimator].components and objective.component_weights is None and weights:
        filled = msgspec.structs.replace(filled, component_weights=weights)
    if filled is objective:
        return scenario
    learner = msgspec.structs.replace(scenario.learner, objective=filled)
    return msgspec.structs.replace(scenario, learner=learner)
