"""What other systems log gives back the physics that it was made with, and says what it does not tell."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import statistics
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from imported_run import (
    ENGINES,
    PUBLISH_S,
    TOKEN_LOAD_S,
    TOKEN_S,
    Made,
    nemo,
    run,
    slime_rollout,
    slime_train,
    trl,
    verl,
    write_lines,
    write_table,
)
from msgspec.structs import replace
from typer.testing import CliRunner

from penstock import calibrate_from
from penstock.messages.errors import UserFault
from penstock.runtime.cli.app import app
from penstock.runtime.prediction.imports import read
from penstock.runtime.prediction.imports.about import About, read_about
from penstock.runtime.prediction.imports.console import console_rows
from penstock.runtime.prediction.imports.fit import LOAD_SHARE, fit
from penstock.runtime.prediction.imports.lengths import log_normal_of
from penstock.runtime.prediction.imports.measured import Measured
from penstock.runtime.prediction.imports.read import read_logs
from penstock.runtime.prediction.imports.rollouts import read_rollouts
from penstock.runtime.prediction.models import Models, read_models, write_models

ABOUT = About(engines=ENGINES, samples=256)


def imported(*files: Path, about: About = ABOUT, forced: str | None = None) -> tuple[Measured, Models]:
    found = Measured(read_logs(files), about, forced=forced)
    return found, fit(found, files[0])


def generation_s(models: Models, made: Made) -> float:
    """Of a batch, by the fitted model."""
    engines, longest = models.engines, max(made.lengths)
    load = sum(made.lengths) / ENGINES - longest
    return engines.prefill_s + longest * engines.token_s + load * engines.token_load_s


def written(system: str, folder: Path, num_steps: int = 24) -> list[Path]:
    """Files of one synchronous run, as each system has them."""
    steps = run(num_steps)
    path = folder / system
    if system == "verl_file":
        return [write_lines(path, [{"step": made.number, "data": verl(made)} for made in steps])]
    if system == "verl_console":
        text = [
            f"(TaskRunner pid=7) step:{made.number} - "
            + " - ".join(f"{k}:np.float64({v!r})" for k, v in verl(made).items())
            for made in steps
        ]
        path.write_text("loading weights\n" + "\n".join(text))
        return [path]
    if system == "slime_console":
        text = [
            f"[2026-08-21 10:00:00] x.py:1 - perf {made.number}: {values}"
            for made in steps
            for values in (slime_rollout(made), slime_train(made))
        ]
        path.write_text("\n".join(text))
        return [path]
    if system == "slime_wandb":
        rows = [
            {"_step": i, "rollout/step": made.number, **values}
            for i, made in enumerate(steps)
            for values in (slime_rollout(made), slime_train(made))
        ]
        return [write_lines(path, rows)]
    if system == "trl_wandb":
        history: list[dict[str, float]] = [
            row
            for made in steps
            for row in (
                {"_step": 2 * made.number, "profiling/Time taken: GRPOTrainer.vLLM.generate": made.generation_s / 2},
                {"_step": 2 * made.number, "profiling/Time taken: GRPOTrainer.vLLM.generate": made.generation_s / 2},
                {"_step": 2 * made.number, "profiling/Time taken: GRPOTrainer.sync_weights": PUBLISH_S},
                {"_step": 2 * made.number + 1, "train/global_step": made.number}
                | {f"train/{name}": value for name, value in trl(made).items()},
            )
        ]
        return [write_lines(path, history)]
    if system == "nemo_table":
        return [write_table(path, [{"Step": made.number, **nemo(made)} for made in steps])]
    assert system == "nemo_tags"
    tags: list[dict[str, object]] = [
        {"step": made.number, "tag": name, "value": value} for made in steps for name, value in nemo(made).items()
    ]
    return [write_table(path, tags)]


@pytest.mark.parametrize(
    "system", ["verl_file", "verl_console", "slime_console", "slime_wandb", "trl_wandb", "nemo_table", "nemo_tags"]
)
def test_a_synchronous_log_gives_back_what_it_was_made_with(system: str, tmp_path: Path) -> None:
    found, models = imported(*written(system, tmp_path))
    assert found.system == {"verl": "verl", "slim": "slime", "trl_": "trl", "nemo": "nemo-rl"}[system[:4]]
    assert (found.policy, len(found.steps)) == ("sync", 23)
    # The first token's share is not told from the rest, so it is the sum that has to be right.
    for made in run(seed=11):
        assert generation_s(models, made) == pytest.approx(made.generation_s, rel=0.02)
    assert models.engines.token_s == pytest.approx(TOKEN_S, rel=0.05)
    assert models.engines.token_load_s == pytest.approx(TOKEN_LOAD_S, rel=0.4)
    assert models.learner.publish_s == pytest.approx(PUBLISH_S)
    others = run(seed=11)
    trained = models.learner.step_s + models.learner.token_s * statistics.fmean(sum(each.lengths) for each in others)
    assert trained == pytest.approx(statistics.fmean(each.training_s for each in others), rel=0.05)
    error = next(each.error for each in models.fits if each.what == "generation, a batch")
    assert error is not None
    assert error < 0.02


def test_lengths_are_those_of_a_log_normal_with_the_same_mean_and_longest(tmp_path: Path) -> None:
    _, models = imported(*written("verl_file", tmp_path))
    assert models.engines.response_tokens_median == pytest.approx(math.exp(6.2), rel=0.08)
    assert models.engines.response_tokens_sigma == pytest.approx(0.7, rel=0.1)
    assert any("single lengths" in text for text in models.unknown)


def test_lengths_that_grow_over_the_log_grow_over_the_groups_of_the_models(tmp_path: Path) -> None:
    steps = [
        made._replace(lengths=tuple(max(1, round(length * (0.5 + made.number / 24))) for length in made.lengths))
        for made in run()
    ]
    path = write_lines(tmp_path / "log", [{"step": made.number, "data": verl(made)} for made in steps])
    engines = imported(path)[1].engines
    first, last = engines.response_tokens_course
    assert last / first == pytest.approx(3, rel=0.2)
    assert engines.response_tokens_course_groups == 23 * 256 // ABOUT.group_size
    assert imported(*written("verl_file", tmp_path))[1].engines.response_tokens_course == ()


@pytest.mark.parametrize(("limit", "sigma"), [(900, 0.8), (1e9, 0.5)])
def test_cut_off_lengths_are_told_from_drawn_ones(limit: float, sigma: float) -> None:
    made = [min(limit, math.exp(6 + sigma * z)) for z in _normal(20_000)]
    longest = statistics.fmean(max(made[i : i + 200]) for i in range(0, len(made), 200))
    truncated = sum(length >= limit for length in made) / len(made)
    found = log_normal_of(statistics.fmean(made), longest, 200, truncated)
    assert found.sigma == pytest.approx(sigma, rel=0.1)
    assert found.median == pytest.approx(math.exp(6), rel=0.1)


def _normal(count: int) -> list[float]:
    chance = random.Random(3)
    return [chance.gauss(0, 1) for _ in range(count)]


def test_what_further_requests_cost_is_assumed_where_it_does_not_show(tmp_path: Path) -> None:
    same = run(num_steps=1)[0]
    rows = [{"step": number, "data": verl(same._replace(number=number))} for number in range(1, 9)]
    _, models = imported(write_lines(tmp_path / "log", rows))
    assert models.engines.token_load_s == pytest.approx(LOAD_SHARE * models.engines.token_s)
    assert generation_s(models, same) == pytest.approx(same.generation_s, rel=1e-6)
    assert any(text.startswith("engines.token_load_s") for text in models.unknown)


def test_a_verl_run_that_overlaps_is_fitted_to_single_responses(tmp_path: Path) -> None:
    """Little's law: 256 responses of 20 s each in steps of 40 s on 4 engines are 32 beside each other."""
    rows: list[dict[str, object]] = []
    for made in run():
        sample_s = made.mean * (TOKEN_S + 31 * TOKEN_LOAD_S)
        values = verl(made) | {"fully_async/processing_time/avg": sample_s, "timing_s/gen": 1.0}
        values["timing_s/step"] = values["perf/time_per_step"] = 256 * sample_s / (32 * ENGINES)
        rows.append({"step": made.number, "data": values})
    found, models = imported(write_lines(tmp_path / "log", rows))
    assert (found.policy, found.is_overlapped) == ("one_step_off", True)
    per_token_s = models.engines.token_s + 31 * models.engines.token_load_s
    assert per_token_s == pytest.approx(TOKEN_S + 31 * TOKEN_LOAD_S, rel=1e-3)


