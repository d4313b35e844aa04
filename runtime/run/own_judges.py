"""Which judges of a run are its own embedded engines, and what these have to know for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.episodes.judge_endpoint.judge_sampling import sampling_options_of
from penstock.backends.episodes.judge_endpoint.settings import JudgingSettings
from penstock.backends.rewards.functions_asked import asked_functions
from penstock.runtime.scenario.evaluation_rules import sets_of

if TYPE_CHECKING:
    from penstock.backends.rewards.service_options import JudgeOptions
    from penstock.runtime.run.plan import RunPlan
    from penstock.runtime.scenario import Scenario


def own_judges(scenario: Scenario) -> tuple[JudgeOptions, ...]:
    """The judges that ask the run's own engines, of training and of evaluations."""
    blocks = (scenario.reward, *(each.reward for each in sets_of(scenario)))
    asked = (function for block in blocks for function in asked_functions(block).every())
    return tuple(each.judge for each in asked if each.judge is not None and each.judge.engine == "self")


def judging(engine: str, plan: RunPlan, host: str) -> JudgingSettings | None:
    """How this embedded engine answers them; None where there are none. ``host``: this machine's address as other
    processes of the run see it."""
    scenario, weights = plan.scenario, plan.scenario.weights
    judges = own_judges(scenario)
    if not judges:
        return None
    return JudgingSettings(
        engine=engine,
        run_folder=plan.run_folder,
        model_folder=plan.model_folder,
        host=host,
        max_context=scenario.model.max_context,
        num_slots=scenario.engines.judge_slots,
        samplings=sampling_options_of(judges, scenario.model.max_context),
        first_dataset=len(sets_of(scenario)),
        data=scenario.data,
        seed=scenario.run.seed,
        timeout_s=max(judge.request_timeout_s for judge in judges),
        canary_tolerance=weights.canary_tolerance if weights.canary else None,
    )
