"""Rules about functions of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.spec import is_modelled
from penstock.backends.rewards.functions_asked import CHOSEN
from penstock.backends.rewards.spec import REWARDS
from penstock.messages.option_keys import Names, is_user_code
from penstock.runtime.scenario.named import named_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def function_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """A function is one of a file, or built in where some are, and a hook is for a run in which it is called."""
    for each in named_values(s):
        if each.names.is_only_function and not is_user_code(each.value):
            yield each.path, f"must be file.py:function; found '{each.value}'"
        is_chosen = each.value == CHOSEN and "components" in each.path  # by the row
        if each.names is Names.REWARD and not is_chosen and (problem := REWARDS.problem(each.value)):
            yield each.path, problem
        if each.names is Names.TRAINING_HOOK and is_modelled(s.learner):
            yield (
                each.path,
                "a simulated learner trains nothing and calls no function; remove it, or set learner.backend",
            )