def test_slime_that_takes_less_than_its_parts_has_overlapped_them(tmp_path: Path) -> None:
    rows = [
        {"rollout/step": made.number, **values}
        for made in run()
        for values in (
            slime_rollout(made),
            slime_train(made, step_s=max(made.generation_s, made.training_s) + PUBLISH_S),
        )
    ]
    found, models = imported(write_lines(tmp_path / "log", rows))
    assert found.policy == "one_step_off"
    assert models.engines.token_s == pytest.approx(TOKEN_S, rel=0.05)
    assert found.training_s()[0] == pytest.approx(run()[1].training_s)


def test_prime_rl_is_read_from_its_two_files(tmp_path: Path) -> None:
    steps = run()
    trainer = [
        {"step": made.number, "time": 1.0, "time/step": 60.0, "time/wait_for_batch": 5.0, "time/forward_backward": 50.0,
         "time/broadcast_weights": 2.0}
        for made in steps
    ]  # fmt: skip
    agg = "train/agg/effective/"
    orchestrator = [
        {"step": made.number, "time": 1.0, "time/step": 60.0, "progress/rollouts": 256, "off_policy/mean": 1.2,
         f"{agg}num_output_tokens/mean": made.mean, f"{agg}num_output_tokens/max": max(made.lengths),
         f"{agg}num_input_tokens/mean": 100, f"{agg}agent/timing/agent/model/mean": made.mean * TOKEN_S,
         f"{agg}agent/reward/mean": 0.4, f"{agg}agent/is_truncated/mean": 0.01}
        for made in steps
    ]  # fmt: skip
    files = [write_lines(tmp_path / "trainer", trainer), write_lines(tmp_path / "orchestrator", orchestrator)]
    found, models = imported(*files, about=About(engines=ENGINES))
    assert (found.system, found.policy) == ("prime-rl", "fully_async")
    assert models.learner.publish_s == pytest.approx(2.0)
    assert models.reward.success_rate == pytest.approx(0.4)
    with pytest.raises(UserFault, match="two files"):
        imported(files[0])


