"""How the parts of a ``reward:`` block have to fit each other, and the others of the scenario."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from penstock.backends.learners.objectives.spec import ESTIMATORS
from penstock.backends.rewards.functions import NAMES, REWARD
from penstock.backends.rewards.functions_asked import (
    CHOSEN,
    CODE,
    JUDGE,
    LENGTH_PENALTY,
    REMOTE,
    REWARD_MODEL,
    asked_functions,
)
from penstock.backends.rewards.options import RewardOptions
from penstock.backends.rewards.spec import REWARDS
from penstock.runtime.scenario.evaluation_rules import sets_of
from penstock.runtime.scenario.objective import OBJECTIVE
from penstock.runtime.scenario.own_judge_rules import own_judge_rules
from penstock.runtime.scenario.row_metadata import unnamed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.rewards.options import (
        ComponentOptions,
        FunctionOptions,
        NamedFunctionOptions,
    )
    from penstock.backends.rewards.service_options import JudgeOptions, RemoteOptions
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

BLOCK: Final[KeyPath] = ("reward",)
PLAIN: Final = RewardOptions()

Broken = tuple["KeyPath", str]


def reward_rules(s: Scenario) -> Iterator[Broken]:
    """The key to change, and what is wrong with it."""
    reward = s.reward
    yield from _names(reward)
    yield from _choice(s, reward)
    yield from _learnt_components(s, reward)
    for path, function in _places(reward, s.sampling.max_response_tokens):
        yield from _function(s, path, function)


def _places(reward: RewardOptions, limit: int) -> Iterator[tuple[KeyPath, FunctionOptions]]:
    """Every function that the block names, with its place; each filled in."""
    alone = asked_functions(_without_choice(reward), max_response_tokens=limit).usual
    is_used = not reward.components or any(each.function == CHOSEN for each in reward.components)
    if is_used:
        yield BLOCK, alone[0].function
    for key, items in _lists(reward):
        for index, item in enumerate(items):
            if item.function != CHOSEN:
                filled = asked_functions(_with(reward, item), max_response_tokens=limit).usual[0].function
                yield (*BLOCK, key, index), filled


def _lists(
    reward: RewardOptions,
) -> tuple[tuple[str, Sequence[ComponentOptions | NamedFunctionOptions]], ...]:
    return ("components", reward.components), ("functions", reward.functions)


def _without_choice(reward: RewardOptions) -> RewardOptions:
    return replace(reward, components=(), functions=(), function_key=None)


def _with(reward: RewardOptions, item: ComponentOptions | NamedFunctionOptions) -> RewardOptions:
    plain = _without_choice(reward)
    return replace(
        plain,
        function=item.function,
        key=item.key,
        per_group=item.per_group,
        length_penalty=item.length_penalty or plain.length_penalty,
        remote=item.remote or plain.remote,
        judge=item.judge or plain.judge,
        reward_model=item.reward_model or plain.reward_model,
        code=item.code or plain.code,
    )


def _names(reward: RewardOptions) -> Iterator[Broken]:
    for key, items in _lists(reward):
        names = [item.name for item in items]
        for index, item in enumerate(items):
            if item.name in names[:index]:
                yield (
                    (*BLOCK, key, index, "name"),
                    f"'{item.name}' is the name of an earlier one as well; choose another",
                )


def _choice(s: Scenario, reward: RewardOptions) -> Iterator[Broken]:
    chosen = any(each.function == CHOSEN for each in reward.components)
    if reward.functions and reward.function_key is None:
        yield (
            (*BLOCK, "functions"),
            "nobody names one of them; say in reward.function_key which column of the rows does",
        )
    if reward.function_key is not None and not reward.functions:
        yield (*BLOCK, "function_key"), "rows can name none; list the functions in reward.functions"
    if reward.function_key is not None and (problem := unnamed(s, reward.function_key, "rewards do not see it")):
        yield (*BLOCK, "function_key"), problem
    if chosen and reward.function_key is None:
        yield (*BLOCK, "components"), f"the function '{CHOSEN}' is what reward.function_key chooses; set that"
    if reward.components and reward.function_key is not None and not chosen:
        yield (
            (*BLOCK, "function_key"),
            f"has no effect beside reward.components; add a component with function: {CHOSEN}, or remove it",
        )


def _learnt_components(s: Scenario, reward: RewardOptions) -> Iterator[Broken]:
    """An objective that reads components has to find them."""
    key = (*OBJECTIVE, "component_weights")
    if not ESTIMATORS[s.learner.objective.estimator].components:
        return
    if s.learner.objective.component_weights is None:
        yield (
            key,
            "estimator: gdpo needs the components of the reward, and what each weighs; list them in reward.components, "
            "or name here those that your function returns beside the reward",
        )
    known = [each.name for each in reward.components]
    for name in s.learner.objective.component_weights or ():
        if known and not any(name == each or name.startswith(f"{each}/") for each in known):
            yield key, f"the reward has no component '{name}'; reward.components has {', '.join(known)}"


def unasked_rules(s: Scenario) -> Iterator[Broken]:
    """Options of a function that no reward calls: whoever sets a penalty believes that there is one."""
    reward = s.reward
    blocks = (reward, *(each.reward for each in sets_of(s)))
    asked = {each.function for block in blocks for each in asked_functions(block).every()}
    for name in (LENGTH_PENALTY, REMOTE, JUDGE, REWARD_MODEL, CODE):
        if name not in asked and getattr(reward, name) != getattr(PLAIN, name):
            yield (
                (*BLOCK, name),
                f"has no effect, as no reward asks it; set reward.function: {name}, or add a component with that "
                f"function, or remove it (on the command line: reward.{name}={{}})",
            )
        for key, items in _lists(reward):
            for index, item in enumerate(items):
                if item.function != name and getattr(item, name) is not None:
                    yield (*BLOCK, key, index, name), f"has no effect with function: {item.function}; remove it"


def _function(s: Scenario, path: KeyPath, function: FunctionOptions) -> Iterator[Broken]:
    spec = REWARDS.spec(function.function)
    if function.per_group and not spec.sees_groups:
        yield (*path, "per_group"), f"'{function.function}' sees one sample; set it to false, or remove it"
    if function.key is not None and spec.keys and function.key not in spec.keys:
        found = " and ".join(spec.keys)
        yield (*path, "key"), f"what '{function.function}' returns has {found}, and no '{function.key}'"
    if (penalty := function.length_penalty) is not None:
        cache, limit = penalty.cache_tokens or 0, penalty.max_tokens or 0
        if cache > limit:
            yield (
                (*path, "length_penalty", "cache_tokens"),
                f"{cache} are more than the {limit} of max_tokens; lower it",
            )
    if function.remote is not None:
        yield from _remote((*path, "remote"), function.remote, is_group=bool(function.per_group))
    if function.judge is not None:
        yield from _judge(s, (*path, "judge"), function.judge)


def _remote(path: KeyPath, remote: RemoteOptions, *, is_group: bool) -> Iterator[Broken]:
    if not remote.url:
        yield (*path, "url"), f"the reward '{REMOTE}' needs the address that samples are posted to"
    elif not remote.url.startswith(("http://", "https://")):
        yield (*path, "url"), f"must begin with http:// or https://; found '{remote.url}'"
    if unknown := [name for name in remote.fields if name not in NAMES[REWARD]]:
        yield (*path, "fields"), f"there is no '{unknown[0]}' of a sample; there are {', '.join(NAMES[REWARD])}"
    if is_group and remote.batch_size > 1:
        yield (*path, "batch_size"), "with per_group a request is one group; set it to 1"


def _judge(s: Scenario, path: KeyPath, judge: JudgeOptions) -> Iterator[Broken]:
    if (judge.url is None) == (judge.engine is None):
        yield path, f"the reward '{JUDGE}' needs exactly one of url and engine"
    if judge.url is not None and not judge.url.startswith(("http://", "https://")):
        yield (*path, "url"), f"must begin with http:// or https://; found '{judge.url}'"
    if judge.score is not None and judge.verdicts is not None:
        yield (*path, "verdicts"), "a verdict is read by score or by verdicts; remove one"
    if judge.verdicts is not None and not judge.verdicts:
        yield (*path, "verdicts"), "names no word; give some, as in {yes: 1, no: 0}"
    if judge.score is not None and (problem := _pattern_problem(judge.score)):
        yield (*path, "score"), problem
    if judge.lowest >= judge.highest:
        yield (*path, "highest"), f"must be more than lowest, {judge.lowest:g}; found {judge.highest:g}"
    yield from own_judge_rules(s, path, judge)


def _pattern_problem(text: str) -> str | None:
    try:
        groups = re.compile(text).groups
    except re.error as error:
        return f"'{text}' is no regular expression: {error}"
    return None if groups == 1 else f"must have one group, the number; found {groups}"
