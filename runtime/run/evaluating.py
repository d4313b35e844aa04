"""What the ``evaluation:`` block of a scenario means for the actors: when, of what, and how much at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.actors.buffer.evaluating import EvaluationSchedule
from penstock.backends.engines.options import num_slots
from penstock.messages.evaluation import EvaluationShape
from penstock.runtime.scenario.evaluation_rules import sets_of

if TYPE_CHECKING:
    from penstock.runtime.run.plan import RunPlan
    from penstock.runtime.scenario import Scenario

SLOTS_BESIDE_TRAINING: Final = 4
"""One of so many is for evaluation, unless the scenario says how many."""


def evaluation_schedule(plan: RunPlan) -> EvaluationSchedule | None:
    """None where nothing is evaluated: without datasets, and in a run that only trains or only generates. One that only
    evaluates does so once."""
    scenario, options = plan.scenario, plan.scenario.evaluation
    only = scenario.run.only
    if only in ("learner", "rollout") or not sum(plan.num_evaluation_prompts):
        return None
    pairs = zip(sets_of(scenario), plan.num_evaluation_prompts, strict=True)
    return EvaluationSchedule(
        every=None if only == "evaluate" else options.every,
        before_first=only == "evaluate" or options.before_first,
        at_end=only != "evaluate" and options.at_end,
        is_pinned=options.pinned,
        datasets=tuple(
            EvaluationShape(name=each.name, num_rows=num_rows, samples_per_prompt=each.samples_per_prompt)
            for each, num_rows in pairs
        ),
    )


def max_evaluating(scenario: Scenario) -> int:
    """Samples of an evaluation that are at engines while there is training."""
    return scenario.evaluation.max_running or max(1, num_slots(scenario.engines) // SLOTS_BESIDE_TRAINING)
