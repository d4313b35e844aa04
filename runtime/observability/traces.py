"""The traces in a run's folder: where they lie, and how the files of all actors are joined into one trace.

``traces/salt`` holds the run's salt in hex behind the form of the ids, from which every trace id follows.
``traces/<actor>-<epoch>.jsonl`` holds the spans of one incarnation of an actor (``/`` in a name becomes ``-``): a line
a batch, as :mod:`.span_file` has it.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.errors import UserFault
from penstock.runtime.observability.group_spans import unpacked
from penstock.runtime.observability.otlp_json import OTLP_START, TracesData, all_attributes, otlp_line
from penstock.runtime.observability.removed import SPANS, removed_text
from penstock.runtime.observability.segments import Line, files_in, whole_lines
from penstock.runtime.observability.span_file import SpanLine
from penstock.runtime.observability.spans import (
    SALT_BYTES,
    AttributeValue,
    new_salt,
    step_trace_id,
    trace_id_of,
    version_trace_id,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

TRACES_FOLDER: Final = "traces"
SALT_FILE: Final = "salt"
FORM: Final = "2 "
"""Of the ids, before the salt; earlier versions of Penstock derived others, and wrote no form."""
BATCH_S: Final = 30.0
"""Spans of one line of a file ended within so much of each other: they are written half a second after they end."""
_ENDED: Final = re.compile(rb'"end(?:_ns":|TimeUnixNano":")(\d+)')
MAX_SEARCHED: Final = 16
"""Traces that are searched for in a line before it is decoded; with more of them nearly every line has one."""


class SpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One span of a trace, with who recorded it."""

    actor: str
    epoch: int
    name: str
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    parent_id: str
    """Empty for a root."""
    start_ns: int
    """Unix time, as ``end_ns``."""
    end_ns: int
    attributes: dict[str, AttributeValue]
    links: tuple[tuple[str, str], ...] = ()
    """Trace id and span id of the spans that this one is linked to."""

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def open_traces(run_folder: Path) -> bytes:
    """Make the folder for traces; returns the run's salt (16 bytes), that of an earlier start if there was one.

    Raises:
        UserFault: the file with the salt is damaged.
    """
    path = run_folder / TRACES_FOLDER / SALT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or not path.read_text().startswith(FORM):
        # Whole or not at all: a torn salt would cut every later trace off from the earlier ones.
        partial = path.with_suffix(".partial")
        partial.write_text(f"{FORM}{new_salt().hex()}\n")
        os.replace(partial, path)
    return _read_salt(path)


def span_file(run_folder: Path, actor: str, epoch: int) -> Path:
    """Where one incarnation of an actor writes its spans."""
    return run_folder / TRACES_FOLDER / f"{actor.replace('/', '-')}-{epoch}.jsonl"


def read_trace(run_folder: Path, group_id: int, index: int) -> list[SpanRow]:
    """All spans of one sample, of all actors, by their start.

    Raises:
        UserFault: the run was not traced, or this sample was not (or not sampled), or a file of spans is damaged.
    """
    rows = read_spans(run_folder, trace_id_of(run_salt(run_folder), group_id, index))
    if not rows:
        raise UserFault(
            f"there is no trace of sample {group_id}/{index} in {run_folder / TRACES_FOLDER}: it was never issued, or "
            f"observability.trace_fraction left it out{_or_removed(run_folder)}"
        )
    return rows


def read_step(run_folder: Path, version: int) -> list[SpanRow]:
    """All spans of the step that made this version and of the version's way to the engines, by their start.

    Raises:
        UserFault: the run was not traced, or has no such step, or a file of spans is damaged.
    """
    salt = run_salt(run_folder)
    rows = [
        *read_spans(run_folder, step_trace_id(salt, version)),
        *read_spans(run_folder, version_trace_id(salt, version)),
    ]
    if not rows:
        removed = _or_removed(run_folder)
        raise UserFault(f"there is no trace of step {version} in {run_folder / TRACES_FOLDER}{removed}")
    return sorted(rows, key=_order)


def read_spans(run_folder: Path, trace_id: bytes) -> list[SpanRow]:
    """All spans of one trace, of all actors, by their start; none if there is no such trace.

    Raises:
        UserFault: a file of spans is damaged.
    """
    return sorted(each_span(run_folder, {trace_id.hex()}), key=_order)


def each_span(run_folder: Path, trace_ids: Collection[str] | None = None) -> Iterator[SpanRow]:
    """The spans of these traces (32 hexadecimal digits each), or of all, as they stand in the files of the actors.

    Raises:
        UserFault: a file of spans is damaged.
    """
    for path in files_in(run_folder / TRACES_FOLDER):
        yield from _spans_in(path, trace_ids)


def spans_between(run_folder: Path, start_ns: int, end_ns: int) -> Iterator[SpanRow]:
    """The spans that ended in this time, as :func:`each_span`; of a long run the rest is not decoded."""
    around = start_ns - round(1e9 * BATCH_S), end_ns + round(1e9 * BATCH_S)
    for path in files_in(run_folder / TRACES_FOLDER):
        for row in _spans_in(path, None, around):
            if start_ns <= row.end_ns <= end_ns:
                yield row


def spans_by_trace(run_folder: Path, trace_ids: Collection[str]) -> dict[str, list[SpanRow]]:
    """The spans of each of these traces, by their start; of one without spans an empty list.

    Raises:
        UserFault: a file of spans is damaged.
    """
    found: dict[str, list[SpanRow]] = {trace_id: [] for trace_id in trace_ids}
    for row in each_span(run_folder, found.keys()) if found else ():
        found[row.trace_id].append(row)
    return {trace_id: sorted(rows, key=_order) for trace_id, rows in found.items()}


