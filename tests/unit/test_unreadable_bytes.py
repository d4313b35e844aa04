"""Bytes that a kill, a disk or somebody else has made unreadable: each reader says so in the way that it documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.backends.ledger.kept_books import decoded
from penstock.backends.processes.frames import MAX_FRAME_BYTES, FrameReader, frame
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.service_messages import service_at
from penstock.backends.weights.tensor_file import LENGTH_BYTES, parse_header
from penstock.messages.errors import UserFault
from penstock.runtime.launch.runs import RECORD_NAME, read_record
from penstock.runtime.observability.following import StepFollower
from penstock.runtime.observability.jsonl import read_rows
from penstock.runtime.observability.removed import REMOVED_FILE, read_removed
from penstock.runtime.observability.trackers import METRICS_FILE

if TYPE_CHECKING:
    from pathlib import Path

NO_UTF_8 = b'{"max_disk_gb":1.0,"version":"\xff","name":"\xff","host":"\xff","__metadata__":{"a":"\xff"}}'
TOO_DEEP = b'{"more":' + b"[" * 100_000

unreadable = pytest.mark.parametrize("data", [NO_UTF_8, TOO_DEEP, b"{"], ids=["no UTF-8", "too deep", "cut off"])


class Named(msgspec.Struct):
    name: str


@unreadable
def test_a_run_s_files_are_said_to_be_damaged(data: bytes, tmp_path: Path) -> None:
    for name in (RECORD_NAME, METRICS_FILE, REMOVED_FILE, "rows.jsonl"):
        (tmp_path / name).write_bytes(data + b"\n")
    with pytest.raises(UserFault, match="cannot read it"):
        read_record(tmp_path)
    with pytest.raises(UserFault, match=r"rows\.jsonl, line 1"):
        list(read_rows(tmp_path / "rows.jsonl", Named))
    with pytest.raises(UserFault, match="before byte"):
        StepFollower(tmp_path).more()


@pytest.mark.parametrize("data", [TOO_DEEP, b"{"], ids=["too deep", "cut off"])
def test_what_was_removed_is_said_to_be_damaged(data: bytes, tmp_path: Path) -> None:
    (tmp_path / REMOVED_FILE).write_bytes(data)
    with pytest.raises(UserFault, match="removed"):
        read_removed(tmp_path)


@unreadable
def test_a_header_of_weights_is_none(data: bytes) -> None:
    whole = len(data).to_bytes(LENGTH_BYTES, "little") + data
    with pytest.raises(WeightFetchError, match="cannot be read"):
        parse_header(memoryview(whole))


def test_a_location_that_is_nested_too_deeply_names_no_service() -> None:
    with pytest.raises(WeightFetchError, match="no weight service"):
        service_at(TOO_DEEP.decode())


@pytest.mark.parametrize("data", [b"\x81\xa4more" + b"\x91" * 100_000, b"\x93\xa1\xff"], ids=["too deep", "no UTF-8"])
def test_kept_books_that_cannot_be_read_are_wrong(data: bytes) -> None:
    assert decoded(3, data).is_wrong


def test_a_frame_that_is_too_long_is_not_waited_for() -> None:
    reader = FrameReader(msgspec.msgpack.Decoder(list[str]))
    assert list(reader.feed(frame(["a", "b"]))) == ["a", "b"]
    assert list(reader.feed(MAX_FRAME_BYTES.to_bytes(4, "little"))) == [], "which may still come"
    other = FrameReader(msgspec.msgpack.Decoder(list[str]))
    with pytest.raises(msgspec.MsgspecError, match=f"a frame of {MAX_FRAME_BYTES + 1} bytes; at most"):
        list(other.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
