"""What observing costs: a span on the hot path and off it, an event in the log, a report in /metrics, in microseconds.

CPU time of one thread, the smallest of several repetitions, each thing measured in the same process one after the
other and again.

``--runs N`` measures nothing of this, but what tracing takes in a run: N runs of the scenario of ``control_plane`` with
tracing and N without, in turn, with a stop-watch around what observes in every actor. What it adds to the CPU time of a
run beside that (colder caches) is in the difference of whole runs alone, see ``control_plane --ledger traces``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, Counter, Histogram
from rich.console import Console
from rich.table import Table

from penstock.benchmarks._progress import in_turn
from penstock.benchmarks._runs import run
from penstock.benchmarks._stop_watch import environment, read
from penstock.benchmarks._traced_group import cost_us
from penstock.benchmarks.control_plane import GROUPS_PER_BATCH, SCENARIO, rate_of
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.base import Metric
from penstock.messages.commands import Send
from penstock.messages.flow import SampleGenerated, SampleScored, SamplesSettled, SettledState
from penstock.messages.local import SampleJudged
from penstock.messages.samples import Completed, Part, Prompt, Reward, Sample, SampleKey, VersionSpan
from penstock.messages.training import Activity, ActivitySpan, ActorReported
from penstock.messages.wire import Header
from penstock.runtime.observability.event_observer import EventObserver
from penstock.runtime.observability.metrics import RunMetrics
from penstock.runtime.observability.span_collector import readable_span
from penstock.runtime.observability.span_file import SpanFile, actor_attributes
from penstock.runtime.observability.spans import NO_PARENT, SpanRecorder, decoded_span, new_salt, trace_id_of
from penstock.runtime.observability.stages import StageRecorder
from penstock.runtime.observability.trace_ids import TraceIds
from penstock.runtime.observability.trackers import EventLog

if TYPE_CHECKING:
    from collections.abc import Callable


QUICK: Final = ("--calls", "3000", "--repetitions", "3")
QUICK_S: Final = 10
NUM_CALLS: Final = 20_000
REPETITIONS: Final = 7
SPANS_A_BATCH: Final = 512
GROUPS_A_REPETITION: Final = 640
STEPS_A_RUN: Final = 200
FRACTIONS: Final = {"with every group traced": 1.0, "with one in ten": 0.1, "with none": 0.0}


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock bench tracing_cost", description=__doc__)
    parser.add_argument("--calls", type=int, default=NUM_CALLS, help="calls in one repetition")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--runs", type=int, default=0, help="runs with tracing, and as many without, to look into")
    given = parser.parse_args(arguments)
    if given.runs:
        return _measure_runs(given.runs)
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), given.calls, given.repetitions)
    table = Table("what", "least µs", "median µs", title="CPU time of one call")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, times in measured.items():
        table.add_row(name, f"{min(times):.2f}", f"{statistics.median(times):.2f}")
    console = Console()
    console.print(table)
    with tempfile.TemporaryDirectory() as folder:
        groups = _group_costs(Path(folder), given.repetitions)
    costs = ", ".join(f"{cost:.0f} µs {what}" for what, cost in groups.items())
    console.print(f"A group of 8 samples through all actors, medians of {given.repetitions} pairs: {costs}.")
    return 0


def _measure_runs(num_runs: int) -> int:
    """Print what tracing takes in the processes of a run; returns the exit code."""
    costs: list[tuple[float, ...]] = []
    for number in in_turn(range(num_runs), lambda number: f"runs, pair {number + 1}"):
        order = (True, False) if number % 2 else (False, True)
        runs = {is_traced: _watched_run(is_traced=is_traced) for is_traced in order}
        (with_us, exporters_us, all_us), (without_us, _, _) = runs[True], runs[False]
        observers_us = with_us - without_us
        costs.append((without_us, observers_us, exporters_us, 100 * (observers_us + exporters_us) / all_us))
    table = Table("in a run with one group in ten traced", "median", "least", "most", title=f"{num_runs} pairs of runs")
    names = (
        "event log, µs a group",
        "tracing in the observers, µs",
        "threads that write spans, µs",
        "both, % of CPU time",
    )
    for name, found in zip(names, zip(*costs, strict=True), strict=True):
        table.add_row(name, *(f"{figure:.2f}" for figure in (statistics.median(found), min(found), max(found))))
    Console().print(table)
    return 0


def _watched_run(*, is_traced: bool) -> tuple[float, float, float]:
    """Of the observers, of the threads that write spans, and of all processes after their start: µs a group."""
    with tempfile.TemporaryDirectory() as folder:
        watch = Path(folder) / "watch"
        overrides = (
            "runtime.host=local",
            f"run.num_steps={STEPS_A_RUN}",
            f"observability.tracing={str(is_traced).lower()}",
        )
        finished = run(SCENARIO, overrides, Path(folder) / "run", environment=environment(watch))
        watched, rate, num_groups = read(watch), rate_of(finished), finished.steps[-1].version * GROUPS_PER_BATCH
    us_a_group = 1e6 / num_groups
    return watched.observers_s * us_a_group, watched.exporters_s * us_a_group, 1000 * rate.cpu_ms_after_start


RECORDED: Final = "a span recorded"
DERIVED: Final = "the trace id of a sample, derived"
HANDLED_ON: Final = "an event watched: log, stage"
HANDLED_OUT: Final = "the same, group not among those traced"
HANDLED_OFF: Final = "the same, tracing switched off: the log"
CONVERTED: Final = "one made an OpenTelemetry span, where there is a collector"
EXPORTED: Final = "one written to the run's folder"
LOGGED: Final = "an event in the event log, digest and file included"
COUNTED: Final = "a prometheus counter, bound"
OBSERVED: Final = "a prometheus histogram, bound"
REPORTED: Final = "an actor's report of 12 figures in /metrics"
ACCOUNTED: Final = "an activity span in /metrics"


def measure(folder: Path, num_calls: int, repetitions: int) -> dict[str, list[float]]:
    """Microseconds a call of each thing, one figure for each repetition."""
    spans = _spans(num_calls)
    things: dict[str, Callable[[int], None]] = {
        RECORDED: _record,
        DERIVED: _derive,
        HANDLED_ON: lambda calls: _watch(calls, _observer(1.0)),
        HANDLED_OUT: lambda calls: _watch(calls, _observer(0.0)),
        HANDLED_OFF: lambda calls: _watch(calls, _observer(None)),
        CONVERTED: lambda calls: _convert(spans, calls),
        EXPORTED: lambda calls: _export(spans, calls, folder / "spans.jsonl"),
        LOGGED: lambda calls: _log(calls, folder / "events.jsonl"),
        COUNTED: _count,
        OBSERVED: _observe,
        REPORTED: _report,
        ACCOUNTED: _account,
    }
    measured: dict[str, list[float]] = {name: [] for name in things}
    empty: list[float] = []
    for _ in in_turn(range(repetitions), lambda number: f"repetition {number + 1}"):
        empty.append(_time(lambda calls: _watch(calls, None), num_calls))
        for name, thing in things.items():
            measured[name].append(_time(thing, num_calls))
    # What the loop itself takes, and the making of its events, is no cost of watching.
    for name in (HANDLED_ON, HANDLED_OUT, HANDLED_OFF):
        measured[name] = [max(0.0, took - spared) for took, spared in zip(measured[name], empty, strict=True)]
    return measured


def _group_costs(folder: Path, repetitions: int) -> dict[str, float]:
    """Microseconds of CPU time that go with tracing, by what is traced: each in turn with a run that is not traced."""
    costs: dict[str, list[float]] = {what: [] for what in FRACTIONS}
    for _ in in_turn(range(repetitions), lambda number: f"groups, repetition {number + 1}"):
        for what, fraction in FRACTIONS.items():
            spared = cost_us(folder, None, GROUPS_A_REPETITION)
            costs[what].append(cost_us(folder, fraction, GROUPS_A_REPETITION) - spared)
    return {what: statistics.median(found) for what, found in costs.items()}


def _time(thing: Callable[[int], None], num_calls: int) -> float:
    gc.collect()
    gc.disable()
    try:
        began_s = time.thread_time()
        thing(num_calls)
        return (time.thread_time() - began_s) / num_calls * 1e6
    finally:
        gc.enable()


def _record(num_calls: int) -> None:
    recorder = SpanRecorder()
    trace_id, parent = bytes(16), bytes(8)
    for _ in range(num_calls):
        recorder.record(trace_id, parent, "score", 1, 2)


def _derive(num_calls: int) -> None:
    salt = new_salt()
    for group_id in range(num_calls):
        trace_id_of(salt, group_id, 3)


def _observer(fraction: float | None) -> EventObserver:
    stages = None if fraction is None else StageRecorder(SpanRecorder(), TraceIds(new_salt(), fraction))
    return EventObserver(EventLog(), name="scorer", epoch=1, now_s=time.monotonic, stages=stages)


def _watch(num_calls: int, observer: EventObserver | None) -> None:
    """What the Scorer hears and sends for one sample after another, as a shell hands them over. Three events
    are three calls."""
    prompt = Prompt(row=0, epoch=0, tokens=pack_tokens(range(16)))
    part = Part(tokens=pack_tokens([1]), logprobs=pack_floats([-1.0]), spans=(VersionSpan(1, 1),))
    header = Header("engine/0", 1, 1, 1, 0)
    settled = SamplesSettled(settled=SettledState(0, 0, ()))
    for number in range(num_calls // 3):
        key = SampleKey(number // 8, number % 8)
        sample = Sample(key=key, parts=(part,), outcome=Completed(reward=Reward(value=1.0)))
        generated = SampleGenerated(sample=sample, group_size=8, prompt=prompt)
        judged = SampleJudged(key=key, attempt=0, reward=None)
        scored = SampleScored(sample=sample, group_size=8, prompt=prompt)
        sends = [Send("filter", scored)]
        if observer is not None:
            observer.handled(generated, header, [])
            observer.handled(judged, None, [*sends])
            observer.handled(settled, header, [])


def _spans(num_spans: int) -> list[bytes]:
    """As they come: three stages with little to say to one that says more."""
    recorder = SpanRecorder()
    trace_id = new_salt()
    for number in range(num_spans):
        if number % 4:
            recorder.record(trace_id, bytes(8), "score", time.time_ns(), time.time_ns(), (("reward", 1.0),))
        else:
            attributes = (("attempt", 0), ("outcome", "completed"), ("num_tokens", 512), ("versions", "3:512"))
            recorder.record(trace_id, NO_PARENT, "generate", time.time_ns(), time.time_ns(), attributes)
    return recorder.take(num_spans)


def _convert(spans: list[bytes], num_calls: int) -> None:
    resource = Resource(actor_attributes("engine/0", 1))
    for span in spans[:num_calls]:
        readable_span(decoded_span(span), resource)


def _export(spans: list[bytes], num_calls: int, path: Path) -> None:
    file = SpanFile(path, actor_attributes("engine/0", 1))
    for at in range(0, num_calls, SPANS_A_BATCH):
        file.write(spans[at : at + SPANS_A_BATCH])
    file.close()


def _log(num_calls: int, path: Path) -> None:
    log = EventLog(path)
    for number in range(num_calls):
        log.append(number / 1000, "engine/0", 1, "SampleIssued", "12/3")
    log.close()


def _count(num_calls: int) -> None:
    counter = Counter("events", "Events.", ["actor"], registry=CollectorRegistry()).labels("engine/0")
    for _ in range(num_calls):
        counter.inc()


def _observe(num_calls: int) -> None:
    histogram = Histogram("events", "Events.", ["actor"], registry=CollectorRegistry()).labels("engine/0")
    for _ in range(num_calls):
        histogram.observe(0.5)


def _run_metrics() -> RunMetrics:
    return RunMetrics(scenario="bench", policy="fully_async", num_steps=100)


def _report(num_calls: int) -> None:
    metrics = _run_metrics()
    figures = tuple(Metric(f"engine/figure_{number}", number) for number in range(12))
    report = ActorReported(name="engine/0", epoch=1, state="generating", metrics=figures)
    for _ in range(num_calls):
        metrics.actor(report)


def _account(num_calls: int) -> None:
    metrics = _run_metrics()
    spans = [ActivitySpan(Activity.WORKING, 0.0, 1.0, 0.5)]
    for _ in range(num_calls):
        metrics.activity("engine/0", spans)


if __name__ == "__main__":
    raise SystemExit(main())