def run_salt(run_folder: Path) -> bytes:
    """The salt of a run that was traced, 16 bytes.

    Raises:
        UserFault: the run was not traced, or the file with the salt is damaged.
    """
    return _read_salt(_salt_file(run_folder))


def _salt_file(run_folder: Path) -> Path:
    path = run_folder / TRACES_FOLDER / SALT_FILE
    if not path.exists():
        raise UserFault(f"{run_folder} has no traces; was it run with observability.tracing: true?")
    return path


def _or_removed(run_folder: Path) -> str:
    removed = removed_text(run_folder, SPANS)
    return f"; or it is gone: {removed}" if removed else ""


def _read_salt(path: Path) -> bytes:
    text = path.read_text().strip()
    if len(text) == 2 * SALT_BYTES:
        raise UserFault(
            f"{path.parent} was written by an earlier version of Penstock, whose traces had other ids: read it with "
            f"that version, or write it as OTLP/JSON with penstock trace --otlp FILE"
        )
    try:
        salt = bytes.fromhex(text.removeprefix(FORM))
    except ValueError:
        salt = b""
    if len(salt) != SALT_BYTES:
        raise UserFault(f"{path} must hold {FORM!r} and {SALT_BYTES} bytes in hexadecimal, got {text[:80]!r}")
    return salt


def _order(row: SpanRow) -> tuple[int, int, str]:
    # What lasts longer first, so that a stage stands before what happened in it.
    return row.start_ns, -row.end_ns, row.name


_decoder: Final = msgspec.json.Decoder(SpanLine)
_otlp_decoder: Final = msgspec.json.Decoder(TracesData)


def write_otlp(run_folder: Path, path: Path) -> int:
    """Write all spans of a run as OTLP/JSON, whole or not at all; returns how many batches they are, each a line.

    Raises:
        UserFault: the run was not traced, a file of spans is damaged, or the new one cannot be written.
    """
    _salt_file(run_folder)
    partial, count = path.with_name(f"{path.name}.partial"), 0
    try:
        with partial.open("wb") as file:
            for line in (each for one in files_in(run_folder / TRACES_FOLDER) for each in whole_lines(one)):
                data = _decoded(line)
                file.write((otlp_line(data) + b"\n") if isinstance(data, SpanLine) else line.data)
                count += 1
        os.replace(partial, path)
    except OSError as error:
        raise UserFault(f"{path}: the spans cannot be written: {error.strerror}") from None
    return count


def _decoded(line: Line) -> SpanLine | TracesData:
    try:
        if line.data.startswith(OTLP_START):
            return _otlp_decoder.decode(line.data)
        data = _decoder.decode(line.data)
        return msgspec.structs.replace(data, spans=[each for span in data.spans for each in unpacked(span)])
    except ValueError as error:  # msgspec's too
        raise UserFault(f"{line.file}, line {line.number}: {error}") from error


def _spans_in(
    path: Path, trace_ids: Collection[str] | None, around: tuple[int, int] | None = None
) -> Iterator[SpanRow]:
    is_few = trace_ids is not None and len(trace_ids) <= MAX_SEARCHED
    needles = [needle for each in trace_ids or () for needle in _written(each)] if is_few else []
    for line in whole_lines(path):
        # A search in bytes passes over the lines of other traces a hundred times quicker than decoding them.
        if is_few and not any(needle in line.data for needle in needles):
            continue
        first = None if around is None else _ENDED.search(line.data)
        if around is not None and first is not None and not around[0] <= int(first[1]) <= around[1]:
            continue
        data = _decoded(line)
        yield from _rows(data, trace_ids) if isinstance(data, SpanLine) else _otlp_rows(data, trace_ids)


def _written(trace_id: str) -> tuple[bytes, bytes]:
    """A trace's id as it stands in lines of OTLP; and of lines of tuples what the ids of all samples of its group have
    in common, six bytes of the second half that are whole characters: a record may be of several samples."""
    return b64encode(bytes.fromhex(trace_id))[12:20], trace_id.encode()


def _rows(line: SpanLine, trace_ids: Collection[str] | None) -> Iterator[SpanRow]:
    actor, epoch = _recorded_by(line.resource)
    for span in line.spans:
        trace_id, span_id, parent_id, name, start_ns, end_ns, _, links = span
        if trace_ids is None or trace_id.hex() in trace_ids:
            yield SpanRow(
                actor=actor,
                epoch=epoch,
                name=name,
                trace_id=trace_id.hex(),
                span_id=span_id.hex(),
                parent_id=parent_id.hex(),
                start_ns=start_ns,
                end_ns=end_ns,
                attributes=dict(all_attributes(span)),
                links=tuple((trace.hex(), linked.hex()) for trace, linked in links),
            )


def _otlp_rows(data: TracesData, trace_ids: Collection[str] | None) -> Iterator[SpanRow]:
    for batch in data.resource_spans:
        about = {attribute.key: attribute.value.plain() for attribute in batch.resource.attributes}
        actor, epoch = _recorded_by(about)
        for span in (each for scope in batch.scope_spans for each in scope.spans):
            if trace_ids is None or span.trace_id in trace_ids:
                yield SpanRow(
                    actor=actor,
                    epoch=epoch,
                    name=span.name,
                    trace_id=span.trace_id,
                    span_id=span.span_id,
                    parent_id=span.parent_span_id,
                    start_ns=int(span.start_time_unix_nano),
                    end_ns=int(span.end_time_unix_nano),
                    attributes={attribute.key: attribute.value.plain() for attribute in span.attributes},
                    links=tuple((link.trace_id, link.span_id) for link in span.links),
                )


def _recorded_by(resource: Mapping[str, AttributeValue]) -> tuple[str, int]:
    return str(resource.get("penstock.actor", "")), int(resource.get("penstock.epoch", 0))
