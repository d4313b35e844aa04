"""What ``learner.dump`` writes: all of a step's tokens, once, without a change of training, whatever the ranks are; and
``learner.profile``: whole traces of the steps that were asked for."""

# Transformers, safetensors and pyarrow are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from learner_cases import make_groups, open_learner, train_command
from rank_cases import CPU
from typer.testing import CliRunner

from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.recording_options import DumpOptions, ProfileOptions
from penstock.backends.learners.step_dumps import (
    COLUMNS,
    DumpedSequence,
    dump_file,
    dumped_steps,
    read_step,
    write_step,
)
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.profiling import profile_files
from penstock.messages.arrays import floats_view, pack_tokens, tokens_view
from penstock.messages.commands import OpenLearner, PublishWeights
from penstock.messages.errors import UserFault
from penstock.messages.kept_tokens import KeptTokens
from penstock.messages.local import BatchTrained, LearnerOpened, WeightsPublished
from penstock.messages.samples import Loss
from penstock.runtime.cli.app import app
from penstock.runtime.observability.step_difference import compare_steps

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.samples import Group

NUM_STEPS = 3
Trained = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def train(folder: Path, run: Path, **keys: Any) -> Trained:  # noqa: ANN401 - of the learner
    """A few steps of a learner with its own thread: their figures, and the weights it ends with."""
    options: dict[str, Any] = {"learning_rate": 1e-3, **keys}
    learner = open_learner(folder, run / "checkpoints", LearnerOptions(**options))
    learner.ask(OpenLearner(), LearnerOpened)
    figures = [
        {metric.name: metric.value for metric in learner.ask(train_command(step), BatchTrained).metrics}
        for step in range(1, NUM_STEPS + 1)
    ]
    learner.ask(PublishWeights(version=NUM_STEPS, publish=1), WeightsPublished)
    learner.close()
    return figures, learner.weights.published[-1]


def rows_of(run: Path, step: int) -> list[DumpedSequence]:
    return read_step(run, step)


def test_a_dump_has_every_token_and_changes_no_bit_of_the_training(model_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"objective": objective("grpo", old_logprobs="recompute", kl_coef=0.1)}
    _, plain = train(model_folder, tmp_path / "plain", **options)
    figures, dumped = train(model_folder, tmp_path / "dumped", **options, dump=DumpOptions(first_step=1, every=2))
    assert all(torch.equal(plain[name], dumped[name]) for name in plain)
    assert dumped_steps(tmp_path / "plain") == ()
    assert dumped_steps(tmp_path / "dumped") == (1, 3)
    samples = [sample for group in make_groups() for sample in group.samples]
    for step in (1, 3):
        rows = rows_of(tmp_path / "dumped", step)
        assert [row.key for row in rows] == [(sample.key.group_id, sample.key.index, 0) for sample in samples]
        for row, sample in zip(rows, samples, strict=True):
            part = sample.parts[0]
            assert row.tokens.tolist() == tokens_view(part.tokens).tolist()
            assert row.context.tolist() == [10, 11 + row.group_id]
            assert row.mask.all()
            assert row.versions.tolist() == [0, *[1] * (len(row.tokens) - 1)]
            assert row.figures["rollout_logprobs"].tolist() == floats_view(part.logprobs).tolist()
            assert np.isnan(row.figures["num_kept"]).all()
            assert all(np.isfinite(values).all() for name, values in row.figures.items() if name != "num_kept")
        told = figures[step - 1]
        every = {name: np.concatenate([row.figures[name] for row in rows]) for name in rows[0].figures}
        assert every["losses"].sum() == pytest.approx(told["train/loss"], abs=1e-6)
        for name, figure in (
            ("logprobs", "log_probs"),
            ("advantages", "advantages"),
            ("reference_logprobs", "ref_log_probs"),
        ):
            mean = np.mean([row.figures[name].mean() for row in rows])  # as grpo weighs
            assert mean == pytest.approx(told[f"rollout/{figure}"], abs=1e-5)
        assert (every["ratios"] == 1.0).all()
        assert (every["proximal_logprobs"] == every["logprobs"]).all()


