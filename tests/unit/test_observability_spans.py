"""Recording spans, exporting them to the run's folder and to a collector, and reading them back."""

from __future__ import annotations

import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from penstock.messages.errors import UserFault
from penstock.runtime.observability.group_spans import record_together
from penstock.runtime.observability.span_collector import SpanCollector, otlp_exporter
from penstock.runtime.observability.span_export import SpanExporterThread, SpanSink
from penstock.runtime.observability.span_file import SpanFile, actor_attributes
from penstock.runtime.observability.spans import (
    NO_PARENT,
    SpanRecorder,
    decoded_span,
    is_traced,
    new_salt,
    root_span_id,
    sample_trace_id,
    step_trace_id,
    trace_id_of,
    version_trace_id,
)
from penstock.runtime.observability.traces import (
    each_span,
    open_traces,
    read_spans,
    read_step,
    read_trace,
    span_file,
    spans_between,
    write_otlp,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from opentelemetry.sdk.trace import ReadableSpan


SALT = bytes(range(16))
RESOURCE = actor_attributes("engine/0", 3)
TEXT = 'foreign \u2028 "text" </script>'


def start(recorder: SpanRecorder, file: SpanSink, collector: SpanCollector | None = None) -> SpanExporterThread:
    exporter = SpanExporterThread(recorder, file, collector=collector, interval_s=0.01)
    exporter.start()
    return exporter


class Stuck(SpanExporter):
    """An exporter that does not come back until it is let go."""

    def __init__(self) -> None:
        self.is_exporting = threading.Event()
        self.let_go = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_exporting.set()
        self.let_go.wait(30)
        return SpanExportResult.FAILURE


# --- ids --------------------------------------------------------------------------------------------------------


def test_every_process_derives_the_same_trace_id_of_a_sample() -> None:
    # Multiples of the golden ratio from the halves of the salt on: an old run's traces must stay findable.
    assert trace_id_of(SALT, 12, 3).hex() == "daa76f2f81e47a4672a2bebd038adf0b"


def test_samples_steps_versions_and_runs_have_traces_of_their_own() -> None:
    ids = [trace_id_of(SALT, group, index) for group in range(50) for index in range(8)]
    ids += [step_trace_id(SALT, version) for version in range(50)]
    ids += [version_trace_id(SALT, version) for version in range(50)]
    ids += [trace_id_of(bytes(16), group, 0) for group in range(50)]
    assert len(set(ids)) == len(ids)
    assert {len(trace_id) for trace_id in ids} == {16}


def test_two_recorders_never_give_the_same_span_id() -> None:
    recorders = [SpanRecorder() for _ in range(20)]
    ids = [recorder.record(bytes(16), NO_PARENT, "x", 0, 1) for recorder in recorders for _ in range(500)]
    assert len(set(ids)) == len(ids)
    assert {len(span_id) for span_id in ids} == {8}


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.3, 0.5, 1.0])
def test_the_sampled_share_is_the_fraction(fraction: float) -> None:
    num_kept = sum(is_traced(SALT, group, fraction) for group in range(20_000))
    assert num_kept == pytest.approx(20_000 * fraction, abs=20)


@given(st.binary(min_size=16, max_size=16), st.integers(), st.floats(0, 1), st.floats(0, 1))
def test_a_group_of_a_smaller_sample_is_in_every_larger_one(salt: bytes, group: int, one: float, other: float) -> None:
    smaller, larger = sorted((one, other))
    assert is_traced(salt, group, larger) or not is_traced(salt, group, smaller)
    assert is_traced(salt, group, 1.0)
    assert not is_traced(salt, group, 0.0)


def test_a_sampler_of_opentelemetry_keeps_the_same_groups() -> None:
    for fraction in (0.01, 0.3, 0.99):
        sampler = TraceIdRatioBased(fraction)
        for group in range(2000):
            trace_id = int.from_bytes(trace_id_of(SALT, group, 5), "big")
            decision = sampler.should_sample(None, trace_id, "x").decision
            assert (decision is Decision.RECORD_AND_SAMPLE) == is_traced(SALT, group, fraction)


# --- recording --------------------------------------------------------------------------------------------------


