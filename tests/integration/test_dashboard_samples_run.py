"""Samples and Ledger of a real run with a model, while it goes on and after: every sample, its tokens and its life."""

from __future__ import annotations

import gzip
import json
import math
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from live_run import LiveRun

from penstock.backends.ledger.sqlite import open_read_only
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.backends.profiling import profile_files
from penstock.messages.errors import UserFault
from penstock.runtime.dashboard.devices_view import ProfileQuery, Window, answer_devices, answer_profile
from penstock.runtime.dashboard.ledger_view import answer_ledger
from penstock.runtime.dashboard.routes import Query
from penstock.runtime.dashboard.sample_index import advance
from penstock.runtime.dashboard.sample_page import NOT_KEPT_LEARNER, SampleQuery, answer_life, answer_sample
from penstock.runtime.dashboard.sample_rows import CountQuery, TableQuery, count, table
from penstock.runtime.dashboard.sample_sums import bins
from penstock.runtime.dashboard.sql_box import SqlQuery, ask
from penstock.runtime.observability.lives import STAGES
from penstock.runtime.observability.report import render_report
from penstock.runtime.observability.step_difference import compare_steps

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(540)]

KEYS = (
    "run.num_steps=6",
    "run.keep_samples=true",
    "model.make=xs",
    "learner.groups_per_batch=8",
    "learner.warm_start.num_steps=40",
    "sampling.max_response_tokens=48",
    "observability.trace_fraction=1",
    "learner.dump.last_step=3",
    "learner.profile.last_step=2",
    "engines.profile={first_step: 2, last_step: 3, max_passes: 8}",
    "evaluation.every=3",
    "evaluation.datasets=[{name: lines, path: 'lines:8'}]",
)


def indexed(folder: Path) -> int:
    """Samples in the index when it has everything that the ledger has."""
    ends_s = time.monotonic() + 60
    while (state := advance(folder)).doing:
        assert time.monotonic() < ends_s
    return state.num_samples


def in_ledger(folder: Path, sql: str) -> list[Any]:
    with closing(open_read_only(folder / LEDGER_FILE)) as database:
        return database.execute(sql).fetchall()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder; the table was asked while it went on."""
    with LiveRun("quickstart.yaml", tmp_path_factory.mktemp("samples"), KEYS) as live:
        live.await_steps(2)
        early = indexed(live.folder)
        assert early > 0
        assert table(live.folder, TableQuery(sort="step")).rows
        summary = live.finish()
        assert summary.completed
        assert indexed(live.folder) > early
        return live.folder


def test_every_sample_is_in_the_table_with_its_fate(run: Path) -> None:
    rows = dict(in_ledger(run, "SELECT coalesce(state, 'in the system'), count(*) FROM samples GROUP BY 1"))
    assert {state: count(run, CountQuery(state=state)).num_samples for state in rows} == rows
    best = table(run, TableQuery(sort="reward", state="trained", limit=5)).rows
    (highest,) = in_ledger(run, "SELECT max(reward) FROM samples WHERE state = 'trained'")[0]
    assert best[0].reward == highest
    assert bins(run, CountQuery(kind="training")).num_samples == 6 * 8 * 8


def trained_at(run: Path, step: int) -> str:
    sql = f"SELECT group_id || '/' || sample_index FROM samples WHERE state = 'trained' AND version = {step} LIMIT 1"
    return str(in_ledger(run, sql)[0][0])


def test_what_the_learner_computed_stands_beside_the_engines_figures(run: Path) -> None:
    page = answer_sample(run, SampleQuery(sample=trained_at(run, 3)))
    tokens = page.tokens
    assert tokens is not None
    assert tokens.source.startswith("samples/")
    assert NOT_KEPT_LEARNER not in page.missing
    for drawn, learner, ratio in zip(tokens.logprobs, tokens.learner_logprobs, tokens.ratios, strict=True):
        assert None not in (drawn, learner, ratio)
        assert ratio == pytest.approx(math.exp((learner or 0) - (drawn or 0)), rel=1e-4)
    (advantage,) = set(tokens.advantages)
    assert advantage is not None
    assert page.reward is not None
    assert page.mean is not None
    assert np.sign(advantage) == np.sign(page.reward - page.mean)
    later = answer_sample(run, SampleQuery(sample=trained_at(run, 4)))
    assert NOT_KEPT_LEARNER in later.missing
    assert later.tokens is not None
    assert later.tokens.ratios == []


def test_profiles_are_traces_with_what_was_done_and_are_linked(run: Path) -> None:
    found = [path.name for path in profile_files(run)]
    assert "learner-step-0000002-rank-0.json.gz" in found
    of_engines = {name.split("-step-")[1] for name in found if name.startswith("engine")}
    assert of_engines == {"0000002.json.gz", "0000003.json.gz"}
    page, devices = render_report(run), answer_devices(run, Window())
    for path in profile_files(run):
        told = answer_profile(run, ProfileQuery(name=path.as_posix())).body
        names = {event.get("name") for event in json.loads(gzip.decompress(told))["traceEvents"]}
        assert {"gradients", "optimizer step"} <= names or {"decode step", "aten::mm"} <= names
        assert f'href="{path.as_posix()}"' in page
        assert path.as_posix() in devices.profiles
    with pytest.raises(UserFault, match="no such profile"):
        answer_profile(run, ProfileQuery(name="profiles/../scenario.yaml"))


@pytest.mark.slow
def test_another_temperature_is_found_in_the_tokens_of_the_first_step(run: Path, tmp_path: Path) -> None:
    keys = (*KEYS[1:6], "run.num_steps=1", "learner.dump.last_step=1", "sampling.temperature=0.6")
    with LiveRun("quickstart.yaml", tmp_path, keys) as other:
        other.finish()
        difference = compare_steps(run, other.folder, step=None, tolerance=1e-3).difference
    assert difference is not None
    assert (difference.step, difference.column) == (1, "tokens")


def test_every_trained_sample_has_its_texts_tokens_and_whole_life(run: Path) -> None:
    for row in table(run, TableQuery(state="trained", limit=500)).rows[::40]:
        page = answer_sample(run, SampleQuery(sample=row.name))
        assert page.tokens is not None
        assert page.tokens.num_tokens == len(page.tokens.logprobs) == len(page.tokens.versions) == row.num_tokens
        assert "".join(page.tokens.texts).replace("<eos>", "").replace("\\n", "\n") == page.response
        assert all(value is not None and value <= 0 for value in page.tokens.logprobs)
        assert min(page.tokens.versions) == page.oldest_version
        assert page.prompt
        assert len(page.group) == 8
        life = answer_life(run, SampleQuery(sample=row.name))
        assert {stage.name for stage in life.stages} == set(STAGES)
        (generate,) = [stage for stage in life.stages if stage.name == "generate"]
        assert sum(number for _, number in generate.versions) == row.num_tokens


def test_balance_and_sql_box_agree(run: Path) -> None:
    page = answer_ledger(run, Query())
    assert sum(one.num_tokens for one in page.tokens) == page.num_generated
    answer = ask(run, SqlQuery(sql="SELECT sum(num_samples) FROM balance"), 30.0)
    assert answer.rows == [[str(sum(one.num_samples for one in page.balance))]]
