"""Whether the rewards of a scenario can score the rows that they will get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.data.mixture import named_sources
from penstock.backends.data.sources import parse_source
from penstock.backends.rewards.functions_asked import asked_functions
from penstock.backends.rewards.spec import REWARDS
from penstock.messages.errors import UserFault
from penstock.runtime.scenario.evaluation_rules import sets_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.rewards.options import CodeOptions, RewardOptions
    from penstock.runtime.scenario.structure import Scenario

SCORER: Final = "reasoning_gym"
PREFIX: Final = f"{SCORER}:"


def check_rewards(scenario: Scenario) -> None:
    """No task of reasoning-gym is to be scored whose checker would run answers of the model, and programs of the model
    can be shut in where they are to be run."""
    for key, path, reward in _scored(scenario):
        name = parse_source(path).path.removeprefix(PREFIX).partition(":")[0]
        for code in {function.code for function in asked_functions(reward).every() if function.code is not None}:
            _check_sandbox(code)
        scorers = [REWARDS.spec(function.function).extra for function in asked_functions(reward).every()]
        if path.startswith(PREFIX) and SCORER in scorers:
            from penstock.backends.rewards.reasoning_gym_answers import unsafe_task

            if why_not := unsafe_task(name):
                raise UserFault(f"{key}: {why_not}")


def _check_sandbox(options: CodeOptions) -> None:
    from penstock.backends.rewards.code_answers import open_sandbox

    open_sandbox(options).close()


def _scored(scenario: Scenario) -> Iterator[tuple[str, str, RewardOptions]]:
    if scenario.run.only != "learner":
        for source in named_sources(scenario.data):
            yield source.key, source.path, scenario.reward
    for index, each in enumerate(sets_of(scenario)):
        for source in named_sources(each.data):
            yield f"evaluation.datasets[{index}].path", source.path, each.reward
