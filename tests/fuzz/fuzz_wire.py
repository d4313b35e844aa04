"""A fuzzer for the decoders of every inbox, guided by coverage: ``python fuzz_wire.py -runs=20000 FOLDER``.

A process of its own, because libFuzzer ends the one it runs in. Anything but a ``WireError`` is a finding and makes the
exit code differ from 0. The folder takes the frames that reach something new.
"""

# atheris has no types:
# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atheris

with atheris.instrument_imports(include=["penstock.messages"]):
    from penstock.messages.arrays import pack_floats, pack_tokens
    from penstock.messages.flow import SampleGenerated
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
    from penstock.messages.samples import Completed, Part, Prompt, Sample, SampleKey, VersionSpan
    from penstock.messages.wire import Envelope, Header, InboxDecoder, WireError, encode_pack

if TYPE_CHECKING:
    from penstock.messages.base import Event

UNIONS: tuple[Any, ...] = (
    BufferWire,
    EngineWorkerWire,
    FilterWire,
    LearnerWire,
    PromptSourceWire,
    ScorerWire,
    SupervisorWire,
    WeightPublisherWire,
)
DECODERS: list[InboxDecoder[Event]] = [InboxDecoder(union) for union in UNIONS]


def good_frame() -> bytes:
    part = Part(tokens=pack_tokens([1, 2]), logprobs=pack_floats([0.0, 0.0]), spans=(VersionSpan(0, 2),))
    sample = Sample(key=SampleKey(0, 0), engine="engine/0", parts=(part,), outcome=Completed())
    event = SampleGenerated(sample=sample, group_size=1, prompt=Prompt(row=0, epoch=0, tokens=pack_tokens([3])))
    return encode_pack([Envelope(Header("engine/0", 1, 1, 1, 0), event)])


def decode(data: bytes) -> None:
    """What every process does with what arrives, and what must hold of what it then believes."""
    for decoder in DECODERS:
        try:
            events, errors = decoder.decode(data)
        except WireError:
            continue
        assert all(isinstance(error, WireError) for error in errors)
        for header, event in events:
            encode_pack([Envelope(header, event)])


if __name__ == "__main__":
    corpus = Path(sys.argv[-1])
    (corpus / "good").write_bytes(good_frame())
    (corpus / "unknown").write_bytes(good_frame().replace(b"SampleGenerated", b"SampleGeneratde"))
    atheris.Setup(sys.argv, decode)
    atheris.Fuzz()
