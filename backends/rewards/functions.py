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
``images``            files of the prompt's images and of those that came in an episode, ``list[str]``
``row``               number of the dataset row
``group_id``          number of the group
``index``             number of the sample in its group
====================  =======================================================================

It returns a number, a boolean, or a ``dict`` of named numbers with the reward under ``"reward"`` (or ``"score"``, or
what the scenario says); the others are reported beside it. A text under ``"answer"`` is what it took for the final
answer, which evaluations count votes of. It may be ``async``; many calls of it then run side by side
in one process. A class is called once without arguments, and the object it makes is the function.

A function for whole groups is called once with the samples of a group, in the order of their indices: ``responses``,
``conversations``, ``truncated``, ``tokens``, ``images`` and ``indices`` are lists; the others are as above. It returns
a list with one result for each sample; ``None`` in it says that this one has no reward.

A filter is called with those of ``group``, ``rewards``, ``responses``, ``prompt``, ``label`` and ``metadata`` that it
declares and returns ``True``, ``False``, or ``(False, "cause")``.

Invariants:

* Only a number that the function returned, of at most :data:`~penstock.messages.samples.MAX_REWARD` either way, becomes
  a reward. All else is a failure with a reason.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from penstock.backends.engines.surroundings import Surroundings
from penstock.backends.processes.user_code import UserCodeError, load_object, split_spec
from penstock.backends.rewards.extracted import bounded_answer
from penstock.backends.rewards.options import FunctionOptions
from penstock.backends.rewards.sampling_calls import (
    HOOK,
    OF_A_GROUP,
    OF_A_PROMPT,
    OF_A_SAMPLE,
    PRIORITY,
    SAMPLE_FILTER,
    PriorityCall,
    priority_arguments,
    sample_argument,
    verdict_argument,
)
from penstock.backends.rewards.signatures import asked_names
from penstock.backends.rewards.spec import REWARDS
from penstock.backends.rewards.wire import (
    CallFailed,
    GroupCall,
    GroupJudged,
    Judged,
    Kept,
    Launched,
    RewardCall,
    SampleCall,
    ShowCall,
)
from penstock.messages.arrays import tokens_view
from penstock.messages.option_keys import Names, is_user_code
from penstock.messages.samples import MAX_COMPONENTS, MAX_REWARD, Group
from penstock.messages.texts import counted, valid_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.backends.rewards.wire import Call

REWARD: Final = Names.REWARD.value
GROUP_REWARD: Final = "group reward"
FILTER: Final = Names.FILTER.value
SAMPLE_LISTS: Final = {"responses": "response", "conversations": "conversation", "indices": "index"}
"""What a function for groups calls the lists, and what one sample has under another name."""
_OF_BOTH: Final = ("label", "metadata", "truncated", "tokens", "prompt_tokens", "images", "row", "group_id")
NAMES: Final[dict[str, tuple[str, ...]]] = {
    REWARD: ("prompt", "response", "conversation", *_OF_BOTH, "index"),
    GROUP_REWARD: ("prompt", "responses", "conversations", *_OF_BOTH, "indices"),
    FILTER: ("group", "rewards", "responses", "prompt", "label", "metadata"),
    PRIORITY: OF_A_PROMPT,
}
NAMES[SAMPLE_FILTER] = (*NAMES[REWARD], *OF_A_SAMPLE)
NAMES[HOOK] = (*NAMES[FILTER], *OF_A_GROUP)
SCORING: Final = (REWARD, GROUP_REWARD)
"""Kinds that may be named without a file."""
TOTALS: Final = ("reward", "score")
ANSWER: Final = "answer"
"""Entry of a dictionary that is no number: the extracted answer."""
ASYNC_CONCURRENCY: Final = 64
MAX_SHOWN_CHARACTERS: Final = 80


class NoRewardError(Exception):
    """There can be no reward for this sample; the message is the whole reason."""


class Loaded(NamedTuple):
    """A function that is ready to be called."""

    function: Callable[..., object]
    names: tuple[str, ...]
    is_async: bool
    path: Path | None
    """The user's file; None for a built-in function."""
    concurrency: int = 1
    """Calls that run side by side."""
    extract: Callable[[str, bool], str | None] | None = None
    """What a built-in function takes for the answer in a response, which the limit has cut off or not; None: nothing
    that could be voted on."""


def load_function(kind: str, spec: str, launched: Launched | None = None) -> Loaded:
    """Load ``file.py:name``, or a reward by its name.

    Raises:
        UserFault: it cannot be loaded, or asks for something that there is not.
    """
    path, name = split_spec(spec) if kind not in SCORING or is_user_code(spec) else (None, spec)
    plain = Launched(
        function=FunctionOptions(function=spec, per_group=kind == GROUP_REWARD), surroundings=Surroundings()
    )
    found = REWARDS.spec(spec).open(launched or plain) if kind in SCORING else load_object(spec)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise UserCodeError(f"{path or kind}: {name!r} is {type(found).__name__}, which cannot be called")
    is_async = inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)
    concurrency = ASYNC_CONCURRENCY if is_async else 1
    if path is not None:
        return Loaded(found, asked_names(found, kind, spec, NAMES), is_async, path, concurrency)
    names: tuple[str, ...] | None = getattr(found, "names", None)  # of a service, which is told what it asks for
    asked = asked_names(found, kind, spec, NAMES) if names is None else names
    extract = REWARDS.spec(spec).answer
    return Loaded(
        found, asked, is_async, None, getattr(found, "concurrency", concurrency), extract() if extract else None
    )


