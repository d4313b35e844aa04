"""Whether the functions of a user that a scenario names are there, and can be loaded as the run will load them.

Invariants:

* Nothing of a user's runs in this process: files are read here, and loaded in a process of its own.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from penstock.backends.episodes.functions.opening import specs_of
from penstock.backends.extras import missing_extra
from penstock.backends.processes.user_code import UserCodeError, split_spec
from penstock.backends.processes.user_environment import pass_variables
from penstock.backends.rewards.functions import GROUP_REWARD, REWARD
from penstock.backends.rewards.functions_asked import asked_functions
from penstock.backends.rewards.spec import REWARDS
from penstock.backends.trackers.spec import TRACKERS
from penstock.messages.errors import UserFault
from penstock.messages.option_keys import Names, is_user_code
from penstock.runtime.preflight.function_trial import NamedFunction, check_loads
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.named import named_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.scenario.named import Named
    from penstock.runtime.scenario.structure import Scenario


def check_user_code(scenario: Scenario) -> None:
    """Each ``file.py:name`` of the scenario names a file that can be parsed and defines that name; what a built-in
    reward, or a tracker, needs is installed."""
    for each in named_values(scenario):
        if each.names.is_function and is_user_code(each.value):
            _check_definition(each.key, each.value)
            continue
        if (extra := _extra_of(each)) and (missing := missing_extra(extra)):
            raise UserFault(f"{each.key}: {each.value}: {missing}")


def _extra_of(each: Named) -> str:
    """The module of an extra that something built in needs; empty: none."""
    if each.names is Names.REWARD and each.value in REWARDS.builtin:
        return REWARDS.spec(each.value).extra
    if each.names is Names.TRACKER and each.value in TRACKERS.builtin:
        return TRACKERS.spec(each.value).extra
    return ""


def check_functions_load(scenario: Scenario) -> None:
    """They are loaded as the run does it, in a process of their own, and ask for nothing that there is not. (Those of
    the episode have a check of their own.)

    Raises:
        UserFault: one of them cannot be loaded.
    """
    pass_variables(scenario.runtime.pass_env)
    check_loads(_loaded(scenario))


def check_episode(scenario: Scenario) -> None:
    """As :func:`check_functions_load`, of the functions that play episodes; they have the form that they need, too.

    Raises:
        UserFault: they cannot be loaded.
    """
    pass_variables(scenario.runtime.pass_env)
    specs = specs_of(scenario.episode, [each.generate for each in sets_of(scenario)])
    check_loads([NamedFunction("episode.generate", Names.EPISODE, specs.in_words(), specs)])


def _loaded(scenario: Scenario) -> list[NamedFunction]:
    """The functions of files, with what they are loaded as; each once."""
    rewards = [scenario.reward, *(each.reward for each in sets_of(scenario))]
    asked = [function for reward in rewards for function in asked_functions(reward).every()]
    found: dict[tuple[str, str], NamedFunction] = {}
    for each in named_values(scenario):
        if not is_user_code(each.value) or not _is_loaded(each.names, scenario.run.only):
            continue
        kinds = [each.names.value]
        if each.names is Names.REWARD:
            kinds = [GROUP_REWARD if one.per_group else REWARD for one in asked if one.function == each.value]
        for kind in kinds:
            found.setdefault((kind, each.value), NamedFunction(each.key, kind, each.value))
    return list(found.values())


def _is_loaded(names: Names, only: str | None) -> bool:
    """Whether runs with ``run.only`` load what is named so."""
    match names:
        case Names.POLICY | Names.TRACKER:
            return True
        case Names.OBJECTIVE | Names.TRAINING_HOOK:
            return only in (None, "learner")
        case Names.EPISODE | Names.EPISODE_PART:
            return False  # they have a check of their own
        case _:
            return names.is_function and only != "learner"


def _check_definition(key: str, spec: str) -> None:
    try:
        file, name = split_spec(spec)
    except UserCodeError as error:
        raise UserFault(f"{key}: {error}") from None
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise UserFault(f"{key}: {file}:{error.lineno}: not valid Python: {error.msg}") from None
    except OSError as error:
        raise UserFault(f"{key}: {file}: cannot read this file: {(error.strerror or '').lower()}") from None
    except ValueError as error:  # a null byte
        raise UserFault(f"{key}: {file}: not valid Python: {error}") from None
    names = set(_names_bound_in(tree))
    if name.split(".")[0] not in names and "*" not in names:
        public = sorted(found for found in names if not found.startswith("_"))
        raise UserFault(f"{key}: {file}: defines no '{name}'; it has {', '.join(public[:8]) or 'nothing'}")


def _names_bound_in(tree: ast.Module) -> Iterator[str]:
    """Every name that some statement binds, in whatever block; ``*`` where it cannot be told without running it."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield "*" if name == "__getattr__" else name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=given):
                yield given or name.split(".")[0]
            case _:
                pass
