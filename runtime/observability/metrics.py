"""One ``/metrics`` for a run: the driver aggregates what actors and steps report.

Invariants:

* Whoever reaches the port from another machine has to show the token of the run. It is in a file that only the run's
  user can read, and nowhere else.

* An update looks nothing up by label: series are bound once. It never waits for a scrape.
* Counters of the run never go down, also when an actor is replaced and counts from 0 again.
* What an actor calls ``engine/running`` is ``penstock_actor_engine_running{actor="engine/0"}``, and what a step calls
  ``train/loss`` is ``penstock_step_train_loss``; no other series begins with these two words, so nothing that anybody
  reports can clash with a figure of the run. Series of an actor that was replaced go on under the same labels.
* What an evaluation calls ``eval/gsm8k/pass@1`` is ``penstock_evaluation{dataset="gsm8k", figure="pass@1"}``.

Actors may report what they like. Their own figures are exposed without a type, since nothing says which of them only
grow; ``rate()`` works on those as on counters. The figures of the run have their types.
"""

# prometheus-client's WSGI application is typed in part only:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import errno
import hmac
import ipaddress
import math
import os
import re
import secrets
import socket
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.registry import Collector

from penstock.messages.training import Activity
from penstock.runtime.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client.metrics_core import Metric as Family

    from penstock.messages.training import ActivitySpan, ActorReported, StepReported
    from penstock.runtime.observability.evaluations import EvaluationRow

METRICS_HOST: Final = "127.0.0.1"
TOKEN_FILE: Final = "metrics.token"
"""In the run's folder, where a token is needed."""
LENGTH_BUCKETS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
AGE_BUCKETS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_STOP_TIMEOUT_S: Final = 2.0
_NOT_ALLOWED: Final = re.compile(r"[^a-zA-Z0-9_:]+")


class MetricsPortError(PreflightError):
    """``observability.metrics_port`` cannot be served."""


class PortInUseError(MetricsPortError):
    """Another process serves this port."""


class MetricsServer:
    """The HTTP server behind ``/metrics``."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port it listens on, also when 0 was asked for."""
        return self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_TIMEOUT_S)


class _Server(ThreadingMixIn, WSGIServer):
    """A scrape that hangs holds up neither another one nor the end."""

    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    timeout = 30
    """Seconds for which a client may say nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that the base class gives it
        """Requests are not logged."""


def serve_metrics(
    port: int, registry: CollectorRegistry, *, host: str = METRICS_HOST, token: str | None = None
) -> MetricsServer:
    """Serve the registry on ``http://host:port/metrics``.

    Args:
        port: 0 takes a free one.
        registry: what to serve.
        host: the address to listen on; by default this machine only.
        token: that a client has to show, as ``Authorization: Bearer …``. Needed unless the address is this machine's
            own.

    Raises:
        PortInUseError: somebody else listens there.
        MetricsPortError: the port cannot be used for another reason.
    """
    assert token is not None or is_loopback(host), f"/metrics on {host} without a token"
    app = cast("WSGIApplication", make_wsgi_app(registry))
    if token is not None:
        app = _guarded(app, token)
    try:
        server = make_server(host, port, app, _Server6 if ":" in host else _Server, handler_class=_QuietHandler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"observability.metrics_port: port {port} on {host} is in use by another process; choose another "
                "port, or 0 for any free one"
            ) from error
        raise MetricsPortError(
            f"observability.metrics_port: cannot listen on port {port} on {host} ({error.strerror}); choose another "
            "port, or 0 for any free one"
        ) from error
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return MetricsServer(server, thread)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def write_token(run_folder: Path) -> str:
    """A token of this run that nobody has seen before, also written where only the run's user can read it."""
    token = secrets.token_urlsafe(32)
    path = run_folder / TOKEN_FILE
    path.unlink(missing_ok=True)  # of an earlier drive: its mode is whatever somebody has made of it
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    return token


def _guarded(app: WSGIApplication, token: str) -> WSGIApplication:
    """The application, for those who show the token."""
    expected = f"Bearer {token}".encode()

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        shown = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if hmac.compare_digest(shown, expected):
            return app(environ, start_response)
        headers = [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")]
        start_response("401 Unauthorized", headers)
        return [b"the token of the run is needed\n"]

    return guarded


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
        self._actors = _ActorFigures()
        registry.register(self._actors)
        self._steps = _StepFigures()
        registry.register(self._steps)
        self._evaluations = _EvaluationFigures()
        registry.register(self._evaluations)
        info = Gauge("penstock_run_info", "Which run this is.", ["scenario", "policy"], registry=registry)
        info.labels(scenario, policy).set(1)
        Gauge("penstock_run_steps_planned", "Batches to train.", registry=registry).set(num_steps)
        self._version = Gauge("penstock_policy_version", "Batches trained so far.", registry=registry)
        self._issued = Counter("penstock_samples_issued", "Samples issued.", registry=registry)
        self._in_system = Gauge("penstock_samples_in_system", "Issued and not terminal.", registry=registry)
        self._ended = Counter(
            "penstock_samples_ended", "Samples by how they ended.", ["state", "cause"], registry=registry
        )
        self._ended_tokens = Counter(
            "penstock_sample_tokens", "Response tokens of ended samples.", ["state", "cause"], registry=registry
        )
        self._generated = Counter("penstock_generated_tokens", "Tokens that engines made.", registry=registry)
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
        self._seen: dict[tuple[str, str, str], float] = {}
        self._activity_series: dict[tuple[str, Activity], Counter] = {}

    def actor(self, report: ActorReported, generated_tokens: int) -> None:
        """An actor's report.

        Args:
            report: its figures, exposed as they are.
            generated_tokens: total of all incarnations of all engines.
        """
        self._actors.report(report)
        self._raise_to(self._generated, ("generated", "", ""), generated_tokens)

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

    def step(self, report: StepReported) -> None:
        """A recorded step."""
        self._version.set(report.version)
        self._steps.report(report)
        for age, count in enumerate(report.staleness_counts):
            for _ in range(count):
                self._ages.observe(age)
        for length in report.response_lengths:
            self._lengths.observe(length)
        balance = report.balance
        self._raise_to(self._issued, ("issued", "", ""), balance.issued)
        self._in_system.set(balance.in_system)
        for ended in balance.ended:
            series = self._ended.labels(ended.state, ended.cause)
            self._raise_to(series, ("ended", ended.state, ended.cause), ended.num_samples)
            series = self._ended_tokens.labels(ended.state, ended.cause)
            self._raise_to(series, ("tokens", ended.state, ended.cause), ended.num_tokens)

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
