"""Whether the functions that play a scenario's episodes can be loaded and have the form that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.episodes.functions.opening import specs_of
from penstock.backends.processes.user_environment import pass_variables
from penstock.messages.option_keys import Names
from penstock.runtime.preflight.function_trial import NamedFunction, check_loads
from penstock.runtime.scenario.evaluation_rules import sets_of

if TYPE_CHECKING:
    from penstock.runtime.scenario.structure import Scenario


def check_episode(scenario: Scenario) -> None:
    """They are loaded as the run does it, in a process of their own.

    Raises:
        UserFault: they cannot be.
    """
    pass_variables(scenario.runtime.pass_env)
    specs = specs_of(scenario.episode, [each.generate for each in sets_of(scenario)])
    check_loads([NamedFunction("episode.generate", Names.EPISODE, specs.in_words(), specs)])
