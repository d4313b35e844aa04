"""Turns and calls of episodes in the traces of a real run, one of whose engines is killed; and an OpenTelemetry
collector beside it, played by an HTTP server that takes OTLP's own messages."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from asks_tools import NUM_TURNS, TOOL_S
from live_run import LiveRun
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from typer.testing import CliRunner

from penstock.messages.training import Activity
from penstock.runtime.cli.app import app
from penstock.runtime.observability.lives import STAGES, Life, read_fates, read_lives
from penstock.runtime.observability.shares import Shares
from penstock.runtime.observability.spans import COMPLETION
from penstock.runtime.observability.traces import each_span
from penstock.runtime.observability.trackers import read_activity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    from penstock.runtime.observability.summary import RunSummary

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

KILLED = "engine/0"
TOOL = "execute_tool look_up"
SCENARIO = f"""\
run: {{name: asks_tools, num_steps: 10}}
model: {{make: xs}}
data: {{path: "sums:2000", prompt_key: prompt}}
episode: {{kind: function, generate: "{Path(__file__).parent / "asks_tools.py"}:episode"}}
engines: {{count: 2, slots: 8}}
sampling: {{samples_per_group: 4, max_response_tokens: 16}}
filter: {{drop_zero_spread: false}}
staleness: {{policy: fully_async, max_staleness: 2}}
learner: {{groups_per_batch: 4}}
observability: {{trace_fraction: 1}}
"""


class Sent(NamedTuple):
    """A span with everything that both files and collectors have of it."""

    actor: object
    epoch: object
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: frozenset[tuple[str, object]]
    links: tuple[tuple[str, str], ...]


class Collector:
    """Takes spans over OTLP/HTTP."""

    def __init__(self) -> None:
        self.spans: Counter[Sent] = Counter()
        lock = threading.Lock()
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                with lock:
                    spans.update(sent(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def sent(request: ExportTraceServiceRequest) -> Iterator[Sent]:
    for batch in request.resource_spans:
        about = {attribute.key: value_of(attribute.value) for attribute in batch.resource.attributes}
        for scope in batch.scope_spans:
            for span in scope.spans:
                yield Sent(
                    about["penstock.actor"], about["penstock.epoch"], span.name, span.trace_id.hex(),
                    span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano,
                    frozenset((attribute.key, value_of(attribute.value)) for attribute in span.attributes),
                    tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                )  # fmt: skip


def value_of(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    return getattr(value, kind)


class Made(NamedTuple):
    folder: Path
    summary: RunSummary
    collected: Counter[Sent]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """A run whose first engine was killed while its episodes waited for their tool."""
    parent = tmp_path_factory.mktemp("asks")
    scenario = parent / "asks_tools.yaml"
    scenario.write_text(SCENARIO)
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        with LiveRun(scenario, parent, (f"observability.otlp_endpoint={collector.url}",)) as live:
            live.await_steps(3)
            os.kill(live.pid_of(KILLED), signal.SIGKILL)
            summary = live.finish()
            yield Made(live.folder, summary, collector.spans)
    finally:
        collector.server.shutdown()
        collector.server.server_close()
        thread.join(10)


@pytest.fixture(scope="module")
def lives(run: Made) -> list[Life]:
    """Of what was trained."""
    return [life for life in read_lives(run.folder, read_fates(run.folder)) if life.fate.state == "trained"]


def test_every_trained_sample_has_its_turns_and_calls_although_an_engine_was_killed(
    run: Made, lives: Sequence[Life]
) -> None:
    assert run.summary.completed
    assert sum(restart.count for restart in run.summary.restarts if restart.name == KILLED) == 1
    assert len(lives) == 160
    assert all({stage.name for stage in life.stages} == set(STAGES) for life in lives)
    partial = [life for life in lives if not is_complete(life)]
    assert all(KILLED in {stage.actor for stage in life.stages} for life in partial), partial[0]
    assert len(partial) <= 4, "what the engine did in its last hundredths of a second"


def is_complete(life: Life) -> bool:
    """Whether every turn that is in the sample has a span, and every call."""
    turns = {step.attributes["turn"] for step in life.steps if "turn" in step.attributes and step.is_recorded}
    calls = {step.attributes["after_turn"] for step in life.steps if step.name == TOOL}
    return turns == set(range(1, NUM_TURNS + 1)) and calls == set(range(1, NUM_TURNS))


def test_a_turn_lies_within_its_generation_and_a_call_between_turns(lives: Sequence[Life]) -> None:
    num_calls = 0
    for life in lives:
        generations = {stage.span_id: stage for stage in life.stages if stage.name == "generate" and stage.is_recorded}
        for step in life.steps:
            around = generations.get(step.parent_id)
            if around is not None:
                assert around.start_ns <= step.start_ns <= step.end_ns <= around.end_ns, life
                assert around.attempt == step.attempt
        mine = [step for step in life.steps if step.attempt == life.fate.attempt and step.is_recorded]
        assert all(one.end_ns <= other.start_ns for one, other in pairwise(mine)), life
        assert all(one.name != other.name for one, other in pairwise(mine)), life
        calls = [step for step in mine if step.name == TOOL]
        num_calls += len(calls)
        assert all(step.duration_s >= TOOL_S for step in calls)
        errors = {step.attributes.get("error") for step in calls if step.attributes["after_turn"] == NUM_TURNS - 1}
        assert errors <= {"ToolError"}
    assert num_calls > len(lives)


def test_what_a_killed_engine_did_stands_in_its_attempt_and_attempts_are_linked(
    run: Made, lives: Sequence[Life]
) -> None:
    moved = [life for life in lives if life.fate.attempt and {s.attempt for s in life.steps} == {0, life.fate.attempt}]
    assert moved, "the kill interrupted no episode, so that this test shows nothing"
    life = moved[0]
    again = [stage for stage in life.stages if stage.name == "issue" and stage.attempt == life.fate.attempt]
    links = {row.span_id: row.links for row in each_span(run.folder) if row.name == "issue" and row.links}
    ids = {row.trace_id for row in each_span(run.folder) if row.span_id == again[0].span_id}
    assert [trace_id for trace_id, _ in links[again[0].span_id]] == [*ids]
    result = CliRunner().invoke(app, ["trace", str(run.folder), "--sample", life.fate.name], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    first, second = result.output.split("attempt 1")
    assert COMPLETION in first
    assert COMPLETION in second
    assert "turn 1," in first
    assert f"turn {NUM_TURNS}," in second


def test_a_collector_receives_the_very_spans_that_the_files_hold(run: Made) -> None:
    written = Counter(
        Sent(
            row.actor, row.epoch, row.name, row.trace_id, row.span_id, row.parent_id, row.start_ns, row.end_ns,
            frozenset(row.attributes.items()), row.links,
        )
        for row in each_span(run.folder)
    )  # fmt: skip
    assert sum(written.values()) > 1500
    assert not run.collected - written, "the collector was told what is in no file"
    missing = written - run.collected
    assert {(span.actor, span.epoch) for span in missing} <= {(KILLED, 0), (KILLED, 1)}
    assert {span.name for span in run.collected} >= {*STAGES, COMPLETION, TOOL, "step", "version", "publish"}
    (call, *_) = [span for span in run.collected if span.name == TOOL]
    facts = dict(call.attributes)
    assert (facts["gen_ai.operation.name"], facts["gen_ai.tool.name"]) == ("execute_tool", "look_up")


def test_engines_say_that_they_wait_for_tools_and_their_states_add_up(run: Made) -> None:
    lanes = read_activity(run.folder)
    for name in (KILLED, "engine/1"):
        shares, rows = Shares(lanes[name]), lanes[name]
        assert all(one.end_s == other.start_s for one, other in pairwise(rows))
        assert shares.total_s == pytest.approx(run.summary.wall_s, abs=1e-6)
        assert shares.seconds[Activity.WAITING_FOR_TOOLS] > 1.0
        assert shares.seconds[Activity.WAITING_FOR_TOOLS] > shares.seconds[Activity.WORKING]
        assert 0.0 < shares.outside_s <= shares.total_s
    assert Shares(lanes["learner"]).outside_s == 0.0
