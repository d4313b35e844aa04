"""``/metrics``: what is exposed, that counters only grow, and what happens when the port is taken."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.backends.processes.http_server import is_loopback
from penstock.messages.base import Metric
from penstock.messages.errors import UserFault
from penstock.messages.reasons import ReasonCount
from penstock.messages.training import (
    Activity,
    ActivitySpan,
    ActorReported,
    Balance,
    CauseCount,
    FailuresCounted,
    StepReported,
)
from penstock.runtime.observability.metrics import MAX_REASONS, RunMetrics
from penstock.runtime.observability.metrics_server import TOKEN_FILE, serve_metrics, write_token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def metrics() -> RunMetrics:
    return RunMetrics(scenario="quickstart", policy="fully_async", num_steps=80)


@pytest.fixture
def url(metrics: RunMetrics) -> Iterator[str]:
    server = serve_metrics(0, metrics.registry)
    yield f"http://127.0.0.1:{server.port}/metrics"
    server.close()


def scrape(url: str) -> dict[str, float]:
    """Every sample as ``name{label=value,…}``, from a real scrape."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


def balance(trained: int, filtered: int) -> Balance:
    ended = (
        CauseCount(state="trained", cause="", num_samples=trained, num_tokens=10 * trained),
        CauseCount(state="filtered", cause="zero_spread", num_samples=filtered, num_tokens=3 * filtered),
    )
    tokens = 10 * trained + 3 * filtered
    return Balance(
        issued=trained + filtered + 5, in_system=5, ended=ended, generated_tokens=tokens + 4, in_system_tokens=4
    )


def step(version: int, trained: int) -> StepReported:
    return StepReported(
        version=version,
        num_steps=80,
        group_ids=(1,),
        metrics=(Metric("rollout/raw_reward", 0.25 * version), Metric("train/pg_loss", -0.5)),
        staleness_counts=(6, 2),
        response_lengths=(10, 20, 30, 40, 50, 60, 70, 80),
        balance=balance(trained, 2),
    )


def report(name: str, epoch: int, **figures: float) -> ActorReported:
    metrics = tuple(Metric(f"engine/{key}", value) for key, value in figures.items())
    return ActorReported(name=name, epoch=epoch, state="generating", metrics=metrics)


def test_the_policy_that_new_grants_follow_is_the_one_with_a_1(metrics: RunMetrics, url: str) -> None:
    for version, policy in enumerate(("sync", "sync", "fully_async"), start=1):
        metrics.step(msgspec.structs.replace(step(version, 8), policy=policy))
    samples = scrape(url)
    assert samples["penstock_staleness_policy{policy=sync}"] == 0
    assert samples["penstock_staleness_policy{policy=fully_async}"] == 1


def test_steps_show_as_typed_figures_of_the_run(metrics: RunMetrics, url: str) -> None:
    metrics.step(step(1, 8))
    metrics.step(step(2, 16))
    samples = scrape(url)
    assert samples["penstock_run_info{policy=fully_async,scenario=quickstart}"] == 1
    assert samples["penstock_policy_version{}"] == 2
    assert samples["penstock_step_rollout_raw_reward{}"] == 0.5
    assert samples["penstock_step_train_pg_loss{}"] == -0.5
    assert samples["penstock_samples_issued_total{}"] == 23
    assert samples["penstock_samples_in_system{}"] == 5
    assert samples["penstock_samples_ended_total{cause=,state=trained}"] == 16
    assert samples["penstock_samples_ended_total{cause=zero_spread,state=filtered}"] == 2
    assert samples["penstock_sample_tokens_total{cause=,state=trained}"] == 160
    assert samples["penstock_staleness_versions_count{}"] == 16
    assert samples["penstock_staleness_versions_bucket{le=0.0}"] == 12
    assert samples["penstock_staleness_versions_bucket{le=1.0}"] == 16
    assert samples["penstock_response_tokens_sum{}"] == 720
    assert samples["penstock_generated_tokens_total{}"] == 170 == 160 + 6 + samples["penstock_tokens_in_system{}"]


def test_figures_of_actors_show_under_their_name(metrics: RunMetrics, url: str) -> None:
    metrics.actor(report("engine/0", 1, running=3, occupancy=0.5))
    metrics.actor(report("engine/1", 1, running=4))
    metrics.actor(report("engine/0", 1, running=7))
    samples = scrape(url)
    assert samples["penstock_actor_engine_running{actor=engine/0}"] == 7
    assert samples["penstock_actor_engine_running{actor=engine/1}"] == 4
    assert samples["penstock_actor_engine_occupancy{actor=engine/0}"] == 0.5


def test_time_adds_up_by_state(metrics: RunMetrics, url: str) -> None:
    metrics.activity("engine/0", [ActivitySpan(Activity.WORKING, 0, 4, 0.25), ActivitySpan(Activity.DOWN, 4, 5)])
    metrics.activity("engine/0", [ActivitySpan(Activity.WORKING, 5, 7, 1.0)])
    samples = scrape(url)
    assert samples["penstock_activity_seconds_total{activity=working,actor=engine/0}"] == 6
    assert samples["penstock_activity_seconds_total{activity=down,actor=engine/0}"] == 1
    assert samples["penstock_occupied_seconds_total{actor=engine/0}"] == 3


