"""Messages between us and a child process, over a stream: a socket pair or a pipe.

A frame is a length (4 bytes, little-endian) and a msgpack list of messages: many small ones cost one system call.
Nothing is ever unpickled. The first word of a child that runs users' functions is :class:`Ready` or
:class:`LoadFailed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LENGTH_BYTES: Final = 4
READ_BYTES: Final = 1 << 16
MAX_FRAME_BYTES: Final = 1 << 30

MessageT = TypeVar("MessageT")

_ENCODER: Final = msgspec.msgpack.Encoder()


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the process was to load is there."""

    names: tuple[str, ...] = ()
    """The arguments that the function asks for."""
    concurrency: int = 1
    """Calls that run side by side: 1 for a plain function."""
    is_async: bool = False


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the process was to load cannot be loaded; the process ends."""

    message: str


def frame(messages: Iterable[object]) -> bytes:
    """One frame with these messages."""
    body = _ENCODER.encode(list(messages))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class FrameReader(Generic[MessageT]):
    """Cuts a stream of bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[MessageT]]) -> None:
        self._decoder = decoder
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """Take the next bytes; give each message that is whole now.

        Raises:
            MsgspecError: there is something else in a frame.
        """
        self._data += data
        start = 0
        while (body := start + LENGTH_BYTES) <= len(self._data):
            size_bytes = int.from_bytes(self._data[start:body], "little")
            if size_bytes > MAX_FRAME_BYTES:  # before it is waited for, and kept meanwhile
                raise msgspec.DecodeError(f"a frame of {size_bytes} bytes; at most {MAX_FRAME_BYTES} are taken")
            end = body + size_bytes
            if end > len(self._data):
                break
            yield from self._decoder.decode(bytes(self._data[body:end]))
            start = end
        del self._data[:start]
