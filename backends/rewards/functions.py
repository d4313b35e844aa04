"""What runs in a worker process: a function, the arguments it asks for, and what its result means.

A reward function is called with keyword arguments: those among the following that it declares (all, with ``**``).

====================  =======================================================================
``prompt``            the prompt as text
``response``          what the model wrote, without special tokens
``conversation``      the same with what others wrote in between (tools, users), of an episode
``label``             the row's label, ``""`` when it has none
``metadata``          the row's metadata columns as a ``dict``
``truncated``         whether the length limit ended the response
``tokens``            the response's token ids, ``list[int]``
``prompt_tokens``     the prompt's token ids, ``list[int]``
``row``               number of the dataset row
``group_id``          number of the group
``index``             number of the sample in its group
====================  =======================================================================

It returns a number, a boolean, or a ``dict`` of named numbers with the reward under ``"reward"`` (or ``"score"``); the
others are reported beside it. It may be ``async``; many calls of it then run side by side in one process. A class is
called once without arguments, and the object it makes is the function.

A filter is called with those of ``group``, ``rewards``, ``responses``, ``prompt``, ``label`` and ``metadata`` that it
declares and returns ``True``, ``False``, or ``(False, "cause")``.

Invariants:

* Only a finite number that the function returned becomes a reward. All else is a failure with a reason.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from penstock.backends.rewards.wire import Judged, Kept, RewardCall
from penstock.backends.user_code import UserCodeError, load_object, split_spec
from penstock.messages.arrays import tokens_view
from penstock.messages.samples import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from penstock.backends.rewards.wire import Call

REWARD: Final = "reward"
FILTER: Final = "filter"
NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    REWARD: (
        "prompt",
        "response",
        "conversation",
        "label",
        "metadata",
        "truncated",
        "tokens",
        "prompt_tokens",
        "row",
        "group_id",
        "index",
    ),
    FILTER: ("group", "rewards", "responses", "prompt", "label", "metadata"),
}
TOTALS: Final = ("reward", "score")
ASYNC_CONCURRENCY: Final = 64
MAX_SHOWN_CHARACTERS: Final = 80


class NoRewardError(ValueError):
    """There can be no reward for this sample; the message is the whole reason."""


class Loaded(NamedTuple):
    """A function that is ready to be called."""

    function: Callable[..., object]
    names: tuple[str, ...]
    is_async: bool
    path: Path | None
    """The user's file; None for a built-in function."""


def load_function(kind: str, spec: str) -> Loaded:
    """Load ``file.py:name``, or a built-in reward by its name.

    Raises:
        UserCodeError: it cannot be loaded, or asks for something that there is not.
    """
    if kind == REWARD and ":" not in spec:
        from penstock.backends.rewards.builtin import built_in

        function = built_in(spec)
        return Loaded(function, _asked_names(function, kind, spec), False, None)
    found = load_object(spec)
    path, name = split_spec(spec)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise UserCodeError(f"{path}: {name!r} is {type(found).__name__}, which cannot be called")
    is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
    return Loaded(found, _asked_names(found, kind, spec), is_async, path)


def arguments(call: Call, names: tuple[str, ...]) -> dict[str, object]:
    """The keyword arguments of a call."""
    if isinstance(call, RewardCall):
        return {name: _reward_argument(call, name) for name in names}
    group = msgspec.msgpack.decode(call.group, type=Group)
    return {name: _filter_argument(group, call.responses, name) for name in names}


def judged(call_id: int, elapsed_s: float, returned: object) -> Judged:
    """What a reward function returned, as a reward.

    Raises:
        NoRewardError: it is none.
    """
    if not isinstance(returned, dict):
        return Judged(call_id, elapsed_s, _number(returned, "the reward function returned"), ())
    parts = cast("dict[object, object]", returned)
    total = next((name for name in TOTALS if name in parts), None)
    if total is None:
        raise NoRewardError(
            f"the reward function returned a dict without 'reward' or 'score'; its keys are {_short(list(parts))}"
        )
    components = tuple(
        (str(name), _number(value, f"component {name!r} of the reward is"))
        for name, value in parts.items()
        if name != total
    )
    return Judged(call_id, elapsed_s, _number(parts[total], f"{total!r} of the reward is"), components)


def kept(call_id: int, elapsed_s: float, returned: object) -> Kept:
    """What a filter returned, as a verdict.

    Raises:
        NoRewardError: it is none.
    """
    match _plain(returned):
        case bool(keep):
            return Kept(call_id, elapsed_s, keep, "")
        case (bool(keep), str(cause)):
            return Kept(call_id, elapsed_s, keep, "" if keep else cause)
        case other:
            raise NoRewardError(f"the filter returned {_short(other)}; expected True, False, or (False, 'cause')")


def _asked_names(function: Callable[..., object], kind: str, spec: str) -> tuple[str, ...]:
    known = NAMES[kind]
    asked: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return known
        if parameter.kind is parameter.VAR_POSITIONAL:
            continue
        by_name = parameter.kind is not parameter.POSITIONAL_ONLY
        if parameter.name in known and by_name:
            asked.append(parameter.name)
        elif parameter.default is parameter.empty:
            how = "" if by_name else " by position, and arguments are given by name"
            raise UserCodeError(
                f"{spec} asks for {parameter.name!r}{how}; a {kind} function may ask for {', '.join(known)}"
            )
    return tuple(asked)


def _reward_argument(call: RewardCall, name: str) -> object:
    match name:
        case "metadata":
            return msgspec.json.decode(call.metadata) if call.metadata else {}
        case "tokens":
            return tokens_view(call.tokens).tolist()
        case "prompt_tokens":
            return tokens_view(call.prompt_tokens).tolist()
        case _:
            return cast("object", getattr(call, name))


def _filter_argument(group: Group, responses: tuple[str, ...], name: str) -> object:
    match name:
        case "group":
            return group
        case "rewards":
            return [sample.reward for sample in group.samples]
        case "responses":
            return list(responses)
        case "prompt":
            return group.prompt.text
        case "label":
            return group.prompt.label
        case _:
            return msgspec.json.decode(group.prompt.metadata) if group.prompt.metadata else {}


def _number(value: object, what: str) -> float:
    plain = _plain(value)
    if not isinstance(plain, bool | int | float):
        raise NoRewardError(f"{what} {_short(plain)}; expected a number")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoRewardError(f"{what} {number}; expected a finite number")
    return number


def _plain(value: object) -> object:
    """A NumPy or torch scalar as Python's own; anything else as it is."""
    item = getattr(value, "item", None)
    if getattr(value, "shape", None) == () and callable(item):
        return cast("Callable[[], Any]", item)()
    return value


def _short(value: object) -> str:
    text = f"{type(value).__name__} {value!r}" if value is not None else "None"
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