def test_a_full_list_drops_and_counts() -> None:
    recorder = SpanRecorder(max_pending=3)
    for _ in range(5):
        recorder.record(bytes(16), NO_PARENT, "x", 0, 1)
    recorder.record_root(bytes(16), "root", 0, 1)
    assert (recorder.num_pending, recorder.num_dropped) == (3, 3)
    assert len(recorder.take(10)) == 3
    recorder.record(bytes(16), NO_PARENT, "y", 0, 1)
    assert [decoded_span(span)[3] for span in recorder.take(10)] == ["y"]


def test_text_that_no_file_can_hold_costs_its_span_alone() -> None:
    recorder = SpanRecorder()
    recorder.record(bytes(16), NO_PARENT, "execute_tool look_up", 0, 1, (("call_id", "\ud800"),))
    recorder.record(bytes(16), NO_PARENT, "y", 0, 1)
    assert (recorder.num_pending, recorder.num_dropped) == (1, 1)


def test_nothing_is_lost_or_doubled_while_several_threads_record_and_one_takes() -> None:
    recorder = SpanRecorder()
    num_threads, num_spans = 4, 20_000

    def record(thread: int) -> None:
        for number in range(num_spans):
            recorder.record(bytes(16), NO_PARENT, f"{thread}/{number}", number, number)

    threads = [threading.Thread(target=record, args=(thread,)) for thread in range(num_threads)]
    taken: list[str] = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or recorder.num_pending:
        taken.extend(decoded_span(span)[3] for span in recorder.take(100))
    assert len(taken) == num_threads * num_spans
    for number in range(num_threads):
        own = [name for name in taken if name.startswith(f"{number}/")]
        assert own == [f"{number}/{at}" for at in range(num_spans)]


# --- the file ---------------------------------------------------------------------------------------------------


def test_spans_are_handed_on_as_otlp_json_and_read_from_it(tmp_path: Path) -> None:
    open_traces(tmp_path)
    path, otlp = span_file(tmp_path, "engine/0", 3), tmp_path / "otlp.jsonl"
    recorder = SpanRecorder()
    trace_id = trace_id_of(SALT, 1, 2)
    root = recorder.record_root(trace_id, "issue", 10**18, 10**18 + 5, (("attempt", 0), ("engine", "engine/0")))
    attributes = (("kept", True), ("reward", 0.5))
    span_id = recorder.record(trace_id, root, "filter", 10**18 + 1, 10**18 + 2, attributes, ((SALT, b"12345678"),))
    exporter = start(recorder, SpanFile(path, RESOURCE))
    assert exporter.close(5)
    assert (exporter.num_exported, exporter.num_dropped) == (2, 0)
    assert write_otlp(tmp_path, otlp) == 1
    [line] = otlp.read_bytes().splitlines()
    [batch] = msgspec.json.decode(line)["resourceSpans"]
    assert {"key": "penstock.actor", "value": {"stringValue": "engine/0"}} in batch["resource"]["attributes"]
    assert {"key": "penstock.epoch", "value": {"intValue": "3"}} in batch["resource"]["attributes"]
    first, second = batch["scopeSpans"][0]["spans"]
    assert first == {
        "traceId": trace_id.hex(),
        "spanId": root.hex(),
        "name": "issue",
        "kind": 1,
        "startTimeUnixNano": "1000000000000000000",
        "endTimeUnixNano": "1000000000000000005",
        "attributes": [
            {"key": "attempt", "value": {"intValue": "0"}},
            {"key": "engine", "value": {"stringValue": "engine/0"}},
        ],
    }
    assert (second["spanId"], second["parentSpanId"]) == (span_id.hex(), root.hex())
    assert second["attributes"] == [
        {"key": "kept", "value": {"boolValue": True}},
        {"key": "reward", "value": {"doubleValue": 0.5}},
    ]
    assert second["links"] == [{"traceId": SALT.hex(), "spanId": b"12345678".hex()}]
    rows = list(each_span(tmp_path))
    os.replace(otlp, path)  # as the file of an earlier version
    assert list(each_span(tmp_path)) == rows
    assert read_spans(tmp_path, trace_id) == rows
    assert list(spans_between(tmp_path, 10**18 + 3, 10**18 + 9)) == rows[:1]
    assert not list(spans_between(tmp_path, 0, 10**17))
    assert write_otlp(tmp_path, otlp) == 1
    assert otlp.read_bytes().splitlines() == [line]


