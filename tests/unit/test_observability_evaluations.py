"""What a run writes and shows of its evaluations."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import msgspec
import pytest
from prometheus_client import generate_latest
from rich.console import Console
from test_observability_report import FACTS, SCENARIO, Page, finished, step

from penstock.backends.data.options import DataOptions
from penstock.backends.engines.options import SamplingOptions
from penstock.backends.evaluation.figures import VERSIONS
from penstock.backends.evaluation.options import EvaluationDataset, EvaluationOptions, EvaluationSettings
from penstock.backends.evaluation.sets import RunSettings, evaluation_sets
from penstock.backends.rewards.options import RewardOptions
from penstock.messages.base import Metric
from penstock.messages.evaluation import EvaluatedDataset, EvaluatedRow, EvaluatedSample, EvaluationFinished
from penstock.messages.samples import SampleEnd, SampleKey, TerminalState, VersionSpan
from penstock.messages.training import ActorReported
from penstock.runtime.observability.evaluations import evaluation_row, evaluation_text, read_evaluations
from penstock.runtime.observability.live import LiveView
from penstock.runtime.observability.live_state import LiveState
from penstock.runtime.observability.live_view import draw
from penstock.runtime.observability.metrics import RunMetrics
from penstock.runtime.observability.recorder import RunRecorder
from penstock.runtime.observability.report import render_report
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.summary_view import summary_panel
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

SETS = evaluation_sets(
    EvaluationOptions(
        defaults=EvaluationSettings(samples_per_prompt=4, k=(1, 4)),
        datasets=(
            EvaluationDataset(name="sums", path="lines:2"),
            EvaluationDataset(name="riddles", path="lines:1", samples_per_prompt=1, k=(1,)),
        ),
    ),
    RunSettings(DataOptions(path="lines:8"), SamplingOptions(), RewardOptions()),
)
FACTS_WITH_SETS = msgspec.structs.replace(FACTS, evaluation=SETS)


def sample(index: int, reward: float, version: int, outcome: str = "completed") -> EvaluatedSample:
    return EvaluatedSample(
        index=index,
        attempt=0,
        engine="engine/0",
        outcome=outcome,
        num_tokens=12,
        num_given_tokens=2,
        reward=reward,
        spans=(VersionSpan(version, 4), VersionSpan(version + 1, 8)),
    )


def test_answers_that_were_extracted_are_votes() -> None:
    event = evaluated(0, 20, passing=2)
    voting = [
        msgspec.structs.replace(
            row, samples=tuple(msgspec.structs.replace(s, answer=f"{s.reward:g}") for s in row.samples)
        )
        for row in event.datasets[0].rows
    ]
    sums = msgspec.structs.replace(event.datasets[0], rows=tuple(voting))
    row = evaluation_row(msgspec.structs.replace(event, datasets=(sums, event.datasets[1])), SETS, 1.0)
    assert row.metrics["eval/sums/maj@4"] == 0.5, "two against two, of the one prompt that has four answers"
    assert "maj@4 50.0 %" in evaluation_text(row)


def evaluated(number: int, version: int, *, passing: int) -> EvaluationFinished:
    """Of the first prompt's four answers so many pass; the second one's last answer is missing, its others fail."""
    missing = SampleEnd(key=SampleKey(~1, 3), state=TerminalState.FAILED, cause="engine lost")
    rows = (
        EvaluatedRow(0, tuple(sample(i, float(i < passing), version) for i in range(4))),
        EvaluatedRow(1, tuple(sample(i, 0.0, version, "truncated") for i in range(3)), (missing,)),
    )
    riddles = (EvaluatedRow(0, (sample(0, 1.0, version),)),)
    return EvaluationFinished(
        number=number,
        version=version,
        datasets=(
            EvaluatedDataset(dataset=0, name="sums", samples_per_prompt=4, rows=rows),
            EvaluatedDataset(dataset=1, name="riddles", samples_per_prompt=1, rows=riddles),
        ),
    )


def record(folder: Path, *evaluations: EvaluationFinished, resumes: bool = False) -> None:
    (folder / "scenario.yaml").write_text(SCENARIO)
    recorder = RunRecorder(folder, FACTS_WITH_SETS, resumes=resumes)
    recorder.training.everyone_is_up(0.0)
    recorder.step(step(1), 1.0)
    for event in evaluations:
        recorder.evaluated(event, 2.0)
    recorder.step(step(2), 3.0)
    recorder.finish(finished(2), 4.0)


def test_figures_of_an_evaluation_have_the_names_of_their_datasets() -> None:
    row = evaluation_row(evaluated(0, 20, passing=2), SETS, 1.0)
    assert row.metrics["eval/sums/reward_mean"] == pytest.approx(0.25)
    assert row.metrics["eval/sums/pass@1"] == pytest.approx(0.25)
    assert row.metrics["eval/sums/pass@4"] == 1  # of the one prompt that has four answers
    assert row.metrics["eval/sums/missing"] == pytest.approx(1 / 8)
    assert row.metrics["eval/sums/truncated"] == pytest.approx(3 / 7)
    assert row.metrics["eval/sums/response_len/mean"] == 10  # the model's own tokens
    assert row.metrics["eval/sums/version/mean"] == pytest.approx(20 + 2 / 3)
    assert row.metrics["eval/riddles/pass@1"] == 1


def test_steps_and_evaluations_share_a_file_and_are_told_apart(tmp_path: Path) -> None:
    record(tmp_path, evaluated(0, 1, passing=1))
    assert [row.version for row in read_steps(tmp_path)] == [1, 2]
    [row] = read_evaluations(tmp_path)
    assert (row.evaluation, row.version) == (0, 1)
    lines = [msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert ["evaluation" in line for line in lines] == [False, True, False]


def test_an_evaluation_that_is_reported_again_counts_once(tmp_path: Path) -> None:
    record(tmp_path, evaluated(0, 1, passing=1), evaluated(0, 1, passing=1))
    record(tmp_path, evaluated(0, 1, passing=1), evaluated(1, 2, passing=3), resumes=True)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert sum(line.startswith(b'{"evaluation"') for line in lines) == 2


def test_the_report_has_a_curve_for_each_dataset(tmp_path: Path) -> None:
    record(tmp_path, evaluated(0, 0, passing=1), evaluated(1, 20, passing=3))
    html = render_report(tmp_path)
    assert "<h2>Evaluation</h2>" in html
    charts = Page(html).charts
    for name, curves in (("sums", {"mean reward", "pass@1", "pass@4"}), ("riddles", {"mean reward", "pass@1"})):
        assert {line.label for line in charts[name].lines} == curves
        assert all(line.x == [0, 20] for line in charts[name].lines)
        assert charts[name].x_label == "step"
    assert "8 answers" not in html  # one is missing, and is said to be
    assert "7 answers to 2 prompts, 12.5 % missing, asked of version 20, answered by versions 20 to 21." in html


def test_a_report_without_evaluations_says_nothing_of_them(tmp_path: Path) -> None:
    record(tmp_path)
    assert "Evaluation" not in render_report(tmp_path)


def test_a_dataset_without_any_answer_is_shown_as_that(tmp_path: Path) -> None:
    lost = SampleEnd(key=SampleKey(~0, 0), state=TerminalState.FAILED, cause="engine lost")
    dataset = EvaluatedDataset(dataset=1, name="riddles", samples_per_prompt=1, rows=(EvaluatedRow(0, (), (lost,)),))
    event = EvaluationFinished(number=0, version=1, datasets=(dataset,))
    record(tmp_path, event)
    assert "100.0 %" in render_report(tmp_path)
    assert evaluation_text(evaluation_row(event, SETS, 0.0)) == "evaluation at version 1 · riddles no answer"


def test_an_evaluation_of_a_checkpoint_stands_under_the_version_of_the_checkpoint() -> None:
    """The run itself, which trains nothing, calls what it serves version 0."""
    row = evaluation_row(evaluated(0, 0, passing=2), SETS, 1.0, first_version=26)
    assert evaluation_text(row).startswith("evaluation at version 26 · ")
    plain = evaluation_row(evaluated(0, 0, passing=2), SETS, 1.0)
    moved = {name for name, value in row.metrics.items() if value != plain.metrics[name]}
    assert {name.partition("/")[2].partition("/")[2] for name in moved} == set(VERSIONS)


def test_the_summary_has_the_first_and_the_last_reward_of_each_dataset(tmp_path: Path) -> None:
    record(tmp_path, evaluated(0, 0, passing=0), evaluated(1, 20, passing=4))
    summary = read_summary(tmp_path)
    assert summary is not None
    sums, riddles = summary.evaluations
    assert (sums.name, sums.first, sums.first_version, sums.last, sums.last_version) == ("sums", 0, 0, 0.5, 20)
    assert riddles.name == "riddles"
    out = io.StringIO()
    Console(file=out, width=120).print(summary_panel(summary))
    assert "sums: reward 0.000 at version 0 → 0.500 at 20" in out.getvalue()


def test_the_terminal_has_a_line_when_one_is_done() -> None:
    out = io.StringIO()
    with LiveView("x", 25, Console(file=out, width=200)) as view:
        view.evaluated(evaluation_row(evaluated(0, 20, passing=2), SETS, 1.0))
    assert "evaluation at version 20 · sums reward 0.250 ± 0.250, pass@1 25.0 %, pass@4 100.0 %" in out.getvalue()


def test_metrics_have_the_last_figures_by_dataset() -> None:
    metrics = RunMetrics(scenario="x", policy="sync", num_steps=1)
    assert b"penstock_evaluation" not in generate_latest(metrics.registry)
    metrics.evaluated(evaluation_row(evaluated(0, 20, passing=2), SETS, 1.0))
    text = generate_latest(metrics.registry).decode()
    assert 'penstock_evaluation{dataset="sums",figure="pass@1"} 0.25' in text
    assert "penstock_evaluation_version 20.0" in text


def test_a_run_that_only_evaluates_tells_how_many_answers_there_are() -> None:
    out = io.StringIO()
    with LiveView("x", 25, Console(file=out, width=120), plain_interval_s=0) as view:
        view.expect_answers(8)
        for number in (3, 3, 8):
            report = ActorReported(name="buffer", epoch=0, state="", metrics=(Metric("evaluation/answers", number),))
            view.actor(report)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["3/8", "8/8"]
    state = LiveState("x", 25, now_s=0.0)
    state.total_answers, state.num_answers = 8, 3
    terminal = Console(file=io.StringIO(), width=120, force_terminal=True)
    with terminal.capture() as drawn:
        terminal.print(draw(state, 1.0, 120, 40))
    assert "3/8 answers" in drawn.get()
