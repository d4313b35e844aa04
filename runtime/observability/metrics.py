"""One ``/metrics`` for a run: the driver aggregates what actors and steps report.

Invariants:

* An update looks nothing up by label: series are bound once. It never waits for a scrape.
* Counters of the run never go down, also when an actor is replaced and counts from 0 again.
* What an actor calls ``engine/running`` is ``penstock_actor_engine_running{actor="engine/0"}``, and what a step calls
  ``train/loss`` is ``penstock_step_train_loss``; no other series begins with these two words, so nothing that anybody
  reports can clash with a figure of the run. Series of an actor that was replaced go on under the same labels.
* What an evaluation calls ``eval/gsm8k/pass@1`` is ``penstock_evaluation{dataset="gsm8k", figure="pass@1"}``.

Actors may report what they like. Their own figures are exposed without a type, since nothing says which of them only
grow; ``rate()`` works on those as on counters. The figures of the run have their types.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.registry import Collector

from penstock.messages.training import Activity
from penstock.runtime.observability.summary import generated_tokens
from penstock.runtime.safe_text import terminal_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric as Family

    from penstock.messages.training import ActivitySpan, ActorReported, FailuresCounted, StepReported
    from penstock.runtime.observability.evaluations import EvaluationRow

LENGTH_BUCKETS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
AGE_BUCKETS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
MAX_REASONS: Final = 50
_NOT_ALLOWED: Final = re.compile(r"[^a-zA-Z0-9_:]+")


class _ActorFigures(Collector):
    """The latest figures of every actor, turned into series when somebody asks."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = {}

    def report(self, report: ActorReported) -> None:
        for metric in report.metrics:
            by_actor = self._values.get(metric.name)
            if by_actor is None:
                by_actor = self._values[metric.name] = {}
            by_actor[report.name] = metric.value

    def collect(self) -> Iterable[Family]:
        series = {actor_series(name): (name, by_actor) for name, by_actor in list(self._values.items())}
        for name, (reported_as, by_actor) in series.items():
            family = UnknownMetricFamily(name, f"{reported_as}, as actors report it", labels=["actor"])
            for actor, value in list(by_actor.items()):
                family.add_metric([actor], value)
            yield family

    def describe(self) -> Iterator[Family]:
        """Nothing beforehand: which figures there are is known when actors have reported."""
        return iter(())


class _StepFigures(Collector):
    """The figures of the last step."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def report(self, report: StepReported) -> None:
        for metric in report.metrics:
            self._values[metric.name] = metric.value

    def collect(self) -> Iterable[Family]:
        series = {step_series(name): (name, value) for name, value in list(self._values.items())}
        for name, (reported_as, value) in series.items():
            yield GaugeMetricFamily(name, f"{reported_as} of the last step", value=value)

    def describe(self) -> Iterator[Family]:
        """Nothing beforehand, as for actors."""
        return iter(())


class _EvaluationFigures(Collector):
    """The figures of the last evaluation of each dataset."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = {}
        self._version: int | None = None

    def report(self, row: EvaluationRow) -> None:
        self._values.update(row.datasets())
        self._version = row.version

    def collect(self) -> Iterable[Family]:
        if self._version is None:
            return
        yield GaugeMetricFamily(
            "penstock_evaluation_version", "Version that the last evaluation asked for.", value=self._version
        )
        family = GaugeMetricFamily("penstock_evaluation", "Of the last evaluation.", labels=["dataset", "figure"])
        for dataset, figures in list(self._values.items()):
            for figure, value in figures.items():
                family.add_metric([dataset, figure], value)
        yield family

    def describe(self) -> Iterator[Family]:
        """Nothing beforehand, as for actors."""
        return iter(())


