"""Whether the functions of a user that a scenario names are there, and can be loaded as the run will load them.

Invariants:

* Nothing of a user's runs in this process: files are read here, and loaded in a process of its own.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from penstock.backends.extras import missing_extra
from penstock.backends.processes.user_code import UserCodeError, split_spec
from penstock.backends.processes.user_environment import pass_variables
from penstock.backends.registry import is_user_code
from penstock.backends.rewards.functions import FILTER, GROUP_REWARD, REWARD
from penstock.backends.rewards.functions_asked import asked_functions
from penstock.backends.rewards.sampling_calls import HOOK, PRIORITY, SAMPLE_FILTER
from penstock.backends.rewards.spec import REWARDS
from penstock.messages.errors import UserFault
from penstock.runtime.preflight.episodes import episode_functions
from penstock.runtime.preflight.function_trial import POLICY, TRAINING_HOOK, NamedFunction, check_loads
from penstock.runtime.scenario.evaluation_rules import evaluation_functions, sets_of
from penstock.runtime.scenario.hook_rules import hooks_of
from penstock.runtime.scenario.paths import (
    FILTER_FUNCTION,
    FILTER_HOOK,
    FILTER_SAMPLE_FUNCTION,
    PRIORITY_FUNCTION,
)
from penstock.runtime.scenario.sampling_rules import sampling_functions
from penstock.runtime.scenario.source import dotted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.rewards.options import RewardOptions
    from penstock.runtime.scenario.structure import Scenario


def check_user_code(scenario: Scenario) -> None:
    """Each ``file.py:name`` of the scenario names a file that can be parsed and defines that name; what a built-in
    reward needs is installed."""
    for key, value in _named(scenario):
        if is_user_code(value):
            _check_definition(key, value)
            continue
        extra = REWARDS.spec(value).extra if value in REWARDS.builtin else ""
        if extra and (missing := missing_extra(extra)):
            raise UserFault(f"{key}: {value}: {missing}")


def check_functions_load(scenario: Scenario) -> None:
    """They are loaded as the run does it, in a process of their own, and ask for nothing that there is not. (Those of
    the episode have a check of their own.)

    Raises:
        UserFault: one of them cannot be loaded.
    """
    pass_variables(scenario.runtime.pass_env)
    check_loads(list(dict.fromkeys(_loaded(scenario))))


def _named(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Every key that may name a function, and what it names."""
    rewards = (("reward", scenario.reward), *_evaluation_rewards(scenario))
    for key, value in (
        *(named for block, reward in rewards for named in _of_reward(block, reward)),
        ("filter.function", scenario.filter.function),
        ("staleness.policy", scenario.staleness.policy),
        ("learner.objective", scenario.learner.objective.name),
        *episode_functions(scenario),
        *evaluation_functions(scenario),
        *((dotted(key), value) for key, value in hooks_of(scenario).items()),
        *((dotted(key), value) for key, value in sampling_functions(scenario).items()),
    ):
        if value is not None:
            yield key, value


def _evaluation_rewards(scenario: Scenario) -> Iterator[tuple[str, RewardOptions]]:
    for index, each in enumerate(sets_of(scenario)):
        if each.reward != scenario.reward:
            yield f"evaluation.datasets[{index}].reward", each.reward


def _of_reward(block: str, reward: RewardOptions) -> Iterator[tuple[str, str]]:
    yield f"{block}.function", reward.function
    for index, part in enumerate(reward.components):
        yield f"{block}.components[{index}].function", part.function
    for index, each in enumerate(reward.functions):
        yield f"{block}.functions[{index}].function", each.function


def _loaded(scenario: Scenario) -> Iterator[NamedFunction]:
    """The functions of files, with what they are loaded as."""
    if scenario.run.only != "learner":
        for block, reward in (("reward", scenario.reward), *_evaluation_rewards(scenario)):
            keys = {value: key for key, value in reversed(list(_of_reward(block, reward)))}
            for function in asked_functions(reward).every():
                if is_user_code(function.function):
                    kind = GROUP_REWARD if function.per_group else REWARD
                    yield NamedFunction(keys[function.function], kind, function.function)
    learns = scenario.run.only in (None, "learner")
    kinds = {
        FILTER_FUNCTION: FILTER,
        FILTER_SAMPLE_FUNCTION: SAMPLE_FILTER,
        FILTER_HOOK: HOOK,
        PRIORITY_FUNCTION: PRIORITY,
    }
    for key, value in {FILTER_FUNCTION: scenario.filter.function, **sampling_functions(scenario)}.items():
        if value is not None and is_user_code(value) and scenario.run.only != "learner":
            yield NamedFunction(dotted(key), kinds[key], value)
    if is_user_code(scenario.staleness.policy):
        yield NamedFunction("staleness.policy", POLICY, scenario.staleness.policy)
    if learns and is_user_code(scenario.learner.objective.name):
        yield NamedFunction("learner.objective", TRAINING_HOOK, scenario.learner.objective.name)
    for key, value in hooks_of(scenario).items() if learns else ():
        yield NamedFunction(dotted(key), TRAINING_HOOK, value)


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
