"""Samples and Ledger of a real run with a model, while it goes on and after: every sample, its tokens and its life."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from live_run import LiveRun

from penstock.backends.ledger.sqlite import open_read_only
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.dashboard.ledger_view import answer_ledger
from penstock.runtime.dashboard.routes import Query
from penstock.runtime.dashboard.sample_index import advance
from penstock.runtime.dashboard.sample_page import SampleQuery, answer_life, answer_sample
from penstock.runtime.dashboard.sample_rows import CountQuery, TableQuery, count, table
from penstock.runtime.dashboard.sample_sums import bins
from penstock.runtime.dashboard.sql_box import SqlQuery, ask
from penstock.runtime.observability.lives import STAGES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

KEYS = (
    "run.num_steps=6",
    "run.keep_samples=true",
    "model.make=xs",
    "learner.groups_per_batch=8",
    "learner.warm_start.num_steps=40",
    "sampling.max_response_tokens=48",
    "observability.trace_fraction=1",
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
