"""A fuzzer for the decoders of every inbox: anything but a ``WireError`` is a finding."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from fuzzing import fuzz, instrumented

with instrumented("penstock.messages"):
    from penstock.messages.inboxes import (
        BufferWire,
        EngineWorkerWire,
        FilterWire,
        LearnerWire,
        PromptSourceWire,
        ScorerWire,
        SupervisorWire,
        WeightPublisherWire,
    )
    from penstock.messages.wire import Header, InboxDecoder, WireError, encode_pack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.messages.base import Event

GOLDEN = Path(__file__).parents[1] / "unit" / "golden_events.json"
UNIONS: tuple[Any, ...] = (
    BufferWire, EngineWorkerWire, FilterWire, LearnerWire, PromptSourceWire, ScorerWire, SupervisorWire,
    WeightPublisherWire,
)  # fmt: skip
DECODERS: list[InboxDecoder[Event]] = [InboxDecoder(union) for union in UNIONS]


def good_frames() -> Iterator[bytes]:
    """One of each event that travels."""
    golden = msgspec.json.decode(GOLDEN.read_bytes(), type=dict[str, str])
    for union, decoder in zip(UNIONS, DECODERS, strict=True):
        for event in get_args(union):
            read = decoder.decode_event(bytes.fromhex(golden[event.__name__]))
            yield encode_pack([(Header("engine/0", 1, 1, 1, 0), read)])


def decode(data: bytes) -> None:
    """What every process does with what arrives, and what must hold of what it then believes."""
    for decoder in DECODERS:
        try:
            events, errors = decoder.decode(data)
        except WireError:
            continue
        assert all(isinstance(error, WireError) for error in errors)
        for header, event in events:
            encode_pack([(header, event)])


if __name__ == "__main__":
    frames = list(good_frames())
    fuzz(decode, [*frames, b"".join(frames[:2]), frames[0].replace(b"type", b"typo")])