def test_several_optimizer_steps_and_coupled_losses_record_each_token_once(model_folder: Path, tmp_path: Path) -> None:
    moving: dict[str, Any] = {"num_updates": 2, "num_passes": 2, "max_tokens_per_micro_batch": 16}
    chosen = objective("gspo", clip_low=0.2, clip_high=0.2)
    train(model_folder, tmp_path, objective=chosen, dump=DumpOptions(last_step=1), **moving)
    rows = rows_of(tmp_path, 1)
    assert dumped_steps(tmp_path) == (1,)
    assert len(rows) == 5
    for row in rows:
        ratio = np.exp(row.figures["logprobs"] - row.figures["rollout_logprobs"])
        assert row.figures["ratios"] == pytest.approx(ratio, rel=1e-5)
        assert np.isnan(row.figures["proximal_logprobs"]).all()
        assert np.isnan(row.figures["reference_logprobs"]).all()
        assert np.isfinite(row.figures["losses"]).all()


def test_masked_tokens_imitated_samples_and_losses_of_pairs_are_null_where_there_is_nothing(
    model_folder: Path, tmp_path: Path
) -> None:
    model = PackedModel.load(model_folder, dtype="float32", device=CPU)
    first, second = make_groups()
    imitated = msgspec.structs.replace(first.samples[0], loss=Loss.SUPERVISED)
    groups = (msgspec.structs.replace(first, samples=(imitated, *first.samples[1:])), second)
    run(model, tmp_path / "mixed", groups, version=1)
    rows = rows_of(tmp_path / "mixed", 1)
    assert [row.mask.tolist()[:2] for row in rows] == [[False, True]] * 5
    assert [row.versions[0] for row in rows] == [-1] * 5
    for row in rows:
        assert all(np.isnan(values[0]) for values in row.figures.values())
        assert np.isfinite(row.figures["losses"][1:]).all()
    assert rows[0].figures["advantages"][1:].tolist() == [0.0, 0.0]
    run(model, tmp_path / "pairs", make_groups(), name="dpo")
    assert all(np.isnan(row.figures["losses"]).all() for row in rows_of(tmp_path / "pairs", 1))


def run(
    model: PackedModel, run_folder: Path, groups: tuple[Group, ...], *, name: str = "dapo", version: int = 0
) -> None:
    """One step of a trainer that trains tokens of this version and newer ones."""
    options = LearnerOptions(objective=objective(name), max_tokens_per_micro_batch=16, dump=DumpOptions())
    reference = model if name == "dpo" else None
    trainer = PolicyTrainer(
        model, options, temperature=1.0, num_steps=5, check_stop=lambda: None, run_folder=run_folder,
        reference=reference,
    )  # fmt: skip
    trainer.train(groups, version=1, min_token_version=version)


def test_runs_are_told_apart_by_what_differs_first(model_folder: Path, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"dump": DumpOptions()}
    others: dict[str, dict[str, Any]] = {
        "same": {},
        "rate": {"learning_rate": 2e-3},
        "advantage": {"objective": objective("dapo", normalize_std=False)},
        "reduction": {"objective": objective("dapo", reduction="sequence_mean")},
    }
    train(model_folder, tmp_path / "plain", **plain)
    found: dict[str, tuple[int, str] | None] = {}
    for name, keys in others.items():
        train(model_folder, tmp_path / name, **plain, **keys)
        difference = compare_steps(tmp_path / "plain", tmp_path / name, step=None, tolerance=0.0).difference
        found[name] = None if difference is None else (difference.step, difference.column)
    assert found == {"same": None, "rate": (2, "logprobs"), "advantage": (1, "advantages"), "reduction": (1, "losses")}
    loose = compare_steps(tmp_path / "plain", tmp_path / "rate", step=2, tolerance=10.0)
    assert loose.difference is None