class RunMetrics:
    """The Prometheus metrics of one run, in a registry of their own."""

    def __init__(self, *, scenario: str, policy: str, num_steps: int) -> None:
        self.registry = registry = CollectorRegistry()
        self._actors, self._steps, self._evaluations = _ActorFigures(), _StepFigures(), _EvaluationFigures()
        for collector in (self._actors, self._steps, self._evaluations):
            registry.register(collector)
        info = Gauge("penstock_run_info", "Which run this is.", ["scenario", "policy"], registry=registry)
        info.labels(scenario, policy).set(1)
        Gauge("penstock_run_steps_planned", "Batches to train.", registry=registry).set(num_steps)
        self._policies = Gauge(
            "penstock_staleness_policy", "1 for the policy that new grants follow.", ["policy"], registry=registry
        )
        self._policy = ""
        self._version = Gauge("penstock_policy_version", "Batches trained so far.", registry=registry)
        self._issued = Counter("penstock_samples_issued", "Samples issued.", registry=registry)
        self._in_system = Gauge("penstock_samples_in_system", "Issued and not terminal.", registry=registry)
        self._ended = Counter(
            "penstock_samples_ended", "Samples by how they ended.", ["state", "cause"], registry=registry
        )
        self._ended_tokens = Counter(
            "penstock_sample_tokens",
            "Tokens that the model made, of ended samples.",
            ["state", "cause"],
            registry=registry,
        )
        self._failed = Counter(
            "penstock_samples_failed",
            "Samples that failed or were dropped by an error, by cause and kind of reason.",
            ["cause", "reason"],
            registry=registry,
        )
        self._generated = Counter(
            "penstock_generated_tokens", "Tokens that the model made, of responses that came.", registry=registry
        )
        self._tokens_in_system = Gauge(
            "penstock_tokens_in_system", "Of these, of samples that have not ended.", registry=registry
        )
        self._lost = Counter("penstock_lost_tokens_estimate", "Tokens lost with killed engines.", registry=registry)
        self._ages = Histogram(
            "penstock_staleness_versions", "Age of trained samples.", buckets=AGE_BUCKETS, registry=registry
        )
        self._lengths = Histogram(
            "penstock_response_tokens", "Response lengths.", buckets=LENGTH_BUCKETS, registry=registry
        )
        self._restarts = Counter("penstock_restarts", "Actors replaced.", ["actor"], registry=registry)
        self._activity = Counter(
            "penstock_activity_seconds", "Time by state.", ["actor", "activity"], registry=registry
        )
        self._busy = Counter(
            "penstock_occupied_seconds", "Working time, weighted by occupancy.", ["actor"], registry=registry
        )
        self._outside = Counter(
            "penstock_outside_seconds",
            "Time, weighted by the share of slots whose episodes wait for tools.",
            ["actor"],
            registry=registry,
        )
        self._reasons: set[tuple[str, str]] = set()
        self._seen: dict[tuple[str, str, str], float] = {}
        self._activity_series: dict[tuple[str, Activity], Counter] = {}

    def actor(self, report: ActorReported) -> None:
        """An actor's report: its figures, exposed as they are."""
        self._actors.report(report)

    def _follow(self, policy: str) -> None:
        if policy != self._policy:
            if self._policy:
                self._policies.labels(self._policy).set(0)
            self._policies.labels(policy).set(1)
            self._policy = policy

    def activity(self, actor: str, spans: Iterable[ActivitySpan]) -> None:
        """Spans that were added to an actor's lane."""
        for span in spans:
            series = self._activity_series.get((actor, span.activity))
            if series is None:
                series = self._activity.labels(actor, span.activity.value)
                self._activity_series[actor, span.activity] = series
            series.inc(span.end_s - span.start_s)
            if span.activity is Activity.WORKING:
                self._busy.labels(actor).inc((span.end_s - span.start_s) * span.occupancy)
            if span.outside:
                self._outside.labels(actor).inc((span.end_s - span.start_s) * span.outside)

    def step(self, report: StepReported) -> None:
        """A recorded step."""
        self._version.set(report.version)
        self._follow(report.policy)
        self._steps.report(report)
        for age, count in enumerate(report.staleness_counts):
            for _ in range(count):
                self._ages.observe(age)
        for length in report.response_lengths:
            self._lengths.observe(length)
        balance = report.balance
        self._raise_to(self._issued, ("issued", "", ""), balance.issued)
        self._in_system.set(balance.in_system)
        self._raise_to(self._generated, ("generated", "", ""), generated_tokens(balance))
        self._tokens_in_system.set(balance.in_system_tokens)
        for ended in balance.ended:
            series = self._ended.labels(ended.state, ended.cause)
            self._raise_to(series, ("ended", ended.state, ended.cause), ended.num_samples)
            series = self._ended_tokens.labels(ended.state, ended.cause)
            self._raise_to(series, ("tokens", ended.state, ended.cause), ended.num_made_tokens)

    def failures(self, counted: FailuresCounted) -> None:
        """Samples have failed. Only the first ``MAX_REASONS`` kinds of reasons of a run have a series."""
        for count in counted.counts:
            series = (count.cause, terminal_text(count.kind))
            if series in self._reasons or len(self._reasons) < MAX_REASONS:
                self._reasons.add(series)
                self._raise_to(self._failed.labels(*series), ("failed", *series), count.num_samples)

    def evaluated(self, row: EvaluationRow) -> None:
        """An evaluation is done."""
        self._evaluations.report(row)

    def lost(self, actor: str, tokens_estimate: int) -> None:
        """An actor was given up and is replaced."""
        self._restarts.labels(actor).inc()
        self._lost.inc(tokens_estimate)

    def _raise_to(self, counter: Counter, key: tuple[str, str, str], total: float) -> None:
        """Reports carry totals, counters take increments."""
        grown = total - self._seen.get(key, 0.0)
        if grown > 0 and math.isfinite(grown):
            self._seen[key] = total
            counter.inc(grown)


def actor_series(name: str) -> str:
    """``engine/running`` → ``penstock_actor_engine_running``."""
    return "penstock_actor_" + _NOT_ALLOWED.sub("_", name)


def step_series(name: str) -> str:
    """``train/kl_loss`` → ``penstock_step_train_kl_loss``."""
    return "penstock_step_" + _NOT_ALLOWED.sub("_", name)