def test_nemo_rl_that_generates_beside_training_says_what_it_hid(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for made in run():
        values = nemo(made)
        del values["timing/train/generation"]
        values |= {"timing/train/exposed_generation": 0.0, "timing/train/total_step_time": made.training_s + PUBLISH_S}
        rows.append({"step": made.number, **values})
    found, models = imported(write_lines(tmp_path / "log", rows))
    assert found.policy == "one_step_off"
    assert any("may have been quicker" in text for text in models.unknown)


def test_the_lines_that_nemo_rl_and_trl_print_are_found_among_others() -> None:
    lines = [
        "========================= Step 3/100 =========================",
        "  • Loss: 0.0123",
        "  • Mean Generation Length: 812.5000",
        "  • Total step time: 61.25s",
        "  • generation: 40.50s (66.1%)",
        "    - E2E (Samples/sec): 8.36",
        "{'loss': '0.01', 'completions/mean_length': '200.5', 'step_time': 3.5, 'epoch': 0.1}",
        "(pid=1) step:4 - timing_s/gen:np.float64(1.5) - a/b:nan",
        "[x] y.py:3 - perf 9: {'perf/train_time': 2.0, 'perf/rollout_time': np.float64(4.0), 'z': None}",
    ]
    found = list(console_rows(enumerate(lines, start=1)))
    assert [step for _, step, _ in found] == [3, 3, 3, 3, 1, 4, 9]
    values = {name: value for _, _, row in found for name, value in row.items()}
    assert values["train/mean_gen_tokens_per_sample"] == 812.5
    assert values["timing/train/total_step_time"] == 61.25
    assert values["timing/train/generation"] == 40.5
    assert values["performance/samples_per_sec"] == 8.36
    assert (values["completions/mean_length"], values["timing_s/gen"]) == (200.5, 1.5)
    assert (values["perf/train_time"], values["perf/rollout_time"]) == (2.0, 4.0)


def test_numbers_that_no_metric_can_be_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("step:4 - timing_s/gen:1.5 - c:1e400 - d:-1e99\n")
    assert read_logs([path]).steps == {4: {"timing_s/gen": 1.5}}


def test_trainer_state_needs_to_be_told_the_share_of_generation(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    state = {"log_history": [{"step": made.number, **trl(made)} for made in run()]}
    path.write_text(json.dumps(state))
    one_line = read_logs([path]).steps
    path.write_text(json.dumps(state, indent=2))
    assert read_logs([path]).steps == one_line
    with pytest.raises(UserFault, match=r"--about generation_share=0\.6"):
        imported(path)
    found, models = imported(path, about=About(engines=ENGINES, samples=256, generation_share=0.5))
    assert found.engines_busy == pytest.approx(0.5)
    assert models.reward.constant_rate > 0.2
    assert any("50 % of each step" in text for text in models.unknown)


def test_rollouts_of_verl_give_lengths_their_shape(tmp_path: Path) -> None:
    rows = [
        {"input": f"question {i // 4}", "output": "x" * (10 * (1 + i // 4)), "score": float(i % 2), "step": 1}
        for i in range(400)
    ]
    write_lines(tmp_path / "1.jsonl", rows)
    samples = read_rollouts(tmp_path, mean_tokens=101.0)
    assert statistics.fmean(each.num_tokens for each in samples) == pytest.approx(101, rel=0.01)
    assert len({each.group_id for each in samples}) == 100
    found = Measured(read_logs(written("verl_file", tmp_path)), ABOUT)
    models = fit(found, tmp_path, samples)
    assert models.engines.response_tokens_correlation > 0.95
    assert models.engines.response_tokens_quantiles[-1] == pytest.approx(200, rel=0.02)


def test_rollouts_of_nemo_rl_count_the_tokens_that_were_made(tmp_path: Path) -> None:
    rows = [{"token_loss_mask": [[0, 0, 1, 1, 1]], "token_ids": [[i, 2, 3, 4, 5]], "rewards": [1.0]} for i in range(2)]
    samples = read_rollouts(write_lines(tmp_path / "train_data_step1.jsonl", rows), mean_tokens=9.0)
    assert [(each.num_tokens, each.group_id, each.reward) for each in samples] == [(3, 0, 1.0), (3, 1, 1.0)]


@pytest.mark.parametrize("score", ["1" + "0" * 400, "NaN", "Infinity", "-1e300", "true", '"1"', "[]", "[[1]]"])
def test_a_reward_that_is_no_number_is_none(score: str, tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(f'{{"input": "a", "output": "b", "score": {score}}}\n')
    assert [each.reward for each in read_rollouts(path, 9.0)] == [None]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"step": 1, "x": 2}\n{"step": 2, nonsense}\n', r"a\.jsonl:2: no JSON"),
        ("a.jsonl", '{"step": 1}\n[1]\n', r"a\.jsonl:2: expected an object"),
        ("a.json", '{\n"x": 1\n}', "log_history"),
        ("a.csv", "Wall time,Step,Value\n1,1,2\n", "without its name"),
        ("a.csv", "step,timing_s/gen\n1,2,3\n", r"a\.csv:2: 3 fields"),
        ("a.log", "nothing to see here\n", "no metrics with a step"),
        ("a.jsonl", '{"step": -1, "x": 2}\n', r"a\.jsonl:1: -1 is no number of a step"),
        ("a.jsonl", '{"step": 1, "x": 2}\n', "no metric by which a system is known"),
    ],
)
def test_what_is_wrong_with_a_log_is_said_with_its_place(name: str, text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserFault, match=says):
        imported(path)


def test_a_file_that_ends_within_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    """Of a run that was killed, or that still writes."""
    rows = [{"step": made.number, "data": verl(made)} for made in run(6)]
    path = write_lines(tmp_path / "log.jsonl", rows)
    whole = read_logs([path]).steps
    path.write_text(path.read_text() + '{"step": 7, "data": {"timing_s/g')
    assert read_logs([path]).steps == whole
    table = write_table(tmp_path / "log.csv", [{"Step": made.number, **nemo(made)} for made in run(6)])
    table.write_text(table.read_text()[:-60])
    assert len(read_logs([table]).steps) == 5
    rollouts = write_lines(tmp_path / "1.jsonl", [{"input": "a", "output": "bc", "score": 1.0}])
    rollouts.write_text(rollouts.read_text() + '{"input": "a", "ou')
    assert len(read_rollouts(rollouts, 9.0)) == 1


@pytest.mark.parametrize("value", [math.nan, None])
@pytest.mark.parametrize("name", ["timing_s/gen", "response_length/max", "perf/total_num_tokens"])
def test_a_step_without_a_figure_that_the_others_have_is_left_out(
    name: str, value: float | None, tmp_path: Path
) -> None:
    rows = [{"step": made.number, "data": verl(made) | ({name: value} if made.number == 9 else {})} for made in run()]
    found, models = imported(write_lines(tmp_path / "log", rows), about=About(engines=ENGINES))
    assert [step.number for step in found.left_out] == [9]
    assert "step 9: left out, as a figure is missing there that the others have" in models.unknown
    assert models.engines.token_s == pytest.approx(TOKEN_S, rel=0.05)


@pytest.mark.parametrize("text", ["step:1".encode("utf-16"), b"\x1f\x8b\x08\x00\x00", b"\x18\x00\x00brain.Event:2"])
def test_what_is_no_text_is_told_with_what_to_do(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents"
    path.write_bytes(text)
    with pytest.raises(UserFault, match=r"events:?.*:1: no text in UTF-8; of TensorBoard's events"):
        read_logs([path])


@given(st.data())
def test_a_damaged_log_is_refused_or_read_and_nothing_else(data: st.DataObject) -> None:
    """Any bytes in place of any others: an error is the user's, with the file in it."""
    with tempfile.TemporaryDirectory() as folder:
        system = data.draw(st.sampled_from(["verl_file", "slime_console", "trl_wandb", "nemo_tags"]))
        (path,) = written(system, Path(folder), num_steps=5)
        whole = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(whole) - 1))
            put = st.sampled_from([b"-1", b"0", b"1e14", b"-1e14", b"1e-14", b"1e308", b"NaN"]) | st.binary(max_size=20)
            whole[at : at + data.draw(st.integers(0, 40))] = data.draw(put)
        path.write_bytes(whole)
        with contextlib.suppress(UserFault):
            _, models = imported(path)
            assert models.engines.token_s > 0
            assert msgspec.convert(msgspec.to_builtins(models), Models) == models
            assert all(math.isfinite(value) for each in models.fits for value in each.values.values())


def test_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_text("x" * 100 + "\n")
    monkeypatch.setattr(read, "MAX_LINE_BYTES", 50)
    with pytest.raises(UserFault, match=r"log:1: a line of more than 50 bytes"):
        read_logs([path])
    write_lines(path, [{"step": number, "x": 1} for number in range(5)])
    monkeypatch.setattr(read, "MAX_STEPS", 4)
    with pytest.raises(UserFault, match=r"log:5: more than 4 steps"):
        read_logs([path])
    with pytest.raises(UserFault, match="are read; give a part"):
        list(read.lines_of(path, max_bytes=3))
    monkeypatch.setattr(read, "MAX_LINE_BYTES", 500)
    write_lines(path, [{"step": 1, **{f"m{i}": 1 for i in range(9)}}])
    monkeypatch.setattr(read, "MAX_METRICS", 8)
    with pytest.raises(UserFault, match="more than 8 metrics"):
        read_logs([path])
    write_lines(path, [*({f"m{i}": 1} for i in range(9)), {"step": 1, "x": 1}])
    with pytest.raises(UserFault, match="log:9: more than 8 metrics"):
        read_logs([path])
    write_lines(path, [{"step": number, "x": 1} for number in range(4)])
    monkeypatch.setattr(read, "MAX_FIGURES", 7)
    with pytest.raises(UserFault, match="log:4: more than 7 figures"):
        read_logs([path])
    path.write_text(json.dumps({"log_history": [{"step": 1, "x": 1}]}))
    monkeypatch.setattr(read, "MAX_DOCUMENT_BYTES", 20)
    with pytest.raises(UserFault, match="at most 20 are read"):
        read_logs([path])


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path / "pipe.jsonl", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserFault, match="no file"):
            read_logs([path])
    with pytest.raises(UserFault, match="no file"):
        read_rollouts(tmp_path / "pipe.jsonl", 100.0)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("timing_s/update_weights", -5.0, None),
        ("timing_s/gen", -5.0, "generation"),
        ("timing_s/step", -5.0, None),  # perf/time_per_step says it too
        ("response_length/mean", 1e14, "steps say how long"),
        ("response_length/max", 1e14, "how long the longest response was"),
        ("prompt_length/mean", -3.0, None),
        ("prompt_length/mean", 1e14, None),
        ("critic/score/mean", -3.0, None),
        ("response_length/clip_ratio", 50.0, None),
    ],
)
def test_figures_that_cannot_be_are_taken_as_not_said(
    name: str, value: float, says: str | None, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "log", [{"step": made.number, "data": verl(made) | {name: value}} for made in run()])
    if says is not None:
        with pytest.raises(UserFault, match=says):
            imported(path)
        return
    models = imported(path)[1]
    assert 0 <= models.truncated_share <= 1
    write_models(models, tmp_path / "models.yaml")
    assert read_models(tmp_path / "models.yaml") == models