def test_the_first_difference_is_the_cause_and_is_said_with_its_token(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    train(model_folder, tmp_path / "a", dump=DumpOptions(last_step=2))
    rows = read_step(tmp_path / "a", 2)
    tokens, advantages = rows[4].tokens.copy(), rows[0].figures["advantages"] + 1
    tokens[1] = 7
    planted = [
        rows[0]._replace(figures={**rows[0].figures, "advantages": advantages}),
        *rows[1:4],
        rows[4]._replace(tokens=tokens),
    ]  # fmt: skip
    write_step(tmp_path / "b", 1, read_step(tmp_path / "a", 1))
    write_step(tmp_path / "b", 2, planted)
    words = ["diff-steps", str(tmp_path / "a"), str(tmp_path / "b")]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 1
    assert "first difference: step 2, sample 1/2, token 1:" in told.output
    assert "it differs in 1 token in 1 sequence; context are the same in this step" in told.output
    as_json = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert as_json["difference"]["values"] == [float(rows[4].tokens[1]), 7.0]
    assert as_json["steps"] == [1, 2]
    same = CliRunner().invoke(app, [*words, "--step", "1"])
    assert (same.exit_code, "no difference in step 1" in same.output) == (0, True)
    write_step(tmp_path / "b", 2, rows[:-1])
    told = CliRunner().invoke(app, words)
    assert "sample 1/2, which one of the runs has not trained" in told.output


def test_a_run_without_a_dump_is_told_the_key(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match=r"learner\.dump\.last_step=20"):
        compare_steps(tmp_path, tmp_path, step=None, tolerance=0.0)
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "step-0000003.parquet").write_bytes(b"torn")
    with pytest.raises(UserFault, match=r"step 4 is not written down .*found steps 3"):
        compare_steps(tmp_path, tmp_path, step=4, tolerance=0.0)
    with pytest.raises(UserFault, match="is no dump of a step that can be read"):
        compare_steps(tmp_path, tmp_path, step=3, tolerance=0.0)


def test_the_file_has_the_columns_that_are_documented(model_folder: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    train(model_folder, tmp_path, dump=DumpOptions(first_step=2, last_step=2))
    table: Any = parquet.read_table(dump_file(tmp_path, 2))
    assert set(table.column_names) == set(COLUMNS)
    assert table.column("step").to_pylist() == [2] * 5
    assert not list(dump_file(tmp_path, 2).parent.glob(".*"))
    assert len(read_step(tmp_path, 2, group_id=1)) == 3


def test_a_dump_says_from_how_many_tokens_each_was_drawn_and_one_from_before_that_can_be_read(
    model_folder: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as parquet

    replace, [group, _] = msgspec.structs.replace, make_groups()
    [first, second] = (sample.parts[0] for sample in group.samples)
    tokens = tokens_view(first.tokens).tolist()
    kept = KeptTokens(b"\1\0\0\0\2\0", pack_tokens([tokens[0], tokens[2], (tokens[2] + 1) % 40]))
    parts = (replace(first, kept=kept), second)
    samples = tuple(replace(each, parts=(part,)) for each, part in zip(group.samples, parts, strict=True))
    learner = open_learner(model_folder, tmp_path / "checkpoints", LearnerOptions(dump=DumpOptions(last_step=1)))
    learner.ask(OpenLearner(), LearnerOpened)
    learner.ask(train_command(groups=(replace(group, samples=samples),)), BatchTrained)
    learner.close()
    rows = rows_of(tmp_path, 1)
    found = [np.nan_to_num(row.figures["num_kept"], nan=-1).tolist() for row in rows]
    assert found == [[1.0, -1.0, 2.0], [-1.0] * 4]
    assert rows[0].figures["logprobs"][0] == 0.0, "over one token"
    file = dump_file(tmp_path, 1)
    parquet.write_table(parquet.read_table(file).drop_columns(["num_kept"]), file)
    older = rows_of(tmp_path, 1)
    assert np.isnan(np.concatenate([row.figures["num_kept"] for row in older])).all()
    assert older[0].figures["logprobs"].tolist() == rows[0].figures["logprobs"].tolist()


def test_a_step_that_cannot_be_written_down_ends_no_training(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "steps").write_text("in the way")
    figures, _ = train(model_folder, tmp_path, dump=DumpOptions())
    assert len(figures) == NUM_STEPS
    assert "learner.dump: step 1 could not be written down" in caplog.text


def test_a_profile_is_a_trace_of_the_steps_that_were_asked_for(model_folder: Path, tmp_path: Path) -> None:
    _, plain = train(model_folder, tmp_path / "plain")
    _, profiled = train(model_folder, tmp_path / "run", profile=ProfileOptions(memory=True))
    assert all(torch.equal(plain[name], profiled[name]) for name in plain)
    (path,) = profile_files(tmp_path / "run")
    assert str(path) == "profiles/learner-step-0000002-rank-0.json.gz"
    events = json.loads(gzip.decompress((tmp_path / "run" / path).read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"gradients", "optimizer step", "aten::mm", "[memory]"} <= names
    assert any("Backward" in str(name) for name in names), "autograd runs on the thread that is profiled"
    assert profile_files(tmp_path / "plain") == []
