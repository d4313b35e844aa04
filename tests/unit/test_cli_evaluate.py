"""``penstock evaluate``: from what the user names to the scenario that is run, and what is made of the figures."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.cli.evaluate import asked_settings, parse_floor, result_table
from penstock.runtime.launch.evaluate import Asked, evaluation_scenario
from penstock.runtime.observability.evaluations import EvaluationRow
from penstock.runtime.observability.plots import EvaluationTableRow
from penstock.runtime.scenario.evaluation_rules import evaluated_version, sets_of

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.scenario import Scenario

RUN = """
run: {name: math, num_steps: 7}
data: {path: train.jsonl, label_key: answer}
model: {make: xs}
sampling: {samples_per_group: 1}
filter: {drop_zero_spread: false, function: keep.py:keep}
learner: {objective: ppo, warm_start: {path: lines:8}}
evaluation:
  every: 5
  defaults: {samples_per_prompt: 4, sampling: {temperature: 0.5}}
  datasets:
    - {name: sums, path: sums.jsonl, k: [1, 2]}
    - {name: riddles, path: "riddles.jsonl@[:10]", reward: {function: gpqa}}
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a run whose scenario evaluates."""
    folder = tmp_path / "run" / "checkpoints" / "version-0000005"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "run" / "scenario.yaml").write_text(RUN)
    return folder


def made(folder: Path, *overrides: str, scenario: Path | None = None, asked: Asked | None = None) -> Scenario:
    return evaluation_scenario(folder, folder, scenario, overrides, asked or Asked())


def test_a_checkpoint_s_version_is_known_by_its_folder(checkpoint: Path, tmp_path: Path) -> None:
    assert evaluated_version(made(checkpoint)) == 5
    renamed = checkpoint.rename(tmp_path / "version-0000026-e1001")
    assert evaluated_version(made(renamed, asked=Asked(data=(f"{tmp_path}/rows.jsonl",)))) == 26
    other = renamed.rename(tmp_path / "mine")
    assert evaluated_version(made(other, asked=Asked(data=(f"{tmp_path}/rows.jsonl",)))) == 0


def test_a_checkpoint_is_evaluated_as_its_run_says_and_not_trained(checkpoint: Path) -> None:
    scenario = made(checkpoint)
    assert (scenario.run.only, scenario.model.path, scenario.model.make) == ("evaluate", str(checkpoint), None)
    assert scenario.learner.warm_start is None
    assert scenario.learner.objective.name == "grpo"
    assert scenario.filter.function is None
    sums, riddles = sets_of(scenario)
    assert sums.data.path == str(checkpoint.parents[1] / "sums.jsonl")
    assert (sums.samples_per_prompt, sums.k, sums.sampling.temperature) == (4, (1, 2), 0.5)
    assert (riddles.reward.function, riddles.data.label_key) == ("gpqa", "answer")
    assert scenario.data.path == sums.data.path  # the rows of the training need not be here


def test_options_count_for_every_dataset_over_what_it_says(checkpoint: Path) -> None:
    settings = asked_settings(k="1,8", temperature=1.0, max_response_tokens=9, reward="math", samples_per_prompt=8)
    for each in sets_of(made(checkpoint, asked=Asked(settings=settings))):
        assert (each.samples_per_prompt, each.k, each.reward.function) == (8, (1, 8), "math")
        assert (each.sampling.temperature, each.sampling.max_response_tokens) == (1.0, 9)


def test_datasets_can_be_picked_by_name(checkpoint: Path) -> None:
    assert [each.name for each in sets_of(made(checkpoint, asked=Asked(only=("riddles",))))] == ["riddles"]
    with pytest.raises(UserFault, match="there is no 'poems' in the scenario; there are sums, riddles"):
        made(checkpoint, asked=Asked(only=("poems",)))


def test_a_model_alone_needs_rows_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserFault, match="nothing to evaluate on: name rows with --data"):
        made(tmp_path)
    scenario = made(tmp_path, "engines.count=2", asked=Asked(data=("my rows.test.jsonl.gz@[:5]", "g=h.parquet")))
    assert [(each.name, each.data.path) for each in sets_of(scenario)] == [
        ("my-rows.test", f"{tmp_path}/my rows.test.jsonl.gz@[:5]"),
        ("g", f"{tmp_path}/h.parquet"),
    ]
    assert scenario.engines.count == 2


def test_a_floor_of_no_figure_is_refused_before_anything_is_evaluated(checkpoint: Path) -> None:
    for floor, told in (("sums/pas@1=0.5", "there is no figure 'pas@1'; there are "), ("sms/pass@1=0.5", "sums, ")):
        found = CliRunner().invoke(app, ["evaluate", str(checkpoint), "--at-least", floor])
        assert isinstance(found.exception, UserFault)
        assert told in str(found.exception)


def test_a_model_that_imitated_rows_is_evaluated_with_engines_that_generate(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "run: {name: x}\ndata: {path: lines:8, recorded: {loss: sft}}\nengines: {backend: recorded}\n"
        "model: {make: xs}\nlearner: {objective: sft}\nfilter: {drop_zero_spread: false}\n"
    )
    scenario = made(tmp_path, scenario=file, asked=Asked(data=("lines:4",)))
    assert scenario.engines.backend == "torch"


def test_a_simulated_scenario_has_nothing_to_evaluate(tmp_path: Path) -> None:
    file = tmp_path / "simulated.yaml"
    file.write_text(
        "run: {name: x}\ndata: {path: lines:8}\nengines: {backend: simulated}\nlearner: {backend: simulated}\n"
    )
    with pytest.raises(UserFault, match="the scenario is simulated"):
        made(tmp_path, scenario=file, asked=Asked(data=("lines:4",)))


@pytest.mark.parametrize("text", ["gsm8k", "gsm8k=0.4", "gsm8k/pass@1=high", "/pass@1=1"])
def test_a_floor_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(UserFault, match="expected DATASET/FIGURE=VALUE"):
        parse_floor(text)


def test_what_k_may_be() -> None:
    with pytest.raises(UserFault, match="--k 1;8: expected whole numbers with commas"):
        asked_settings(k="1;8", temperature=None, max_response_tokens=None, reward=None)


def test_the_table_has_a_column_for_each_dataset() -> None:
    metrics = {"eval/a/reward_mean": 0.25, "eval/a/reward_stderr": 0.125, "eval/a/pass@8": 0.5, "eval/a/pass@1": 0.1,
               "eval/a/maj@16": 0.7, "eval/a/maj@8": 0.6,
               "eval/a/missing": 0.0, "eval/b/missing": 1.0, "eval/b/num_prompts": 3.0}  # fmt: skip
    out = io.StringIO()
    table = result_table(EvaluationRow(evaluation=0, version=0, at_s=0.0, metrics=metrics))
    Console(file=out, width=80).print(table)
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["mean", "reward", "0.25", "±", "0.12", "–"] in lines
    shares = [line[0] for line in lines if line and "@" in line[0]]
    assert shares == ["pass@1", "pass@8", "maj@8", "maj@16"]
    assert ["maj@16", "70.0", "%", "–"] in lines
    assert ["missing", "0.0", "%", "100.0", "%"] in lines


def test_the_report_has_votes_beside_passes() -> None:
    row = EvaluationTableRow(dataset="a", version=1, figures={"pass@2": 0.5, "maj@2": 0.25, "missing": 0.0})
    assert row.passes == "pass@2 50.0 %, maj@2 25.0 %"


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "nowhere"), "--data", "lines:4"])
    assert isinstance(result.exception, UserFault)
    assert "there is no such folder" in str(result.exception)


def test_help_says_what_comes_of_it() -> None:
    shown = CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "160"}).output
    for text in ("--samples", "--at-least", "Exit codes", "pass@k"):
        assert text in shown
