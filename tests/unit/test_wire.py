"""The wire: golden bytes of every event that travels, and a typed error for whatever cannot be read.

``python tests/unit/test_wire.py`` writes ``golden_events.json`` anew. Do that when a message changes on purpose, and
look at the difference: a changed line is a changed wire format.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages import inboxes
from penstock.messages.base import Delivery, Event
from penstock.messages.engine_counts import EngineCounts
from penstock.messages.flow import GroupRejected, RefillAsked, SampleGenerated
from penstock.messages.ledger import SampleNote
from penstock.messages.membership import LeasesAsked
from penstock.messages.samples import (
    CountedSample,
    ExpertChoices,
    Media,
    Part,
    Prompt,
    SampleEnd,
    SampleKey,
    VersionSpan,
)
from penstock.messages.top_logprobs import TopLogprobs
from penstock.messages.training import Balance, StopAsked
from penstock.messages.weights import WeightManifest
from penstock.messages.wire import (
    EncodedEvent,
    Header,
    InboxDecoder,
    TruncatedFrameError,
    UnknownEventError,
    UnknownFormatError,
    WireError,
    WrongLengthError,
    WrongTypeError,
    encode_event,
    encode_pack,
)
from penstock.runtime.observability.summary import generated_tokens

GOLDEN = Path(__file__).with_name("golden_events.json")
UNIONS = (
    inboxes.PromptSourceWire, inboxes.EngineWorkerWire, inboxes.ScorerWire, inboxes.FilterWire, inboxes.BufferWire,
    inboxes.LearnerWire, inboxes.WeightPublisherWire, inboxes.SupervisorWire,
)  # fmt: skip
EVENTS: list[type[Event]] = sorted(
    {event for union in UNIONS for event in get_args(union)}, key=lambda event: event.__name__
)
PART = Part(
    tokens=b"\1\0\0\0\2\0\0\0",
    logprobs=b"\0\0\0\xbf\0\0\x80\xbf",
    spans=(VersionSpan(3, 1), VersionSpan(4, 1)),
    loss_mask=b"\1\0",
    context_tokens=b"\7\0\0\0",
    experts=ExpertChoices(1, 2, 1, b"\0\3\2\1"),
    counts=EngineCounts(9, 3, 4, 2),
)
MEDIA = (Media("image", "https://example.org/a.png"),)
PROMPT = Prompt(
    row=5, epoch=1, tokens=b"\1\0\0\0", text="two + two", label="4", metadata=b"{}", media=MEDIA, num_retries=3
)
TOP = TopLogprobs(2, b"\1\0\0\0\2\0\0\0", b"\0\0\0\xbf\0\0\x80\xbf")
HEADER = Header("engine/0", 2, 17, 23, 11)


def example(kind: msgspec.inspect.Type) -> Any:  # noqa: ANN401 - of any type there is
    """A value of a msgspec type, with every field filled in, always the same."""
    match kind:
        case msgspec.inspect.StructType():
            special: dict[type[msgspec.Struct], msgspec.Struct] = {Part: PART, Prompt: PROMPT, TopLogprobs: TOP}
            if kind.cls is WeightManifest:  # whose base is a manifest without one
                own = {f.name: example(f.type) for f in kind.fields if f.name != "base"}
                return WeightManifest(**own, base=WeightManifest(**own))
            return special.get(kind.cls) or kind.cls(**{f.name: example(f.type) for f in kind.fields})
        case msgspec.inspect.UnionType():
            return example(next(t for t in kind.types if not isinstance(t, msgspec.inspect.NoneType)))
        case msgspec.inspect.VarTupleType():
            return (example(kind.item_type),)
        case msgspec.inspect.EnumType():
            return list(kind.cls)[-1]
        case msgspec.inspect.IntType():
            return 7
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.BytesType():
            return b"\0\0\x80\x3f"
        case _:
            raise TypeError(f"no example of {kind}")


def example_event(event: type[Event]) -> Event:
    value = example(msgspec.inspect.type_info(event))
    assert isinstance(value, Event)
    return value


def golden() -> dict[str, str]:
    return msgspec.json.decode(GOLDEN.read_bytes(), type=dict[str, str])


def test_golden_file_has_every_event_that_travels() -> None:
    assert sorted(golden()) == [event.__name__ for event in EVENTS]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_event_has_its_golden_bytes_and_reads_back(event: type[Event]) -> None:
    value = example_event(event)
    body = encode_event(value)
    assert body.hex() == golden()[event.__name__], "run: python tests/unit/test_wire.py, if the change is meant"
    assert InboxDecoder[Event](event).decode_event(body) == value


def test_a_dropped_sample_that_was_recorded_without_components_has_none() -> None:
    """Groups in ledgers of before."""
    recorded = msgspec.msgpack.encode([3, 0.5])
    assert msgspec.msgpack.decode(recorded, type=CountedSample) == CountedSample(index=3, reward=0.5, components=())


def test_samples_and_balances_that_were_recorded_without_given_tokens_have_none() -> None:
    """Ledgers and summaries of before."""
    note = msgspec.msgpack.encode([3, 0, "engine/0", "completed", 7, 1, 2, 0.5])
    assert msgspec.msgpack.decode(note, type=SampleNote).num_made_tokens == 7
    end = msgspec.msgpack.encode({"key": [1, 2], "state": "failed", "cause": "why", "num_tokens": 5})
    assert msgspec.msgpack.decode(end, type=SampleEnd).num_made_tokens == 5
    count = {"state": "trained", "cause": "", "num_samples": 2, "num_tokens": 9}
    balance = msgspec.json.encode({"issued": 3, "in_system": 1, "ended": [count]})
    found = msgspec.json.decode(balance, type=Balance)
    assert found.is_balanced
    assert (found.generated_tokens, generated_tokens(found)) == (None, 9)


def test_no_event_that_travels_is_local() -> None:
    assert not [event for event in EVENTS if event.delivery is Delivery.LOCAL]


def test_pack_reads_back_in_order_with_headers() -> None:
    events = [StopAsked(reason="a"), LeasesAsked(round=1, members=()), StopAsked(reason="b")]
    frame = encode_pack([(HEADER, event) for event in events])
    assert InboxDecoder[Event](inboxes.BufferWire).decode(frame) == ([(HEADER, event) for event in events], [])


def decode(body: dict[str, Any], union: object = inboxes.BufferWire) -> None:
    InboxDecoder[Event](union).decode_event(msgspec.msgpack.encode(body))


def test_unknown_tag_is_named() -> None:
    with pytest.raises(UnknownEventError, match="GroupScoerd"):
        decode({"type": "GroupScoerd"})


def test_event_of_another_inbox_is_unknown() -> None:
    body = encode_event(RefillAsked(missing=(SampleKey(1, 2),)))
    with pytest.raises(UnknownEventError, match="RefillAsked"):
        InboxDecoder[Event](inboxes.BufferWire).decode_event(body)


def test_wrong_type_names_the_field() -> None:
    with pytest.raises(WrongTypeError, match=r"group_id"):
        decode({"type": "GroupRejected", "group_id": "seven", "cause": "", "ended": []})


def test_missing_field_is_named() -> None:
    with pytest.raises(WrongTypeError, match="cause"):
        decode({"type": "GroupRejected", "group_id": 1, "ended": []})


def test_unknown_outcome_inside_an_event_is_a_wrong_type() -> None:
    body = msgspec.to_builtins(example_event(SampleGenerated))
    body["sample"]["outcome"] = {"type": "infra_error", "detail": "no model made this"}
    with pytest.raises(WrongTypeError):
        decode(body, inboxes.ScorerWire)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", b"\0\0\0\0"),
        ("tokens", b"\0\0\0\0\0"),
        ("loss_mask", b"\1"),
        ("spans", [[0, 3]]),
        ("context_tokens", b"\0"),
    ],
)
def test_array_of_wrong_length_is_refused(field: str, value: object) -> None:
    body = msgspec.to_builtins(example_event(SampleGenerated), builtin_types=(bytes,))
    body["sample"]["parts"][0][field] = value
    with pytest.raises(WrongLengthError, match=field):
        decode(body, inboxes.ScorerWire)


def test_every_truncation_of_a_frame_is_an_error() -> None:
    frame = encode_pack([(HEADER, example_event(SampleGenerated))])
    decoder = InboxDecoder[Event](inboxes.ScorerWire)
    for length in range(len(frame)):
        with pytest.raises(TruncatedFrameError):
            decoder.decode(frame[:length])


def test_trailing_bytes_are_an_error() -> None:
    frame = encode_pack([(HEADER, StopAsked(reason=""))])
    with pytest.raises(TruncatedFrameError):
        InboxDecoder[Event](inboxes.BufferWire).decode(frame + b"\0")


def test_other_format_is_told_from_damage_whatever_it_packs() -> None:
    frame = msgspec.msgpack.encode((2, {"something": "else"}))
    with pytest.raises(UnknownFormatError, match="format 2"):
        InboxDecoder[Event](inboxes.BufferWire).decode(frame)


def test_bad_event_costs_itself_only() -> None:
    good = StopAsked(reason="stays")
    rejected = GroupRejected(group_id=1, cause="", ended=())
    foreign = example_event(RefillAsked)
    frame = encode_pack([(HEADER, event) for event in (good, foreign, rejected)])
    events, errors = InboxDecoder[Event](inboxes.BufferWire).decode(frame)
    assert [event for _, event in events] == [good, rejected]
    assert [type(error) for error in errors] == [UnknownEventError]


def test_bad_header_costs_its_event_only() -> None:
    stop = {"type": "StopAsked", "reason": ""}
    header = ["engine/0", 0, 1, 1, 0]
    frame = msgspec.msgpack.encode([1, [[["engine/0", "zero"], stop], [header, stop]]])
    events, errors = InboxDecoder[Event](inboxes.BufferWire).decode(frame)
    assert [event for _, event in events] == [StopAsked(reason="")]
    assert [type(error) for error in errors] == [WrongTypeError]


def test_text_that_is_no_unicode_and_deep_nesting_are_errors_of_the_wire() -> None:
    decoder = InboxDecoder[Event](inboxes.BufferWire)
    _, errors = decoder.decode(b"\x92\x01\x91\x92\x96\xa3abc\x01\x01\x01\x01\xc4\x00\x81\xa4type\xa3\xff\xff\xff")
    assert [type(error) for error in errors] == [TruncatedFrameError]
    with pytest.raises(WireError):
        decoder.decode(b"\x92\x01" + b"\x91" * 100_000)


@pytest.mark.parametrize(
    "event", [event for event in EVENTS if event.delivery is Delivery.DATA], ids=lambda event: event.__name__
)
def test_an_event_that_is_encoded_already_travels_as_itself(event: type[Event]) -> None:
    value = example_event(event)
    encoded = EncodedEvent(body=encode_event(value))
    assert encode_pack([(HEADER, encoded)]) == encode_pack([(HEADER, value)])


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_wire_errors(data: bytes) -> None:
    decoder = InboxDecoder[Event](inboxes.BufferWire)
    with contextlib.suppress(WireError):
        decoder.decode(data)


@given(st.data())
def test_damaged_frames_never_raise_anything_but_wire_errors(data: st.DataObject) -> None:
    frame = bytearray(encode_pack([(HEADER, example_event(SampleGenerated))]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        InboxDecoder[Event](inboxes.ScorerWire).decode(bytes(frame))


if __name__ == "__main__":
    fresh = {event.__name__: encode_event(example_event(event)).hex() for event in EVENTS}
    GOLDEN.write_text(json.dumps(fresh, indent=1, sort_keys=True) + "\n")
