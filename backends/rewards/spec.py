"""What the house knows of each reward function before it is loaded, and the registry of all of them.

``lines`` and ``random`` run in a thread of the Scorer's own process: their work is linear in the length of the
response, so they cannot hang, and a process would cost more than they do. The others get processes that can be killed:
most of them run the code of others on what a model wrote.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.backends.processes.user_code import UserCodeError, load_object
from penstock.backends.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.rewards.wire import Launched


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One reward function. It is looked at in the command line, so its module imports nothing heavy: that is for
    :attr:`open` to do."""

    open: Callable[[Launched], object]
    """The function, or a class of it, in the process that calls it, with keyword arguments as one in a file
    (``docs/rewards.md``). Raises UserFault."""
    keys: tuple[str, ...] = ()
    """Of one that returns a dictionary: what can be the reward (``reward.key``); empty: not known."""
    sees_groups: bool = False
    """It can be called with all samples of a group (``reward.per_group``)."""
    runs_here: bool = False
    """It is known to end, and needs no process of its own."""
    extra: str = ""
    """The extra of Penstock that it needs."""
    answer: Callable[[], Callable[[str, bool], str | None]] | None = None
    """Loads what extracts the answer of a response, given whether the length limit cut it off, in a form in which equal
    answers are equal texts; None: it has none that could be voted on."""


def _opened(path: str, launched: Launched) -> object:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"penstock.backends.rewards.{module}"), name)


def _of_box(path: str, launched: Launched) -> object:
    function = cast("Callable[..., object]", _opened(path, launched))
    from penstock.backends.rewards.boxes import boxed_answers

    @functools.wraps(function)  # which arguments it asks for as well
    def reward(*, response: str, **others: object) -> object:
        boxes = boxed_answers(response)
        return function(response=boxes[-1] if boxes else "", **others)

    return reward


def _remote(launched: Launched) -> object:
    from penstock.backends.rewards.remote import RemoteReward

    assert launched.function.remote is not None, "filled in by asked_functions"
    return RemoteReward(launched.function.remote, is_group=bool(launched.function.per_group))


def _judge(launched: Launched) -> object:
    from penstock.backends.rewards.judge import JudgeReward

    assert launched.function.judge is not None, "filled in by asked_functions"
    if launched.function.per_group:
        raise UserCodeError("reward.per_group: the reward 'judge' sees one sample; set it to false")
    return JudgeReward(launched.function.judge, launched.surroundings)


def _reward_model(launched: Launched) -> object:
    from penstock.backends.rewards.reward_model import ModelReward
    from penstock.backends.rewards.service_options import ModelScoreOptions

    return ModelReward(launched.function.reward_model or ModelScoreOptions(), launched.surroundings)


def _code(launched: Launched) -> object:
    from penstock.backends.rewards.code_answers import CodeReward
    from penstock.backends.rewards.options import CodeOptions

    return CodeReward(launched.function.code or CodeOptions())


def lines_reward(*, response: str, label: str, truncated: bool, row: int) -> float:
    """The reward ``lines``.

    Raises:
        NoRewardError: the row has no label to compare with.
    """
    from penstock.backends.data import lines
    from penstock.backends.rewards.functions import NoRewardError

    if not label:
        raise NoRewardError(f"row {row} has no label, and the reward 'lines' compares with it (data.label_key)")
    return lines.lines_reward(response, label, truncated=truncated)


def random_reward(group_id: int, index: int) -> float:
    """Uniform in ``[0, 1)``, and the same each time for one sample."""
    digest = hashlib.blake2b(f"{group_id}/{index}".encode(), digest_size=7).digest()
    return (int.from_bytes(digest) >> 3) / 2**53


def _extracting(path: str, boxed: bool) -> Callable[[str, bool], str | None]:
    module, _, name = path.partition(":")
    extract = cast(
        "Callable[[str, bool], str | None]",
        getattr(importlib.import_module(f"penstock.backends.rewards.{module}"), name),
    )
    if not boxed:
        return extract
    from penstock.backends.rewards.boxes import boxed_answers

    def of_box(response: str, truncated: bool) -> str | None:
        boxes = boxed_answers(response)
        return extract(boxes[-1], truncated) if boxes else None

    return of_box


def _spec(path: str, *, boxed: bool = False, answer: str = "", **known: Any) -> RewardSpec:  # noqa: ANN401 - as RewardSpec
    extract = functools.partial(_extracting, answer, boxed) if answer else None
    return RewardSpec(open=functools.partial(_of_box if boxed else _opened, path), answer=extract, **known)


_IFBENCH: Final = ("reward", "followed")
_GYM: Final = "reasoning_gym"
_GYM_REWARD: Final = "reasoning_gym_answers:reasoning_gym_reward"
REWARDS: Final = Registry(
    "reward function",
    "penstock.rewards",
    RewardSpec,
    {
        "lines": _spec("spec:lines_reward", runs_here=True),
        "random": _spec("spec:random_reward", runs_here=True),
        "math": _spec("math_answers:math_reward", answer="math_answers:math_answer"),
        "deepscaler": _spec("math_answers:deepscaler_reward", answer="math_answers:thought_answer"),
        "dapo": _spec("text_answers:dapo_reward", answer="text_answers:dapo_answer", keys=("score", "acc")),
        "gpqa": _spec("text_answers:gpqa_reward", answer="text_answers:letter_answer"),
        "f1": _spec("text_answers:f1_reward", answer="text_answers:words_answer"),
        "ifbench": _spec("instructions:ifbench_reward", keys=_IFBENCH),
        _GYM: _spec(_GYM_REWARD, extra=_GYM),
        "boxed_math": _spec("math_answers:boxed_math_reward", answer="math_answers:boxed_answer"),
        "boxed_gpqa": _spec("text_answers:gpqa_reward", answer="text_answers:letter_answer", boxed=True),
        "boxed_f1": _spec("text_answers:f1_reward", answer="text_answers:words_answer", boxed=True),
        "boxed_ifbench": _spec("instructions:ifbench_reward", boxed=True, keys=_IFBENCH),
        f"boxed_{_GYM}": _spec(_GYM_REWARD, boxed=True, extra=_GYM),
        "length_penalty": _spec("length:length_penalty"),
        "remote": RewardSpec(open=_remote, sees_groups=True),
        "judge": RewardSpec(open=_judge),
        "reward_model": RewardSpec(open=_reward_model),
        "code": RewardSpec(open=_code),
    },
    own=RewardSpec(open=lambda launched: load_object(launched.function.function), sees_groups=True),
)
"""``boxed_…`` see what is in the last box alone as the response. (The others look for boxes, or for words around the
answer, themselves.)"""