def arguments(call: Call, names: tuple[str, ...]) -> dict[str, object]:
    """The keyword arguments of a call."""
    if isinstance(call, RewardCall):
        return {name: _reward_argument(call, name) for name in names}
    if isinstance(call, GroupCall):
        return {name: _group_argument(call, name) for name in names}
    if isinstance(call, PriorityCall):
        return dict(priority_arguments(call, names))
    if isinstance(call, SampleCall):
        return {name: _sample_argument(call, name) for name in names}
    if isinstance(call, ShowCall):
        own = {name: verdict_argument(call.verdict, name) for name in names if name in OF_A_GROUP}
        return {**arguments(call.group, tuple(name for name in names if name not in OF_A_GROUP)), **own}
    group = msgspec.msgpack.decode(call.group, type=Group)
    return {name: _filter_argument(group, call.responses, name) for name in names}


def judged(
    call_id: int, elapsed_s: float, returned: object, key: str | None = None, *, who: str = "the reward function"
) -> Judged:
    """What a reward function (``who``, in messages) returned, as a reward. ``key`` names the entry of a dictionary that
    is it.

    Raises:
        NoRewardError: it is none.
    """
    if not isinstance(returned, dict):
        return Judged(call_id, elapsed_s, _reward(returned, f"{who} returned"), ())
    parts = cast("dict[object, object]", returned)
    wanted = TOTALS if key is None else (key,)
    total = next((name for name in wanted if name in parts), None)
    if total is None:
        names = " or ".join(repr(name) for name in wanted)
        raise NoRewardError(f"{who} returned a dict without {names}; its keys are {_short(list(parts))}")
    components = tuple(
        (valid_text(str(name)), _reward(value, f"component {name!r} of the reward is"))
        for name, value in parts.items()
        if name != total and not (name == ANSWER and isinstance(value, str | None))
    )
    if len(components) > MAX_COMPONENTS:
        raise NoRewardError(f"{who} returned {len(components)} components; at most {MAX_COMPONENTS} are taken")
    answer = parts.get(ANSWER)
    extracted = bounded_answer(answer) if isinstance(answer, str) else ""
    return Judged(call_id, elapsed_s, _reward(parts[total], f"{total!r} of the reward is"), components, extracted)


def group_judged(call: GroupCall, elapsed_s: float, returned: object, key: str | None = None) -> GroupJudged:
    """What a function for groups returned, as a reward, or the reason for having none, of each sample.

    Raises:
        NoRewardError: it is no list of as many.
    """
    as_list = getattr(returned, "tolist", None)  # of NumPy and torch
    plain: object = as_list() if callable(as_list) else returned
    if not isinstance(plain, list | tuple):
        raise NoRewardError(
            f"the reward function returned {_short(plain)} for a group; expected a list with one reward for each of "
            f"its {len(call.samples)} samples"
        )
    results = cast("Sequence[object]", plain)
    if len(results) != len(call.samples):
        raise NoRewardError(
            f"the reward function returned {counted(len(results), 'reward')} for a group of "
            f"{counted(len(call.samples), 'sample')}"
        )
    each: list[Judged | CallFailed] = []
    for sample, result in zip(call.samples, results, strict=True):
        try:
            each.append(judged(sample.id, elapsed_s, result, key))
        except NoRewardError as error:
            each.append(CallFailed(sample.id, elapsed_s, str(error)))
    return GroupJudged(call.id, elapsed_s, tuple(each))


def kept(call_id: int, elapsed_s: float, returned: object) -> Kept:
    """What a filter returned, as a verdict.

    Raises:
        NoRewardError: it is none.
    """
    match _plain(returned):
        case bool(keep):
            return Kept(call_id, elapsed_s, keep, "")
        case (bool(keep), str(cause)):
            return Kept(call_id, elapsed_s, keep, "" if keep else valid_text(cause))
        case other:
            raise NoRewardError(f"the filter returned {_short(other)}; expected True, False, or (False, 'cause')")


def weighed(call_id: int, elapsed_s: float, returned: object) -> Judged | Kept:
    """What a curriculum returned: a number, or nothing for "not now".

    Raises:
        NoRewardError: it is neither.
    """
    if returned is None:
        return Kept(call_id, elapsed_s, False, "")
    return Judged(call_id, elapsed_s, _number(returned, "the priority function returned"), ())


def _sample_argument(call: SampleCall, name: str) -> object:
    return sample_argument(call.rewarded, name) if name in OF_A_SAMPLE else _reward_argument(call.sample, name)


def _reward_argument(call: RewardCall, name: str) -> object:
    match name:
        case "metadata":
            return msgspec.json.decode(call.metadata) if call.metadata else {}
        case "tokens":
            return tokens_view(call.tokens).tolist()
        case "prompt_tokens":
            return tokens_view(call.prompt_tokens).tolist()
        case "messages":
            return msgspec.json.decode(call.messages) if call.messages else None
        case "images":
            return list(call.images)
        case _:
            return cast("object", getattr(call, name))


def _group_argument(call: GroupCall, name: str) -> object:
    if name in SAMPLE_LISTS:
        return [_reward_argument(sample, SAMPLE_LISTS[name]) for sample in call.samples]
    if name in ("truncated", "tokens", "images"):
        return [_reward_argument(sample, name) for sample in call.samples]
    return _reward_argument(call.samples[0], name)


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


def _reward(value: object, what: str) -> float:
    number = _number(value, what)
    if abs(number) > MAX_REWARD:
        raise NoRewardError(f"{what} {number:g}; expected a number from -{MAX_REWARD:g} to {MAX_REWARD:g}")
    return number


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
