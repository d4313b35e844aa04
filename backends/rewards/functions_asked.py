"""Which functions a ``reward:`` block asks, with every setting filled in.

Invariants:

* What a function's options say here is complete: nobody looks at the block again.
* Functions whose options are the same are one function, asked once for a sample wherever it stands.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from penstock.backends.processes.user_code import UserCodeError, split_spec
from penstock.backends.rewards.functions import NAMES, REWARD, SAMPLE_LISTS
from penstock.backends.rewards.options import FunctionOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from penstock.backends.rewards.options import RewardOptions
    from penstock.backends.rewards.service_options import ServiceOptions

CHOSEN: Final = "chosen"
"""As the function of a component: the one that ``reward.function_key`` chooses."""
LENGTH_PENALTY: Final = "length_penalty"
REMOTE: Final = "remote"
JUDGE: Final = "judge"
REWARD_MODEL: Final = "reward_model"
CODE: Final = "code"
CACHE_SHARE: Final = 0.2
SERVICE_GRACE_S: Final = 5.0
"""A service keeps its own deadline, and says why there is no answer; only past this is its process ended."""
SANDBOX_GRACE_S: Final = 60.0
"""Programs are ended within ``reward.code.total_s`` and the time of one case; what is beyond is a sandbox that does not
answer, or a wait for one of its places."""


class RewardTerm(NamedTuple):
    """One function, what its result counts, and what it is called."""

    name: str
    """Empty: the only one, whose result is the reward as it is."""
    weight: float
    function: FunctionOptions


class AskedFunctions(NamedTuple):
    """What the reward of a sample is made of."""

    usual: tuple[RewardTerm, ...]
    """Functions for rows that name none."""
    by_name: Mapping[str, tuple[RewardTerm, ...]]
    """Functions for rows that name one."""
    function_key: str | None

    def every(self) -> Iterator[FunctionOptions]:
        """Each function once."""
        seen: list[FunctionOptions] = []
        for terms in (self.usual, *self.by_name.values()):
            for term in terms:
                if term.function not in seen:
                    seen.append(term.function)
                    yield term.function


def asked_functions(options: RewardOptions, *, max_response_tokens: int = 1024) -> AskedFunctions:
    """What is asked. ``max_response_tokens``: the limit of the sampling."""
    alone = FunctionOptions(function=options.function, key=options.key, per_group=options.per_group)
    usual = _filled(alone, options, max_response_tokens)
    named = {each.name: _filled(_plain(each), options, max_response_tokens) for each in options.functions}
    return AskedFunctions(
        _terms(options, usual, max_response_tokens),
        {name: _terms(options, function, max_response_tokens) for name, function in named.items()},
        options.function_key,
    )


def scores_groups(options: RewardOptions) -> bool:
    """Whether any function sees a whole group, so that samples wait for each other."""
    return any(function.per_group for function in asked_functions(options).every())


def longest_timeout_s(options: RewardOptions) -> float:
    """Of any function."""
    return max(function.timeout_s or options.timeout_s for function in asked_functions(options).every())


def num_workers(options: RewardOptions) -> tuple[int, ...]:
    """How many calls each function takes at once: as many as it has processes, and of one whose calls run side by side
    in a process (a judge, a service, code) as many as it is allowed. What an ``async`` function of a user allows itself
    is known to its process alone, which counts as one."""
    return tuple(map(_num_calls, asked_functions(options).every()))


def _num_calls(function: FunctionOptions) -> int:
    service = function.remote or function.judge or function.reward_model
    if service is not None:
        return service.max_concurrent
    return len(os.sched_getaffinity(0)) if function.code is not None else function.num_workers or 1


def _terms(options: RewardOptions, chosen: FunctionOptions, max_response_tokens: int) -> tuple[RewardTerm, ...]:
    if not options.components:
        return (RewardTerm("", 1.0, chosen),)
    return tuple(
        RewardTerm(
            each.name,
            each.weight,
            chosen if each.function == CHOSEN else _filled(_plain(each), options, max_response_tokens),
        )
        for each in options.components
    )


def _plain(options: FunctionOptions) -> FunctionOptions:
    return FunctionOptions(**{name: getattr(options, name) for name in FunctionOptions.__struct_fields__})


def _filled(function: FunctionOptions, options: RewardOptions, max_response_tokens: int) -> FunctionOptions:
    penalty = function.length_penalty or options.length_penalty
    max_tokens = penalty.max_tokens or max_response_tokens
    cache_tokens = round(CACHE_SHARE * max_tokens) if penalty.cache_tokens is None else penalty.cache_tokens
    is_penalty, is_remote, is_judge = (function.function == name for name in (LENGTH_PENALTY, REMOTE, JUDGE))
    remote = (function.remote or options.remote) if is_remote else None
    judge = (function.judge or options.judge) if is_judge else None
    scored = (function.reward_model or options.reward_model) if function.function == REWARD_MODEL else None
    code = (function.code or options.code) if function.function == CODE else None
    service: ServiceOptions | None = remote or judge or scored
    timeout_s = function.timeout_s if service is None else service.timeout_s + SERVICE_GRACE_S
    return replace(
        function,
        per_group=asks_for_groups(function.function) if function.per_group is None else function.per_group,
        timeout_s=timeout_s if code is None else code.total_s + code.wall_s + SANDBOX_GRACE_S,
        num_workers=1 if service or code else (function.num_workers or options.num_workers),
        length_penalty=replace(penalty, max_tokens=max_tokens, cache_tokens=cache_tokens) if is_penalty else None,
        remote=remote,
        judge=judge,
        reward_model=scored,
        code=code,
    )


def asks_for_groups(spec: str) -> bool:
    """Whether the signature of a user's function asks for the lists of a group. Read from the file's text, so that
    nothing of it runs here; what is imported there from elsewhere is not seen."""
    if ":" not in spec:
        return False
    try:
        path, name = split_spec(spec)
    except UserCodeError:
        return False  # who opens the function says so
    return bool(_asked_in(path, name, path.stat().st_mtime_ns) & (SAMPLE_LISTS.keys() - set(NAMES[REWARD])))


@cache
def _asked_in(path: Path, name: str, changed_ns: int) -> frozenset[str]:
    del changed_ns  # so that a file that was changed is read again
    try:
        body: list[ast.stmt] = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError):
        return frozenset()
    found: ast.stmt | None = None
    for part in name.split("."):
        found = _defined(body, part)
        body = found.body if isinstance(found, ast.ClassDef) else []
    if isinstance(found, ast.ClassDef):
        found = _defined(found.body, "__call__")
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return frozenset()
    return frozenset(argument.arg for argument in (*found.args.args, *found.args.kwonlyargs))


def _defined(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for each in reversed(body):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and each.name == name:
            return each
    return None