def test_what_only_the_user_knows_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match="--about samples=512"):
        imported(*written("slime_wandb", tmp_path), about=About(engines=4))
    with pytest.raises(UserFault, match="there are verl, trl, slime"):
        imported(*written("slime_wandb", tmp_path), forced="areal")
    with pytest.raises(UserFault, match="keys are engines, slots"):
        read_about(["engins=4"])
    with pytest.raises(UserFault, match="each key once"):
        read_about(["engines=4", "engines=5"])
    with pytest.raises(UserFault, match=r"--about engines: must be a whole number from 1 to .*; found 'many'"):
        read_about(["engines=many"])
    with pytest.raises(UserFault, match="is not there"):
        read_rollouts(tmp_path / "nothing", 1.0)
    (tmp_path / "3.pt").touch()
    assert read_about(["engines=4", "colocated=true"]) == About(engines=4, colocated=True)
    with pytest.raises(UserFault, match="pickles"):
        read_rollouts(tmp_path / "3.pt", 1.0)


def test_the_command_writes_models_and_a_scenario_that_simulate_takes(tmp_path: Path) -> None:
    rows = [{"step": made.number, "data": verl(made)} for made in run(num_samples=64)]
    log, models, scenario = write_lines(tmp_path / "log", rows), tmp_path / "models.yaml", tmp_path / "scenario.yaml"
    cli = CliRunner()
    about = ["--about", "engines=4", "--about", "learner_ranks=4"]
    done = cli.invoke(app, ["calibrate", "--from", str(log), *about, "-o", str(models), "--scenario", str(scenario)])
    assert done.exit_code == 0, done.output
    found = read_models(models)
    assert found.runs[0].learner_ranks == 4
    assert abs(found.checks[0].step_error) < 0.15  # of a dozen batches, whose longest response decides
    again = cli.invoke(app, ["simulate", str(scenario), "--models", str(models), "--seeds", "1", "engines.count=2"])
    assert again.exit_code == 0, again.output


