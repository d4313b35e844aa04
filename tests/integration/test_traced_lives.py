"""``penstock trace`` of a run in which engines, Buffer and Filter are killed, samples fail and are dropped."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from live_run import LiveRun
from typer.testing import CliRunner

from penstock.backends.ledger.sqlite import open_read_only
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.runtime.cli.app import app
from penstock.runtime.observability.lives import STAGES, Life, read_fates, read_lives
from penstock.runtime.observability.spans import trace_id_of
from penstock.runtime.observability.traces import each_span, run_salt, spans_by_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(300)]

MODELLED = Path(__file__).parents[1] / "chaos" / "modelled.yaml"
NUM_STEPS = 24
KILLS = ((3, "engine/0"), (8, "buffer"), (13, "filter"), (17, "engine/1"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder."""
    parent = tmp_path_factory.mktemp("traced")
    keys = (
        f"run.num_steps={NUM_STEPS}",
        "engines.simulated.failure_rate=0.3",
        "prompt_source.num_retries=1",
        "filter.drop_zero_spread=true",
        "observability.tracing=true",
        "observability.trace_fraction=1",
    )
    with LiveRun(MODELLED, parent, keys) as live:
        for step, actor in KILLS:
            live.await_steps(step)
            os.kill(live.pid_of(actor), signal.SIGKILL)
        summary = live.finish()
        assert sum(restart.count for restart in summary.restarts) >= len(KILLS)
        return live.folder


@pytest.fixture(scope="module")
def lives(run: Path) -> list[Life]:
    return read_lives(run, read_fates(run))


