"""What the reward backend and its worker processes say to each other, in the frames of
:mod:`penstock.backends.processes.frames`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.backends.engines.surroundings import Surroundings
from penstock.backends.processes.frames import LoadFailed, Ready
from penstock.backends.rewards.options import FunctionOptions
from penstock.backends.rewards.sampling_calls import PriorityCall, RewardedCall, Verdict


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """What the process of a reward function is told."""

    function: FunctionOptions
    surroundings: Surroundings


class RewardCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Score one response. Fields that the function does not ask for are empty."""

    id: int
    timeout_s: float
    prompt: str
    response: str
    label: str
    metadata: bytes
    """A JSON object, or nothing."""
    truncated: bool
    tokens: bytes
    prompt_tokens: bytes
    row: int
    group_id: int
    index: int
    conversation: str = ""
    messages: bytes = b""
    """Chat messages that the prompt was rendered from, as a JSON list; or nothing."""
    images: tuple[str, ...] = ()
    """Files of the images that the model was shown."""


class FilterCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Judge one group."""

    id: int
    timeout_s: float
    group: bytes
    """msgpack of :class:`penstock.messages.samples.Group`."""
    responses: tuple[str, ...]


class GroupCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Score all responses of a group together."""

    id: int
    timeout_s: float
    samples: tuple[RewardCall, ...]


class SampleCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Judge one sample."""

    id: int
    timeout_s: float
    sample: RewardCall
    rewarded: RewardedCall


class ShowCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Look at one group."""

    id: int
    timeout_s: float
    group: FilterCall
    verdict: Verdict


Call = RewardCall | GroupCall | FilterCall | SampleCall | ShowCall | PriorityCall


class Judged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A reward."""

    id: int
    elapsed_s: float
    value: float
    components: tuple[tuple[str, float], ...]
    answer: str = ""
    """What it took for the final answer; empty: none."""


class Kept(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A verdict on a group."""

    id: int
    elapsed_s: float
    keep: bool
    cause: str


class CallFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No reward and no verdict, for this reason."""

    id: int
    elapsed_s: float
    reason: str


class GroupJudged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What each response of a group got, in the order of the call."""

    id: int
    elapsed_s: float
    samples: tuple[Judged | CallFailed, ...]


Answer = Judged | GroupJudged | Kept | CallFailed

CALLS: Final[msgspec.msgpack.Decoder[list[Call]]] = msgspec.msgpack.Decoder(list[Call])
SAID: Final[msgspec.msgpack.Decoder[list[Ready | LoadFailed | Answer]]] = msgspec.msgpack.Decoder(
    list[Ready | LoadFailed | Answer]
)