def test_a_program_gets_the_same_models_and_scenario(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log", [{"step": made.number, "data": verl(made)} for made in run(num_samples=64)])
    words = ["calibrate", "--from", str(log), "--about", "engines=4", "--scenario", str(tmp_path / "typed.yaml")]
    CliRunner().invoke(app, [*words, "--no-check", "-o", str(tmp_path / "models.yaml")], catch_exceptions=False)
    out, scenario = tmp_path / "own.yaml", tmp_path / "called.yaml"
    found = calibrate_from(log, {"engines": 4}, check=False, output=out, scenario=scenario)
    assert found == read_models(out)
    assert found == replace(read_models(tmp_path / "models.yaml"), made_at=found.made_at)
    assert scenario.read_text() == (tmp_path / "typed.yaml").read_text()
    with pytest.raises(UserFault, match=r"own\.yaml: is there already; name another file with output"):
        calibrate_from([log], output=out)
    assert abs(calibrate_from(log, {"engines": 4}, log_format="verl").checks[0].step_error) < 0.15


def test_runs_and_logs_are_not_mixed(tmp_path: Path) -> None:
    cli = CliRunner()
    (tmp_path / "models.yaml").write_text("mine")
    again = ["calibrate", str(tmp_path), "-o", str(tmp_path / "models.yaml")]
    assert "is there already; name another file with --output" in str(cli.invoke(app, again).exception)
    there = [*again[:1], "--from", "log", "--scenario", str(tmp_path / "models.yaml"), "-o", str(tmp_path / "new.yaml")]
    assert "is there already; name another file with --scenario" in str(cli.invoke(app, there).exception)
    assert (tmp_path / "models.yaml").read_text() == "mine"
    assert "calibrate them apart" in str(cli.invoke(app, ["calibrate", str(tmp_path), "--from", "log"]).exception)
    assert "go with --from" in str(cli.invoke(app, ["calibrate", str(tmp_path), "--about", "engines=4"]).exception)
    twice = ["calibrate", str(tmp_path), f"{tmp_path}/.", "-o", str(tmp_path / "other.yaml")]
    assert "is named twice" in str(cli.invoke(app, twice).exception)
    assert "give the folders" in str(cli.invoke(app, ["calibrate"]).exception)
