"""Rules about functions of the user's around the training."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from penstock.backends.learners.spec import is_modelled
from penstock.backends.registry import is_user_code
from penstock.runtime.scenario.paths import HOOKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario


def hooks_of(s: Scenario) -> dict[KeyPath, str]:
    """The functions that a scenario names, by key."""
    found: dict[KeyPath, str] = {}
    for key in HOOKS:
        value: str | None = reduce(lambda block, part: getattr(block, str(part)), key, s)  # type: ignore[assignment]
        if value is not None:
            found[key] = value
    return found


def hook_rules(s: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """A hook is a function of a file, and of a run in which it is called."""
    for key, value in hooks_of(s).items():
        if not is_user_code(value):
            yield key, f"must be file.py:function; found '{value}'"
        if is_modelled(s.learner):
            yield key, "a simulated learner trains nothing and calls no function; remove it, or set learner.backend"
