"""What the reward backend and its worker processes say to each other, over a socket pair.

A frame is a length (4 bytes, little-endian) and a msgpack list: many small calls or answers cost one system call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.engines.surroundings import Surroundings
from penstock.backends.processes.function_process import framed
from penstock.backends.rewards.options import FunctionOptions
from penstock.backends.rewards.sampling_calls import PriorityCall, RewardedCall, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence


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


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function is loaded."""

    names: tuple[str, ...]
    """What it asks for."""
    concurrency: int
    """Calls that run side by side: 1 for a plain function."""
    is_async: bool = False


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function cannot be loaded; the process ends."""

    message: str


class Judged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A reward."""

    id: int
    elapsed_s: float
    value: float
    components: tuple[tuple[str, float], ...]


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
Said = Ready | LoadFailed | Judged | GroupJudged | Kept | CallFailed

_ENCODER: Final = msgspec.msgpack.Encoder()
CALLS: Final[msgspec.msgpack.Decoder[list[Call]]] = msgspec.msgpack.Decoder(list[Call])
SAID: Final[msgspec.msgpack.Decoder[list[Said]]] = msgspec.msgpack.Decoder(list[Said])


def encoded(items: Sequence[Call] | Sequence[Said]) -> bytes:
    """The body of a frame with these items."""
    return _ENCODER.encode(items)


def frame(items: Sequence[Call] | Sequence[Said]) -> bytes:
    """One frame with these items."""
    return framed(encoded(items))