def test_what_stands_in_a_file_of_spans_is_found_by_trace_and_by_time(tmp_path: Path) -> None:
    salt, recorder = open_traces(tmp_path), SpanRecorder()
    for index in range(3):
        recorder.record(trace_id_of(salt, 1, index), NO_PARENT, TEXT, 10**18, 10**18 + index, (("nan", "NaN"),))
    write(tmp_path, "scorer", 1, recorder)
    [row] = read_spans(tmp_path, trace_id_of(salt, 1, 2))
    assert (row.actor, row.epoch, row.name, row.parent_id, row.attributes) == ("scorer", 1, TEXT, "", {"nan": "NaN"})
    assert [row.end_ns - 10**18 for row in spans_between(tmp_path, 10**18 + 1, 10**18 + 2)] == [1, 2]
    assert not read_spans(tmp_path, trace_id_of(salt, 2, 0))


def test_closing_writes_what_was_recorded_until_then(tmp_path: Path) -> None:
    recorder = SpanRecorder()
    exporter = SpanExporterThread(recorder, SpanFile(tmp_path / "a.jsonl", RESOURCE), interval_s=3600.0)
    exporter.start()
    for _ in range(3000):
        recorder.record(bytes(16), NO_PARENT, "x", 0, 1)
    assert exporter.close(10)
    assert (exporter.num_exported, recorder.num_pending) == (3000, 0)


def test_a_disk_that_is_full_costs_the_spans_and_not_the_actor() -> None:
    class Full:
        def write(self, spans: Sequence[bytes]) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    recorder = SpanRecorder()
    recorder.record(bytes(16), NO_PARENT, "x", 0, 1)
    exporter = start(recorder, Full())
    assert exporter.close(5)
    assert exporter.error is not None
    assert (exporter.num_exported, exporter.num_dropped) == (0, 1)


