"""What is said between the PromptSource's backend and the process that runs a user's source of rows."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.backends.data.options import Scalar
from penstock.backends.processes.frames import LoadFailed, Ready
from penstock.messages.flow import RowOutcome


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is started with."""

    spec: str
    options: dict[str, Scalar]
    seed: int


class Restore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stand where this state was taken."""

    state: bytes
    """JSON."""


class Tell(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """These rows have come to this."""

    outcomes: tuple[RowOutcome, ...]


class Draw(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """So many rows are wanted."""

    num_rows: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The run ends."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """That was done, and the source stands here now."""

    rows: tuple[bytes, ...]
    """Each a JSON object."""
    state: bytes
    """JSON."""


class Raised(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The user's class has raised, or returned what cannot be used."""

    message: str


Order = Restore | Tell | Draw | Close
Said = Done | Raised

ORDERS: Final[msgspec.msgpack.Decoder[list[Order]]] = msgspec.msgpack.Decoder(list[Order])
SAID: Final[msgspec.msgpack.Decoder[list[Ready | LoadFailed | Said]]] = msgspec.msgpack.Decoder(
    list[Ready | LoadFailed | Said]
)
