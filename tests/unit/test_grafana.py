"""``docs/grafana.json`` is a dashboard that Grafana imports: its form, and that nothing in it names another machine.

What its queries name is held against a run's own ``/metrics`` in ``tests/integration/test_grafana_run.py``.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

HOUSE = Path(__file__).parents[2]
FILE = HOUSE / "docs" / "grafana.json"
WIDTH = 24
"""Columns of Grafana's grid."""
BUILT_IN = {"__rate_interval"}
"""Variables that Grafana sets itself."""
KINDS = {"heatmap", "row", "stat", "table", "timeseries"}
"""Panels of stock Grafana that are used."""


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def queries(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_it_can_be_imported_anywhere(dashboard: dict[str, Any]) -> None:
    """Import takes a dashboard without an id of a server, and replaces one with the same ``uid``."""
    assert dashboard["id"] is None
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", dashboard["uid"])
    assert (dashboard["title"], dashboard["schemaVersion"]) == ("Penstock", 39)
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "run", "actor"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    asking = [*dashboard["panels"], *queries(dashboard), variables["run"], variables["actor"]]
    sources = [each["datasource"] for each in asking if each["type" if "type" in each else "refId"] != "row"]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert not re.findall(r"https?://|localhost|\d+\.\d+\.\d+\.\d+", FILE.read_text(encoding="utf-8"))


def test_its_panels_are_those_of_stock_grafana_each_with_a_place_of_its_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert {panel["type"] for panel in panels} == KINDS
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        covered = {
            (x, y)
            for x, y in itertools.product(
                range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
            )
        }
        assert not covered & cells, panel["title"]
        cells |= covered
        refs = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(refs)) == len(refs)
        assert bool(refs) == (panel["type"] != "row")


def test_its_rows_tell_a_run_from_its_progress_to_every_figure(dashboard: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Progress", "Learning", "Staleness", "Ledger", "Time", "Tokens a second", "Every figure"]


def test_each_query_is_about_the_chosen_run_and_uses_variables_that_there_are(dashboard: dict[str, Any]) -> None:
    known = {each["name"] for each in dashboard["templating"]["list"]} | BUILT_IN
    for target in queries(dashboard):
        assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= known, target["expr"]
        selected = re.findall(r"\{([^}]*)\}", target["expr"])
        assert selected
        assert all('instance="$run"' in matchers for matchers in selected), target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")


def test_prometheus_is_told_where_a_run_serves_and_how_to_show_the_token() -> None:
    """As it stands, and with the lines that are commented out."""
    text = (HOUSE / "docs" / "prometheus.yml").read_text(encoding="utf-8")
    shown = re.sub(r"^( +)# (authorization:|  credentials_file)", r"\1\2", text, flags=re.MULTILINE)
    plain, with_token = yaml.safe_load(text), yaml.safe_load(shown)
    (job,) = with_token["scrape_configs"]
    assert job.pop("authorization") == {"credentials_file": "/etc/prometheus/penstock.token"}
    assert [job] == plain["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9100"]}]
