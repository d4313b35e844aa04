"""What ``docs/grafana.json`` asks for, held against the ``/metrics`` of a real run in which things go wrong too."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live_run import LiveRun
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.nightly_on_ray, pytest.mark.timeout(300)]

FILE = Path(__file__).parents[2] / "docs" / "grafana.json"
REWARD = """
def reward(prompt, response, label):
    if sum(map(ord, response)) % 7 == 0:
        raise ValueError("planted")
    return {"reward": len(set(response)) / 80, "length": float(len(response))}
"""
ENDLESS = (
    "run.num_steps=10000",
    "model.make=xs",
    "data.path=lines:200",
    "sampling.samples_per_group=4",
    "sampling.max_response_tokens=24",
    "learner.groups_per_batch=4",
    "learner.warm_start=null",
    "evaluation.before_first=true",
    "evaluation.datasets=[{name: sums, path: 'lines:4'}]",
    "observability.metrics_port=0",
    "runtime.heartbeat_timeout_s=60",  # a test machine may be busy with other things
)
LEFT_OUT = {r"penstock_.*_created": "when a series began, which prometheus-client adds to each counter and histogram"}
"""Series that no panel shows, and why."""
OF_PROMETHEUS = {"instance", "job"}
"""Labels that a scrape adds."""

Series = dict[str, list[dict[str, str]]]
"""Name of a series → labels of each of its samples."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Series:
    """What a run exposes when it has trained, failed, been evaluated, and lost an engine, once all that is asked for
    has come, bit by bit, or does not come."""
    folder = tmp_path_factory.mktemp("grafana")
    (folder / "mine.py").write_text(REWARD)
    with LiveRun("fully_async.yaml", folder, [*ENDLESS, f"reward.function={folder / 'mine.py'}:reward"]) as run:
        run.await_steps(1)
        (url,) = re.findall(r"metrics: (http://\S+/metrics)", run.output)
        os.kill(run.pid_of("engine/0"), signal.SIGKILL)
        run.await_steps(3)
        deadline_s = time.monotonic() + 100
        asked_for, found = read_dashboard(), scrape(url)
        while wrong(asked_for, found) and time.monotonic() < deadline_s:
            assert run.process.poll() is None, run.ending
            time.sleep(1.0)  # between two scrapes, which cost both sides; nothing is timed by it
            found = scrape(url)
        run.interrupt()
    return found


@pytest.fixture
def dashboard() -> dict[str, Any]:
    return read_dashboard()


def read_dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def scrape(url: str) -> Series:
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


# --- what is asked for ---------------------------------------------------------------------------------------------


def asked(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each query with the legend that names its lines."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if found := re.fullmatch(r"label_values\((.+), (\w+)\)", variable.get("definition", "")):
            yield found[1] if "{" in found[1] else f"{found[1]}{{}}", f"{{{{{found[2]}}}}}"


def selectors(query: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Each selector of a query: a regular expression for the names it selects, and its matchers of other labels."""
    rest = re.sub(r"penstock_\w+(?=\{)|\{[^}]*\}", "", query)
    assert "penstock_" not in rest, f"a series without its braces: {query}"
    for name, text in re.findall(r"(\w*)\{([^}]*)\}", query):
        matchers = re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', text)
        names = [value for label, _, value in matchers if label == "__name__"]
        yield name or names[0], [each for each in matchers if each[0] != "__name__"]


def selected(page: Series, name: str) -> list[str]:
    return [each for each in page if re.fullmatch(name, each)]


def wrong(dashboard: dict[str, Any], page: Series) -> list[str]:
    """What the dashboard asks for and the page has not, and what the page has and nobody asks for."""
    found: list[str] = []
    shown: set[str] = set()
    for query, legend in asked(dashboard):
        labels = {"le"} if "histogram_quantile" in query else set[str]()
        for name, matchers in selectors(query):
            names = selected(page, name)
            shown.update(names)
            samples = [sample for each in names for sample in page[each]]
            labels |= {"__name__"} | OF_PROMETHEUS | {label for sample in samples for label in sample}
            found += [] if names else [f"no series is named {name}: {query}"]
            found += [f"{name} has no {said}: {query}" for said in unmatched(matchers, samples)]
        named = re.findall(r"\{\{(\w+)\}\}", legend)
        named += [label for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(", ")]
        found += [f"no label is named {label}: {query}, {legend}" for label in named if label not in labels]
    left = [name for name in page if name not in shown and not any(re.fullmatch(each, name) for each in LEFT_OUT)]
    return found + [f"{name} is neither shown nor left out" for name in left]


def unmatched(matchers: list[tuple[str, str, str]], samples: list[dict[str, str]]) -> Iterator[str]:
    """Matchers that no sample has a label for, or a value."""
    for label, operator, value in matchers:
        if label in OF_PROMETHEUS:
            continue
        values = {sample[label] for sample in samples if label in sample}
        pattern = re.escape(value) if operator in ("=", "!=") else value
        if not values:
            yield label
        elif "$" not in value and not any(re.fullmatch(pattern, each) for each in values):
            yield f"{label}={value}"


# --- tests -----------------------------------------------------------------------------------------------------------


def test_every_query_finds_its_series_and_every_series_is_shown_or_left_out(
    dashboard: dict[str, Any], page: Series
) -> None:
    assert not wrong(dashboard, page)
    assert all(selected(page, name) for name in LEFT_OUT)


@pytest.mark.parametrize(
    ("before", "after", "story"),
    [
        ("penstock_policy_version{", "penstock_policy_versions{", "no series is named penstock_policy_versions"),
        ('state="trained"', 'state="train"', "penstock_sample_tokens_total has no state=train"),
        ('actor=~"engine/.+"', 'actor=~"engines/.+"', "has no actor=engines/.+"),
        ('{instance="$run", figure=~', '{instance="$run", figures=~', "penstock_evaluation has no figures"),
        ("by (cause, reason)", "by (cause, reasons)", "no label is named reasons"),
        ("{{activity}}", "{{activities}}", "no label is named activities"),
        (
            "penstock_lost_tokens_estimate_total",
            "penstock_generated_tokens_total",
            "_total is neither shown nor left out",
        ),
    ],
)
def test_a_name_that_is_misspelt_or_missing_is_found(
    dashboard: dict[str, Any], page: Series, before: str, after: str, story: str
) -> None:
    changed = copy.deepcopy(dashboard)
    targets = [target for panel in changed["panels"] for target in panel.get("targets", [])]
    for target in targets:
        target |= {key: target[key].replace(before, after) for key in ("expr", "legendFormat")}
    assert any(story in each for each in wrong(changed, page))


def test_a_new_series_has_to_be_shown(dashboard: dict[str, Any], page: Series) -> None:
    assert wrong(dashboard, page | {"penstock_new_total": [{}]}) == ["penstock_new_total is neither shown nor left out"]
