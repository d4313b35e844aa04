"""Rules about functions of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.learners.spec import is_modelled
from penstock.messages.option_keys import Names, is_user_code
from penstock.runtime.scenario.named import named_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def function_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """A function that has no name of ours is one of a file, and a hook is for a run in which it is called."""
    for each in named_values(s):
        if each.names.is_only_function and not is_user_code(each.value):
            yield each.path, f"must be file.py:function; found '{each.value}'"
        if each.names is Names.TRAINING_HOOK and is_modelled(s.learner):
            yield (
                each.path,
                "a simulated learner trains nothing and calls no function; remove it, or set learner.backend",
            )