def test_no_counter_goes_down_when_a_report_comes_late(metrics: RunMetrics, url: str) -> None:
    metrics.step(step(2, 16))
    metrics.step(step(1, 8))
    samples = scrape(url)
    assert samples["penstock_samples_ended_total{cause=,state=trained}"] == 16
    assert samples["penstock_generated_tokens_total{}"] == 170


def test_losses_are_counted(metrics: RunMetrics, url: str) -> None:
    metrics.lost("engine/1", 640)
    metrics.lost("engine/1", 10)
    samples = scrape(url)
    assert samples["penstock_restarts_total{actor=engine/1}"] == 2
    assert samples["penstock_lost_tokens_estimate_total{}"] == 650


def test_failures_are_counted_by_cause_and_kind_of_reason_and_their_kinds_are_bounded(
    metrics: RunMetrics, url: str
) -> None:
    def count(kind: str, number: int) -> ReasonCount:
        return ReasonCount(cause="scoring_failed", kind=kind, example="ValueError: 7", num_samples=number)

    metrics.failures(FailuresCounted(counts=(count("ValueError (r.py:3)", 2),), num_samples=2))
    metrics.failures(FailuresCounted(counts=(count("ValueError (r.py:3)", 5), count('"\n\x1b', 1)), num_samples=6))
    for number in range(1000):
        metrics.failures(FailuresCounted(counts=(count(f"E{number}", 1),), num_samples=1))
    samples = scrape(url)
    assert samples["penstock_samples_failed_total{cause=scoring_failed,reason=ValueError (r.py:3)}"] == 5
    assert sum(name.startswith("penstock_samples_failed_total{") for name in samples) == MAX_REASONS


def test_names_that_look_alike_or_odd_do_not_break_a_scrape(metrics: RunMetrics, url: str) -> None:
    names = ("a/b", "a_b", "policy/version", "run/info", "ä ö", "lr-pg_0")
    metrics.step(
        StepReported(
            version=1,
            num_steps=2,
            group_ids=(),
            metrics=tuple(Metric(name, 1.0) for name in names),
            staleness_counts=(),
            response_lengths=(),
            balance=balance(1, 1),
        )
    )
    metrics.actor(ActorReported(name="x", epoch=1, state="", metrics=tuple(Metric(name, 2.0) for name in names)))
    samples = scrape(url)
    assert samples["penstock_step_a_b{}"] == 1
    assert samples["penstock_step_lr_pg_0{}"] == 1
    assert samples["penstock_actor_policy_version{actor=x}"] == 2
    assert samples["penstock_policy_version{}"] == 1


def test_a_port_in_use_is_one_clear_error(metrics: RunMetrics) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserFault) as caught:
            serve_metrics(port, metrics.registry)
    assert isinstance(caught.value, UserFault)
    assert str(caught.value) == (
        f"observability.metrics_port: port {port} on 127.0.0.1 is in use by another process; choose another port, or "
        "0 for any free one"
    )


def test_an_address_that_is_not_ours_is_a_clear_error(metrics: RunMetrics) -> None:
    with pytest.raises(UserFault, match=r"cannot listen on port 0 on 192\.0\.2\.1 \(.+\); choose another port"):
        serve_metrics(0, metrics.registry, host="192.0.2.1", token="t")


NO_SECRET = -401
"""Refused, and told no figure."""


def status_of(url: str, token: str | None) -> int:
    request = urllib.request.Request(url, headers={} if token is None else {"Authorization": token})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return NO_SECRET if error.code == 401 and b"penstock" not in error.read() else error.code


def test_beyond_this_machine_only_who_shows_the_token_of_the_run_learns_anything(
    metrics: RunMetrics, tmp_path: Path
) -> None:
    token = write_token(tmp_path)
    server = serve_metrics(0, metrics.registry, host="0.0.0.0", token=token)
    url = f"http://127.0.0.1:{server.port}/metrics"
    try:
        assert status_of(url, f"Bearer {token}") == 200
        refused = [None, "", "Bearer", f"Bearer {token}x", f"Bearer {token[:-1]}", token, f"Basic {token}", "Bearer é"]
        assert [status_of(url, shown) for shown in refused] == [NO_SECRET] * len(refused)
    finally:
        server.close()


def test_a_token_is_new_each_time_and_only_the_user_can_read_it(tmp_path: Path) -> None:
    first = write_token(tmp_path)
    path = tmp_path / TOKEN_FILE
    path.chmod(0o644)
    second = write_token(tmp_path)
    assert first != second
    assert path.read_text() == second + "\n"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org", ""])
def test_nothing_is_served_to_other_machines_without_a_token(metrics: RunMetrics, host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(AssertionError, match="without a token"):
        serve_metrics(0, metrics.registry, host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_alone_needs_none(host: str) -> None:
    assert is_loopback(host)


def test_closing_frees_the_port(metrics: RunMetrics) -> None:
    server = serve_metrics(0, metrics.registry)
    port = server.port
    server.close()
    again = serve_metrics(port, metrics.registry)
    assert again.port == port
    again.close()
