"""``learner.objective`` as it may be written: one word, or a block whose name brings defaults of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.learners.objectives.presets import PRESETS

if TYPE_CHECKING:
    from penstock.runtime.scenario.source import Plain, Source
    from penstock.runtime.scenario.structure import Scenario

BLOCK: Final = "learner"
KEY: Final = "objective"


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
        learner[KEY] = {**PRESETS.get(name, {}), **given}


def with_constant(scenario: Scenario) -> Scenario:
    """The scenario with the constant of a constant denominator given, not null: the longest response."""
    objective = scenario.learner.objective
    if objective.reduction != "constant" or objective.constant_tokens is not None:
        return scenario
    filled = msgspec.structs.replace(objective, constant_tokens=scenario.sampling.max_response_tokens)
    learner = msgspec.structs.replace(scenario.learner, objective=filled)
    return msgspec.structs.replace(scenario, learner=learner)
