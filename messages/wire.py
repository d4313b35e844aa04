"""The wire: what one turn of an actor sends to one peer, as one frame.

A frame is msgpack: ``[format, [[header, body], …]]``. It is decoded whole against the union of the inbox; where that
fails, bodies are decoded one by one, so that one bad event costs itself and not its neighbours. Encoders and decoders
are built once. Nothing here ever unpickles.
"""

from __future__ import annotations

from types import GenericAlias
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

import msgspec

from penstock.messages.arrays import ArrayLengthError
from penstock.messages.base import UNREADABLE, Delivery, Event, Value

FORMAT: Final = 1
EventT = TypeVar("EventT", bound=Event)


class WireError(RuntimeError):
    """A frame or an event in it cannot be read. It is counted, logged and dropped."""


class TruncatedFrameError(WireError):
    """The bytes end early, or are no msgpack at all."""


class UnknownFormatError(WireError):
    """The frame has another format number than this version of Penstock."""


class UnknownEventError(WireError):
    """The tag is not one that this inbox hears."""


class WrongTypeError(WireError):
    """A field is missing or has another type than its struct says."""


class WrongLengthError(WireError):
    """An array has another length than its struct says."""


class Header(Value, frozen=True, array_like=True):
    """What goes before every event on the wire."""

    sender: str
    epoch: int
    """Incarnation of the sender."""
    link_sequence: int
    """Counts what this sender has sent to this receiver; a gap means that something was lost."""
    message_id: int
    """Counts what this sender has said; sent again, an event keeps its id."""
    cause: int
    """``message_id`` of what the sender was handling, 0 for a timer or a backend's answer."""


Envelope: TypeAlias = tuple[Header, Event]
"""An event with its header."""


class EncodedEvent(Event, frozen=True, kw_only=True):
    """A data event in the form in which it travels. It stands for that event at its sender, from when it is said until
    it is settled; no inbox hears it."""

    delivery: ClassVar[Delivery] = Delivery.DATA
    body: bytes


class _Pack(Value, frozen=True, array_like=True):
    format: int
    items: msgspec.Raw
    """Read only when the format is ours: another format may pack other things."""


class _Item(Value, frozen=True, array_like=True):
    header: msgspec.Raw
    body: msgspec.Raw


_encoder: Final = msgspec.msgpack.Encoder()
_pack_decoder: Final = msgspec.msgpack.Decoder(_Pack)
_items_decoder: Final = msgspec.msgpack.Decoder(list[tuple[Header, msgspec.Raw]])
_raw_items_decoder: Final = msgspec.msgpack.Decoder(list[_Item])
_header_decoder: Final = msgspec.msgpack.Decoder(Header)


def encode_event(event: Event) -> bytes:
    """The body of one event. Bodies are kept, so this one has no room to spare, as the encoder's own bytes have."""
    buffer = bytearray()
    _encoder.encode_into(event, buffer)
    return bytes(buffer)


def encode_pack(envelopes: list[Envelope]) -> bytes:
    """One frame of these envelopes, in order."""
    items = [(header, msgspec.Raw(event.body) if type(event) is EncodedEvent else event) for header, event in envelopes]
    return _encoder.encode((FORMAT, items))


class InboxDecoder(Generic[EventT]):
    """Decodes the frames of one inbox against the union of what it hears."""

    def __init__(self, union: Any) -> None:  # noqa: ANN401 - a type form, which no annotation of 3.11 describes
        self._body: msgspec.msgpack.Decoder[EventT] = msgspec.msgpack.Decoder(union)
        items = GenericAlias(list, GenericAlias(tuple, (Header, union)))
        self._frame: msgspec.msgpack.Decoder[tuple[int, list[tuple[Header, EventT]]]] = msgspec.msgpack.Decoder(
            GenericAlias(tuple, (int, items))
        )

    def decode(self, frame: bytes) -> tuple[list[tuple[Header, EventT]], list[WireError]]:
        """The readable events of a frame in order, and an error for each that is not.

        Raises:
            TruncatedFrameError: the frame itself cannot be read.
            UnknownFormatError: it has another format number.
            WrongTypeError: it is msgpack, and no list of headers and bodies.
        """
        try:
            form, whole = self._frame.decode(frame)
        except UNREADABLE:  # an event, a header, or the frame itself: told apart off the usual path
            form, whole = None, []
        if form == FORMAT:
            return whole, []
        events: list[tuple[Header, EventT]] = []
        errors: list[WireError] = []
        for header, raw in _items_of(frame, errors):
            try:
                events.append((header, self.decode_event(raw)))
            except WireError as error:
                errors.append(error)
        return events, errors

    def decode_event(self, body: bytes | msgspec.Raw) -> EventT:
        """One event.

        Raises:
            WireError: the subclass says what is wrong.
        """
        try:
            return self._body.decode(body)
        except UNREADABLE as error:
            raise _typed(error, "an event") from error


def _items_of(frame: bytes, errors: list[WireError]) -> list[tuple[Header, msgspec.Raw]]:
    """Headers and bodies of a frame; an unreadable header costs its own event and is added to ``errors``."""
    name = f"a frame of {len(frame)} bytes"
    try:
        pack = _pack_decoder.decode(frame)
    except UNREADABLE as error:
        raise _typed(error, name) from error
    if pack.format != FORMAT:
        raise UnknownFormatError(f"the frame has format {pack.format}, this version reads {FORMAT}")
    try:
        return _items_decoder.decode(pack.items)
    except UNREADABLE:  # one header, or the list itself: told apart off the usual path
        pass
    try:
        items = _raw_items_decoder.decode(pack.items)
    except UNREADABLE as error:
        raise _typed(error, name) from error
    readable: list[tuple[Header, msgspec.Raw]] = []
    for item in items:
        try:
            readable.append((_header_decoder.decode(item.header), item.body))
        except UNREADABLE as error:
            errors.append(_typed(error, "a header"))
    return readable


def _typed(error: Exception, what: str) -> WireError:
    if not isinstance(error, msgspec.ValidationError):
        return TruncatedFrameError(f"{what} cannot be read: {error}")
    if isinstance(error.__cause__, ArrayLengthError):
        return WrongLengthError(str(error))
    if str(error).endswith("- at `$.type`"):
        return UnknownEventError(str(error))
    return WrongTypeError(f"{what} has another shape: {error}")