@pytest.fixture
def trace(run: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What the command prints."""
    monkeypatch.setenv("COLUMNS", "200")

    def ask(*words: str) -> str:
        result = CliRunner().invoke(app, ["trace", str(run), *words])
        assert result.exit_code == 0, f"{result.output}\n{result.exception}"
        return result.output

    return ask


def ledger_rows(run: Path, sql: str) -> list[Any]:
    with closing(open_read_only(run / LEDGER_FILE)) as database:
        return database.execute(sql).fetchall()


def is_in_order(life: Life) -> bool:
    """Whether the last attempt came through the stages one after the other."""
    first = {one.name: one for one in reversed(life.stages) if one.attempt in (None, life.fate.attempt)}
    return all(first[one].start_ns <= first[other].start_ns for one, other in pairwise(STAGES))


def test_every_trained_sample_has_all_stages_although_actors_were_killed(run: Path, lives: Sequence[Life]) -> None:
    trained = [life for life in lives if life.fate.state == "trained"]
    (in_ledger,) = ledger_rows(run, "SELECT count(*) FROM samples WHERE state = 'trained'")[0]
    assert len(trained) == in_ledger == 4 * 8 * NUM_STEPS
    num_in_order = 0
    for life in trained:
        assert {stage.name for stage in life.stages} == set(STAGES), life
        assert life.start_ns < life.end_ns
        assert all(stage.start_ns <= stage.end_ns for stage in life.stages), life
        num_in_order += is_in_order(life)
    unrecorded = {stage.name for life in trained for stage in life.stages if not stage.is_recorded}
    assert "buffer_wait" in unrecorded, "the kills took nothing along, so that this test shows nothing"
    whole = sum(all(stage.is_recorded for stage in life.stages) for life in trained)
    assert whole > len(trained) / 2
    assert num_in_order > len(trained) / 2, "a replacement goes through what it is sent again, but for few samples"


def test_without_the_ledgers_help_the_killed_actors_stages_would_be_missing(run: Path, lives: Sequence[Life]) -> None:
    """What is told as not recorded has no span in any file, and what is told as recorded has one."""
    salt = run_salt(run)
    ids = {trace_id_of(salt, life.fate.group_id, life.fate.index).hex(): life for life in lives}
    for trace_id, rows in spans_by_trace(run, ids).items():
        recorded = sorted((stage.name, stage.start_ns) for stage in ids[trace_id].stages if stage.is_recorded)
        assert recorded == sorted((row.name, row.start_ns) for row in rows if row.name in STAGES)


def test_attempts_of_a_sample_stand_beside_each_other(trace: Callable[..., str], lives: Sequence[Life]) -> None:
    again = [
        life for life in lives
        if life.fate.state == "trained" and len({s.attempt for s in life.stages if s.name == "issue"}) > 1
    ]  # fmt: skip
    assert again, "two engines were killed"
    life = again[0]
    shown = trace("--sample", life.fate.name)
    assert f"{life.fate.name}  trained at step {life.fate.version}" in shown
    assert "attempt 0  " in shown
    assert "issued again" in shown
    assert f"attempt {life.fate.attempt}" in shown
    assert all(name in shown for name in STAGES)


def test_every_span_is_written_for_a_collector(trace: Callable[..., str], run: Path, tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    assert "batches of spans as OTLP/JSON" in trace("--otlp", str(file))
    batches = [batch for line in file.open() for batch in json.loads(line)["resourceSpans"]]
    ids = [span["spanId"] for batch in batches for scope in batch["scopeSpans"] for span in scope["spans"]]
    assert sorted(ids) == sorted(row.span_id for row in each_span(run))
    assert len(ids) > 4 * 8 * NUM_STEPS * len(STAGES)


def test_the_slowest_come_first(trace: Callable[..., str], lives: Sequence[Life]) -> None:
    longest = sorted((life.duration_s for life in lives if life.is_traced), reverse=True)[:7]
    heads = [line.split()[0] for line in trace("--slowest", "7").splitlines() if line[:1].isalnum() and "/" in line]
    by_name = {life.fate.name: life.duration_s for life in lives}
    assert [by_name[name] for name in heads if name in by_name] == longest


def test_without_a_choice_the_slowest_are_shown(trace: Callable[..., str]) -> None:
    assert trace() == trace("--slowest", "5")


@pytest.mark.parametrize(("words", "states"), [(("--failed",), ("failed",)), (("--dropped",), ("filtered", "stale"))])
def test_all_that_failed_or_were_dropped_are_told_with_their_causes(
    words: Sequence[str], states: Sequence[str], trace: Callable[..., str], run: Path
) -> None:
    shown = trace(*words, "--limit", "1000000")
    marks = ", ".join(f"'{state}'" for state in states)
    rows = ledger_rows(run, f"SELECT group_id, sample_index, state, cause FROM samples WHERE state IN ({marks})")
    assert rows
    lines = shown.splitlines()
    for group_id, index, state, cause in rows:
        name = f"e{~group_id}/{index}" if group_id < 0 else f"{group_id}/{index}"
        assert [line for line in lines if line.startswith(f"{name}  {state}: {cause}")], name
    assert f"{len(rows):,} of {len(rows):,} such samples are shown" in shown


def test_a_step_is_shown_with_its_version_and_its_samples(trace: Callable[..., str]) -> None:
    shown = trace("--step", "4", "--limit", "100")
    assert all(name in shown for name in ("step 4", "publish", "version", "fetch_weights", "apply_weights"))
    assert "32 samples, 32 of them traced" in shown
    assert sum(" at " in line for line in shown.splitlines()) == 32


def events_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] != "M"]


def ns(event: dict[str, Any]) -> tuple[int, int]:
    start = round(1000 * event["ts"])
    return start, start + round(1000 * event.get("dur", 0))


@pytest.mark.parametrize("option", ["--perfetto", "--chrome"])
def test_the_view_of_a_run_nests_and_its_lanes_tile(
    option: str, trace: Callable[..., str], tmp_path: Path, lives: Sequence[Life]
) -> None:
    trace(option, str(tmp_path / "view.json"), "--events")
    events = events_of(tmp_path / "view.json")
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for track in tracks.values():
        open_ends: list[int] = []
        for event in sorted(track, key=lambda event: (ns(event)[0], -ns(event)[1])):
            start, end = ns(event)
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], event
            open_ends.append(end)
        if track[0]["cat"] == "lane":
            times = [ns(event) for event in track]
            assert times[0][0] == 0
            assert all(end == start for (_, end), (start, _) in pairwise(times))
    assert {event["cat"] for event in events} == {"lane", "sample", "stage", "not recorded", "step", "handled"}
    assert sum(event["cat"] == "sample" for event in events) == sum(life.is_traced for life in lives)


def test_the_view_of_a_chosen_sample_holds_its_life_alone(
    trace: Callable[..., str], tmp_path: Path, lives: Sequence[Life]
) -> None:
    life = next(life for life in lives if life.fate.state == "trained")
    trace("--sample", life.fate.name, "--perfetto", str(tmp_path / "one.json"))
    events = events_of(tmp_path / "one.json")
    (whole,) = [event for event in events if event["cat"] == "sample"]
    assert whole["name"] == f"sample {life.fate.name}"
    assert ns(whole)[1] - ns(whole)[0] == life.end_ns - life.start_ns
    assert [event["name"] for event in events if event["cat"] in ("stage", "not recorded")].count("train") == 1
    assert {event["args"]["version"] for event in events if event["cat"] == "step"} == {life.fate.version}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--sample", "1/1", "--failed"), "shows one of"),
        (("--sample", "12"), "GROUP/INDEX"),
        (("--sample", "999999/0"), "nothing is known of sample 999999/0"),
        (("--step", "999"), "no trace of step 999"),
        (("--slowest", "1", "--perfetto", "no/such/folder/x.json"), "its folder is not there"),
    ],
)
def test_what_cannot_be_shown_is_told(words: Sequence[str], said: str, run: Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(run), *words])
    assert result.exception is not None
    assert said in str(result.exception)
