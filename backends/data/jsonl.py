"""Rows from a file with one JSON object a line, plain or compressed by gzip (``.gz``) or Zstandard (``.zst``). Blank
lines are no rows.

Invariants:

* An object that names a key twice is a bad row: decoders keep one of the two values and say nothing. A row in which the
  keys found are as many as the bytes have ends of keys is good; only of the others the names are looked at.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from typing import TYPE_CHECKING, BinaryIO, Final, cast

import msgspec

from penstock.backends.data.problems import DataError, RowProblem
from penstock.backends.data.row import MAX_SHOWN_CHARACTERS, RawRow, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

MAX_LINE_BYTES: Final = 1 << 28
"""What is packed into little may be one line without an end."""
_DECODER = msgspec.json.Decoder()


def jsonl_rows(path: Path) -> Iterator[RawRow | RowProblem]:
    """One row a line; lines are counted from 1.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with _opened(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
                if len(line) == MAX_LINE_BYTES:
                    raise DataError(f"{path}:{number}: a line of more than {MAX_LINE_BYTES} bytes; no row is as long")
                if line.removeprefix(codecs.BOM_UTF8).strip():
                    yield parsed_line(f"{path}:{number}", line, is_first=number == 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path} cannot be read: {reason}") from error


def _opened(path: Path) -> BinaryIO:
    match path.suffix.lower():
        case ".gz":
            return cast("BinaryIO", gzip.open(path, "rb"))
        case ".zst":
            import pyarrow as pa

            return cast("BinaryIO", io.BufferedReader(pa.input_stream(str(path), compression="zstd")))
        case _:
            return path.open("rb")


def parsed_line(place: str, line: bytes, *, is_first: bool) -> RawRow | RowProblem:
    """A line that is not blank. ``is_first``: of its file, so that it may begin with a byte-order mark."""
    if is_first:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        value: object = _DECODER.decode(line)
        repeated = _repeated_key(line, cast("dict[str, object]", value)) if isinstance(value, dict) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _malformed(place, line.rstrip(b"\r\n"), is_first=is_first)
    if isinstance(value, dict):
        if repeated is not None:
            name = repeated[:MAX_SHOWN_CHARACTERS]
            return RowProblem(
                place,
                "a key stands twice",
                f"the key {name!r} stands twice in one object, and only one of its values could count; leave one",
            )
        return RawRow(place, value)  # pyright: ignore[reportUnknownArgumentType]  # JSON keys are texts
    message = f"expected one JSON object a line, found {shown(value)}"
    if is_first and isinstance(value, list):
        message += ". The file holds one array; `jq -c '.[]' FILE > rows.jsonl` turns it into lines"
    return RowProblem(place, "not a JSON object", message)


def _repeated_key(line: bytes, row: dict[str, object]) -> str | None:
    """The first key that stands twice in one object of the line."""
    num_colons = line.count(b":")
    num_keys = len(row) if num_colons == len(row) else _num_keys(row)
    if num_colons == num_keys:  # each key has one
        return None
    num_ends = line.count(b'":') - line.count(b'\\":')  # without those within texts
    is_uncounted = b" :" in line or b"\t:" in line or b"\r:" in line or b'\\\\":' in line
    if num_ends == num_keys and not is_uncounted:  # by whitespace before a colon, or a key that ends in a backslash
        return None
    repeated: list[str] = []

    def look(pairs: list[tuple[str, object]]) -> None:
        seen = set[str]()
        for key, _ in pairs:
            if key in seen:
                repeated.append(key)
            seen.add(key)

    json.loads(line, object_pairs_hook=look, parse_int=str)  # a number may have any number of digits
    return repeated[0] if repeated else None


def _num_keys(row: dict[str, object]) -> int:
    """Of the row and everything inside; exact types, as the decoder makes no others."""
    num_keys = 0
    inside: list[object] = [row]
    for value in inside:  # which grows meanwhile
        values = cast("Iterable[object]", value)
        if type(value) is dict:
            num_keys += len(value)
            values = value.values()
        inside += [each for each in values if type(each) is dict or type(each) is list]
    return num_keys


def _malformed(place: str, line: bytes, *, is_first: bool) -> RowProblem:
    """Say where; the fast decoder counts bytes, people count columns."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode()) + 1
        return RowProblem(f"{place}:{column}", "not UTF-8", "not UTF-8; save the file as UTF-8")
    if is_first and text.strip() in ("{", "["):
        return RowProblem(
            place,
            "malformed JSON",
            "the JSON is spread over several lines; expected one object a line (`jq -c . FILE > rows.jsonl` joins "
            "objects, `jq -c '.[]'` takes an array apart)",
        )
    try:
        json.loads(text, parse_constant=_refuse_constant, parse_int=_read_int)
    except json.JSONDecodeError as error:
        before = text[max(0, error.pos - 20) : error.pos]
        after = text[error.pos : error.pos + 20]
        where = f"between {before!r} and {after!r}" if after else f"at the end of the line, after {before!r}"
        return RowProblem(f"{place}:{error.colno}", "malformed JSON", f"malformed JSON: {_what(error.msg)}, {where}")
    except (ValueError, RecursionError) as error:
        return RowProblem(place, "malformed JSON", f"malformed JSON: {error}")
    return RowProblem(place, "malformed JSON", "malformed JSON: it holds a number or an escape outside the standard")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value; write null or a number")


def _read_int(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ValueError(f"a number of {len(digits)} digits is longer than can be read; write it as a text") from None


def _what(text: str) -> str:
    """Of a message that goes on with the place (``Unterminated string starting at``), what stands there."""
    return (text[:1].lower() + text[1:]).removesuffix(" at").removesuffix(" starting")