# --- the collector ----------------------------------------------------------------------------------------------


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A real HTTP server that takes OTLP: its endpoint and what it was sent."""
    requests: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_a_collector_gets_the_spans_that_the_file_gets(
    collector: tuple[str, list[ExportTraceServiceRequest]], tmp_path: Path
) -> None:
    endpoint, requests = collector
    recorder = SpanRecorder()
    exporter = start(
        recorder, SpanFile(tmp_path / "a.jsonl", RESOURCE), SpanCollector(otlp_exporter(endpoint), RESOURCE)
    )
    root = recorder.record_root(SALT, "issue", 5, 9, (("group_id", 7),))
    recorder.record(SALT, root, "queue", 6, 8)
    record_together(recorder, SALT, "filter", [(0, 9), (1, 9)], 10, (("kept", True),))
    assert exporter.close(10)
    assert (exporter.num_exported, exporter.num_collected, exporter.num_not_collected) == (3, 3, 0)
    spans = [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [(span.name, span.trace_id, span.parent_span_id) for span in spans] == [
        ("issue", SALT, b""),
        ("queue", SALT, root_span_id(SALT)),
        ("filter", SALT, root_span_id(SALT)),
        ("filter", second := sample_trace_id(SALT, 1), root_span_id(second)),
    ]
    assert [[a.key for a in span.attributes] for span in spans[2:]] == [["kept"], ["kept"]]
    assert [(a.key, a.value.int_value) for a in spans[0].attributes] == [("group_id", 7)]


def test_a_collector_that_hangs_costs_only_its_own_spans(tmp_path: Path) -> None:
    recorder, stuck = SpanRecorder(), Stuck()
    exporter = SpanExporterThread(
        recorder,
        SpanFile(tmp_path / "a.jsonl", RESOURCE),
        collector=SpanCollector(stuck, RESOURCE, max_queued=2),
        interval_s=0.01,
    )
    exporter.start()
    recorder.record(SALT, NO_PARENT, "x", 0, 1)
    assert stuck.is_exporting.wait(10)
    for _ in range(10 * 512):
        recorder.record(SALT, NO_PARENT, "x", 0, 1)
    began_s = time.monotonic()
    assert not exporter.close(0.5)
    assert time.monotonic() - began_s < 10
    assert (exporter.num_exported, exporter.num_dropped) == (1 + 10 * 512, 0)
    assert exporter.num_collected == 0
    assert exporter.num_not_collected >= 8 * 512
    stuck.let_go.set()


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(UserFault, match=r"observability\.otlp_endpoint must be an http:// or https:// URL"):
        otlp_exporter("localhost:4318")


# --- reading ----------------------------------------------------------------------------------------------------


def write(run_folder: Path, actor: str, epoch: int, recorder: SpanRecorder) -> None:
    exporter = SpanExporterThread(
        recorder, SpanFile(span_file(run_folder, actor, epoch), actor_attributes(actor, epoch))
    )
    exporter.start()
    assert exporter.close(5)


def test_a_trace_is_joined_from_the_files_of_all_actors(tmp_path: Path) -> None:
    salt = open_traces(tmp_path)
    trace_id = trace_id_of(salt, 12, 3)
    stages = [("prompt_source", 1, "issue"), ("engine/0", 2, "generate"), ("engine/0", 3, "generate")]
    stages.append(("scorer", 1, "score"))
    for number, (actor, epoch, name) in enumerate(stages):
        recorder = SpanRecorder()
        recorder.record(trace_id_of(salt, 12, 4), NO_PARENT, "of another sample", 0, 1)
        recorder.record(trace_id, NO_PARENT, name, 100 - number, 200, (("attempt", number),), ((SALT, b"abcdefgh"),))
        write(tmp_path, actor, epoch, recorder)
    rows = read_trace(tmp_path, 12, 3)
    assert [(row.actor, row.epoch, row.name, row.attributes["attempt"]) for row in rows] == [
        ("scorer", 1, "score", 3),
        ("engine/0", 3, "generate", 2),
        ("engine/0", 2, "generate", 1),
        ("prompt_source", 1, "issue", 0),
    ]
    assert rows[0].links == ((SALT.hex(), b"abcdefgh".hex()),)
    assert rows[0].duration_s == pytest.approx(103e-9)


def test_a_step_is_read_with_the_version_that_it_makes(tmp_path: Path) -> None:
    salt = open_traces(tmp_path)
    recorder = SpanRecorder()
    recorder.record_root(version_trace_id(salt, 4), "version", 20, 30)
    recorder.record_root(step_trace_id(salt, 4), "step", 10, 20)
    recorder.record_root(step_trace_id(salt, 5), "step", 30, 40)
    write(tmp_path, "learner", 1, recorder)
    assert [(row.name, row.start_ns) for row in read_step(tmp_path, 4)] == [("step", 10), ("version", 20)]
    with pytest.raises(UserFault, match="no trace of step 6"):
        read_step(tmp_path, 6)


def test_a_batch_that_a_kill_tore_off_is_passed_over(tmp_path: Path) -> None:
    salt = open_traces(tmp_path)
    recorder = SpanRecorder()
    recorder.record(trace_id_of(salt, 0, 0), NO_PARENT, "issue", 1, 2)
    write(tmp_path, "prompt_source", 1, recorder)
    path = span_file(tmp_path, "prompt_source", 1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert [row.name for row in read_trace(tmp_path, 0, 0)] == ["issue"]
    path.write_bytes(whole[:-5] + b"\n" + whole)
    with pytest.raises(UserFault, match=r"prompt_source-1\.jsonl, line 1:"):
        read_trace(tmp_path, 0, 0)


def test_a_run_keeps_its_salt_when_it_is_resumed(tmp_path: Path) -> None:
    assert open_traces(tmp_path) == open_traces(tmp_path)
    assert open_traces(tmp_path / "other") != open_traces(tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"has no traces; was it run with observability\.tracing: true\?"):
        read_trace(tmp_path, 0, 0)
    open_traces(tmp_path)
    with pytest.raises(UserFault, match="no trace of sample 0/1"):
        read_trace(tmp_path, 0, 1)
    (tmp_path / "traces" / "salt").write_text("12\n")
    with pytest.raises(UserFault, match="must hold '2 ' and 16 bytes in hexadecimal, got '12'"):
        read_trace(tmp_path, 0, 0)


def test_a_salt_is_random() -> None:
    assert len({new_salt() for _ in range(100)}) == 100
    assert len(new_salt()) == 16


def test_an_engine_has_a_file_for_each_incarnation(tmp_path: Path) -> None:
    assert span_file(tmp_path, "engine/12", 4) == tmp_path / "traces" / "engine-12-4.jsonl"
