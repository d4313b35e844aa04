"""Several runs on one page, made from their folders."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest
from test_observability_report import FACTS, SCRIPT, Page, finished, policy, run, sha256, step
from typer.testing import CliRunner

from penstock.messages.base import Metric
from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.observability.comparison import write_comparison
from penstock.runtime.observability.evaluations import EvaluationRow
from penstock.runtime.observability.recorder import RunRecorder
from penstock.runtime.observability.trackers import MetricsLog

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A run of 25 steps, one of 3 that was cut off, and one that imitates."""
    long, short, imitates = (tmp_path / name for name in ("long<b>", "short", "imitates"))
    run(long, 25, finished(25))
    run(short, 3, None)
    (short / "scenario.yaml").write_text("run:\n  name: quick<start>\n  seed: 8\nstaleness: {max_staleness: 0}\n")
    run(imitates, 0, None)
    recorder = RunRecorder(imitates, FACTS)
    recorder.step(msgspec.structs.replace(step(1), metrics=(Metric("train/loss", 3.0),)), 1.0)
    recorder.abandon()
    return long, short, imitates


def test_each_figure_has_a_line_for_each_run_in_the_colour_of_the_run(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    charts = Page(write_comparison(folders, tmp_path / "c.html").read_text()).charts
    reward = charts["Reward: rollout/raw_reward"]
    assert [(line.label, len(line.x), line.colour) for line in reward.lines] == [("long<b>", 25, 0), ("short", 3, 1)]
    assert [(line.label, line.y, line.colour) for line in charts["Loss: train/loss"].lines] == [("imitates", [3.0], 2)]
    over_time = charts["Reward over time"]
    assert over_time.x_label == "minutes of training"
    assert over_time.lines[0].x[-1] == pytest.approx(24 / 60)
    assert list(charts)[:2] == [reward.title, over_time.title]


def test_it_names_the_keys_that_differ_and_the_facts_of_each(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    text = Page(write_comparison(folders, tmp_path / "c.html").read_text()).text
    assert "run.seed 7 8 7 staleness.max_staleness – 0 –" in text
    assert "run.name" not in text
    assert "steps 25 (of 25) 3 1" in text
    assert f"command {FACTS.command} {FACTS.command} {FACTS.command}" in text


def test_it_lets_nothing_in_but_itself(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    html = write_comparison(folders, tmp_path / "c.html").read_text()
    page = Page(html)
    assert page.scripts == [SCRIPT]
    assert f"script-src {sha256(SCRIPT)}" in policy(html)
    assert "b" not in page.tags  # a run's folder may have any name


def test_evaluations_are_compared_by_dataset_and_figure(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    long, short, _ = folders
    for folder, value in ((long, 0.5), (short, 0.75)):
        log = MetricsLog(folder)
        metrics = {"eval/sums/reward_mean": value, "eval/sums/num_answers": 4.0}
        log.append(EvaluationRow(evaluation=0, version=2, at_s=1.0, metrics=metrics))
        log.close()
    charts = Page(write_comparison(folders, tmp_path / "c.html").read_text()).charts
    lines = charts["sums: reward_mean"].lines
    assert [(line.label, line.x, line.y, line.colour) for line in lines] == [
        ("long<b>", [2], [0.5], 0),
        ("short", [2], [0.75], 1),
    ]


def test_a_run_without_a_scenario_is_named(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    (folders[1] / "scenario.yaml").unlink()
    with pytest.raises(UserFault, match=r"short/scenario\.yaml: cannot read"):
        write_comparison(folders, tmp_path / "c.html")


def test_the_command_writes_one_page_for_several_runs_and_into_the_folder_of_one(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    record = {"name": "x", "pid": 1, "start_ticks": 0, "boot_id": "another", "started_at": 0.0}
    for folder in folders:
        (folder / "run.json").write_text(json.dumps(record))
    runner, page = CliRunner(), tmp_path / "both.html"
    told = runner.invoke(app, ["report", str(folders[0]), str(folders[1]), "--out", str(page)])
    assert (told.exit_code, told.output) == (0, f"wrote {page}\n")
    assert "2 runs compared" in page.read_text()
    told = runner.invoke(app, ["report", str(folders[1])])
    assert (told.exit_code, told.output) == (0, f"wrote {folders[1] / 'report.html'}\n")
    assert "cut off" in (folders[1] / "report.html").read_text()  # it says "running", and its process is gone
