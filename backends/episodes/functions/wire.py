"""What an engine's backend and the process that plays its episodes say to each other, in the frames of
:mod:`penstock.backends.processes.frames`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from penstock.backends.episodes.playing import Answer, PlayRules, TurnAsked
from penstock.backends.episodes.protocol import CallMade
from penstock.backends.processes.frames import LoadFailed, Ready
from penstock.messages.samples import Media

EVALUATION: Final = "evaluation/"
"""With the number of a dataset of the evaluation: the name of its function."""


class NamedFunction(msgspec.Struct, frozen=True, array_like=True):
    """A function that plays."""

    name: str
    """By which a row asks for it; empty: every other row's."""
    spec: str
    """``file.py:function``, or the name of a ready one."""


class FunctionSpecs(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be loaded."""

    functions: tuple[NamedFunction, ...]
    function_key: str = ""
    """Of a row's metadata: which of them plays; empty: rows name none."""
    tools: tuple[str, ...] = ()
    environment: str = ""

    def in_words(self) -> str:
        """For messages."""
        return ", ".join(named.spec for named in self.functions)


# --- orders -----------------------------------------------------------------------------------------------------


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first order."""

    specs: FunctionSpecs
    model_folder: str
    rules: PlayRules


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Play an episode."""

    id: int
    function: str
    prompt: str
    num_prompt_tokens: int
    messages: bytes
    """A JSON list of chat messages."""
    label: str
    metadata: bytes
    """A JSON object, or nothing."""
    group_id: int
    index: int
    attempt: int
    seed: int
    is_evaluation: bool
    saved: bytes = b""
    """State to go on from; empty: the episode begins."""
    media: tuple[Media, ...] = ()
    """Images of the prompt."""


class TurnMade(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The model's turn that the episode has asked for."""

    id: int
    answer: Answer


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody needs this episode any more."""

    id: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered at once by a process whose event loop turns."""

    number: int


Order = Setup | Begin | TurnMade | Stop | Ping


# --- what it says ---------------------------------------------------------------------------------------------


class WantTurn(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The episode waits for the model."""

    id: int
    asked: TurnAsked


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A conversation of the episode goes on with this choice."""

    id: int
    choice: int
    into: int


class SavedState(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The episode can go on from after its last turn with this."""

    id: int
    saved: bytes


class Called(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function has called something beside the model."""

    id: int
    call: CallMade


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function has ended, the last word on this episode."""

    id: int
    outcome: Literal["completed", "truncated", "policy_error", "infra_error"]
    detail: str = ""
    reward: float | None = None
    components: tuple[tuple[str, float], ...] = ()


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to :class:`Ping`."""

    number: int


Said = WantTurn | Taken | SavedState | Called | Ended | Pong

ORDERS: Final[msgspec.msgpack.Decoder[list[Order]]] = msgspec.msgpack.Decoder(list[Order])
SAID: Final[msgspec.msgpack.Decoder[list[Ready | LoadFailed | Said]]] = msgspec.msgpack.Decoder(
    list[Ready | LoadFailed | Said]
)
