"""Functions of the user's in the training: one that does what Penstock does gives what Penstock gives, on any number of
ranks; one that is wrong ends the step with its file and line."""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
import torch
from learner_cases import HeldWeights, make_groups
from transformers import AutoModelForCausalLM, Qwen3Config

from penstock.backends.learners.objectives.spec import objective
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.parallel import parallelize, whole
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.backends.learners.worker_group.workers import SOLO
from penstock.backends.processes.hook_calling import Hook
from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.weights.renamed import RenamingExporter
from penstock.messages.weights import Canary

if TYPE_CHECKING:
    from rank_cases import Ranks

    from penstock.backends.learners.worker_group.workers import WorkerGroup

NUM_RANKS = 2
TWO_RANKS = pytest.param(2, marks=pytest.mark.long_run)
"""Processes that import torch; `make runs` has them for other tests too."""
AutoModel: Any = AutoModelForCausalLM  # transformers' factories have no types
HOOKS = Path(__file__).parent / "hook_examples.py"
OF_OBJECTIVE = ("postprocess_function", "advantage_function", "reduction_function", "importance_function")
DECOUPLED = {"name": "grpo", "old_logprobs": "recompute"}


class Trained(NamedTuple):
    figures: dict[str, float]
    weights: dict[str, torch.Tensor]
    num_masked_tokens: int


def train(
    workers: WorkerGroup, folder: Path, keys: dict[str, Any], hooks: dict[str, str], *, size: int = 32
) -> Trained:
    """One batch, with these keys of the objective and these functions."""
    named = {key: f"{HOOKS}:{name}" for key, name in hooks.items()}
    own = {key: value for key, value in named.items() if key in OF_OBJECTIVE}
    plain = LearnerOptions(objective=objective(**{**keys, **own}), learning_rate=1e-2, max_tokens_per_micro_batch=size)
    others: Any = {key: value for key, value in named.items() if key not in OF_OBJECTIVE}
    options = msgspec.structs.replace(plain, **others)
    model = PackedModel.load(folder, dtype="float32", device=workers.device)
    parallelize(model, workers, options)
    trainer = PolicyTrainer(
        model, options, temperature=1.0, num_steps=10, reference=None, check_stop=lambda: None, workers=workers
    )
    result = trainer.train(make_groups(), version=2, min_token_version=0)
    figures = {metric.name: metric.value for metric in result.metrics if not metric.name.startswith("perf/")}
    weights = {name: whole(tensor).clone() for name, tensor in model.weights()}
    return Trained(figures, weights, result.num_masked_tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128, initializer_range=0.3, pad_token_id=0,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    AutoModel.from_config(config).save_pretrained(path)
    return path


SAME = [
    ({"name": "grpo"}, {"advantage_function": "group_advantages"}),
    ({"name": "ppo", "critic": "shared", "gae_lambda": 1.0}, {"advantage_function": "less_the_values"}),
    ({"name": "grpo"}, {"reduction_function": "mean_over_samples"}),
    ({**DECOUPLED, "correction": "tis"}, {"importance_function": "truncated"}),
    ({**DECOUPLED, "correction": "tis"}, {"importance_function": "truncated_alone"}),
    ({"name": "grpo"}, {"postprocess_function": "same_rewards"}),
    ({"name": "grpo"}, {"conversion_function": "same_sequence"}),
]


@pytest.mark.parametrize("num_ranks", [1, TWO_RANKS])
@pytest.mark.parametrize(("keys", "hooks"), SAME, ids=[f"{next(iter(h.values()))}" for _, h in SAME])
def test_a_function_that_does_what_penstock_does_trains_the_same_weights(
    folder: Path, ranks: Ranks, keys: dict[str, Any], hooks: dict[str, str], num_ranks: int
) -> None:
    plain = train(SOLO, folder, keys, {})
    for found in ranks.run(num_ranks, train, folder, keys, hooks):
        for name, tensor in plain.weights.items():
            torch.testing.assert_close(found.weights[name], tensor, rtol=0, atol=1e-6)
        critic = ("train/value_loss", "rollout/returns") if keys["name"] == "ppo" else ()
        for name in ("train/loss", "train/pg_loss", "train/grad_norm", *critic):
            assert found.figures[name] == pytest.approx(plain.figures[name], abs=1e-6), name


def test_weights_of_the_users_own_report_figures_of_their_own(folder: Path) -> None:
    found = train(SOLO, folder, DECOUPLED, {"importance_function": "truncated"})
    assert found.figures["train/my_weight"] == pytest.approx(found.figures["train/tis"])


def test_rewards_are_processed_before_advantages_and_reported_raw_as_well(folder: Path) -> None:
    keys = {"name": "grpo", "normalize_std": False}
    plain, doubled = (
        train(SOLO, folder, keys, {}),
        train(SOLO, folder, keys, {"postprocess_function": "doubled_rewards"}),
    )
    assert doubled.figures["rollout/rewards"] == pytest.approx(2 * plain.figures["rollout/raw_reward"])
    assert doubled.figures["rollout/raw_reward"] == plain.figures["rollout/raw_reward"]
    assert doubled.figures["train/loss"] == pytest.approx(2 * plain.figures["train/loss"], abs=1e-6)


def test_tokens_that_a_conversion_leaves_out_are_masked_and_counted(folder: Path) -> None:
    plain = train(SOLO, folder, {"name": "grpo"}, {})
    found = train(SOLO, folder, {"name": "grpo"}, {"conversion_function": "without_last_token"})
    assert plain.num_masked_tokens == 0
    assert found.num_masked_tokens == 5  # one of each sample
    assert found.figures["train/num_tokens"] == plain.figures["train/num_tokens"] - 5


@pytest.mark.parametrize("num_ranks", [1, TWO_RANKS])
def test_figures_are_added_by_the_first_rank_once_a_batch(folder: Path, ranks: Ranks, num_ranks: int) -> None:
    hooks = {"rollout_log_function": "num_groups", "step_log_function": "step_speed"}
    first, *others = ranks.run(num_ranks, train, folder, {"name": "grpo"}, hooks)
    assert first.figures["rollout/num_groups"] == 2
    assert first.figures["rollout/twice"] == 2 * first.figures["rollout/raw_reward"]
    assert first.figures["train/version_seen"] == 2
    assert first.figures["train/half_loss"] == first.figures["train/loss"] / 2
    assert all("rollout/num_groups" not in other.figures for other in others)


def test_a_function_that_logs_may_add_nothing(folder: Path) -> None:
    hooks = {"rollout_log_function": "silent", "step_log_function": "silent"}
    plain = train(SOLO, folder, {"name": "grpo"}, {})
    assert train(SOLO, folder, {"name": "grpo"}, hooks).figures == plain.figures


WRONG = [
    ("advantage_function", "raising", r"raised KeyError: 'no such thing' \(hook_examples.py:\d+\)"),
    ("advantage_function", "exiting", r"advantage_function: exiting raised SystemExit: 3 \(hook_examples.py:\d+\)"),
    ("advantage_function", "nothing", r"\(hook_examples.py:\d+\) returned None; expected a tensor of shape \[\d+\]"),
    ("advantage_function", "too_short", r"returned a tensor of shape \[1\]; expected \[\d+\], one number for each"),
    ("advantage_function", "not_finite", r"returned (inf|nan) at place \d+ of \d+; expected finite numbers"),
    ("advantage_function", "whole_numbers", r"returned a tensor of torch.int64; expected floating-point"),
    ("reduction_function", "raising", "raised KeyError"),
    ("reduction_function", "negative", r"returned -1 at place 0 of 5; expected at least 0"),
    ("reduction_function", "too_short", r"expected \[5\], one number for each of the samples"),
    ("importance_function", "raising", "raised KeyError"),
    ("importance_function", "too_short", r"returned a tensor of shape \[1\]"),
    ("postprocess_function", "raising", "raised KeyError"),
    ("postprocess_function", "one_reward", r"returned 1 numbers for group \d; expected [23]"),
    ("postprocess_function", "texts", "returned 'good' at place 0 for group 0; expected a finite number"),
    ("postprocess_function", "nan_rewards", "returned nan at place 0"),
    ("postprocess_function", "nothing", "returned NoneType for group 0; expected a list of 2 numbers"),
    ("conversion_function", "raising", "raised KeyError"),
    ("conversion_function", "too_short", "returned Tensor for sample 0/0; expected a TrainSequence"),
    ("conversion_function", "other_tokens", "gives the token at position 0 the token"),
    ("conversion_function", "short_arrays", r"whose rollout_logprobs has 3 entries; expected 2"),
    ("conversion_function", "wide_arrays", r"whose tokens has dtype float32"),
    ("conversion_function", "context_too", r"trains the token at position -1 .* none of those it was given"),
    ("rollout_log_function", "raising", "raised KeyError"),
    ("rollout_log_function", "known_figure", "returned 'rollout/raw_reward', which Penstock reports itself"),
    ("rollout_log_function", "text_figure", "returned 'good' as 'rollout/mood'; expected a finite number"),
    ("rollout_log_function", "too_short", "returned Tensor; expected a dictionary"),
    ("step_log_function", "raising", "raised KeyError"),
]


@pytest.mark.parametrize(("key", "name", "story"), WRONG, ids=[f"{key}-{name}" for key, name, _ in WRONG])
def test_what_is_wrong_with_a_function_is_told_with_key_file_and_line(
    folder: Path, key: str, name: str, story: str
) -> None:
    keys = DECOUPLED if key == "importance_function" else {"name": "grpo"}
    with pytest.raises(UserCodeError, match=story) as caught:
        train(SOLO, folder, keys, {key: name})
    assert f"{key}: {name}" in str(caught.value)
    assert "hook_examples.py:" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "story"),
    [("nan_loss", "returned a loss of"), ("raising", "raised KeyError"), ("too_short", "returned Tensor; expected")],
)
def test_a_wrong_loss_is_told_with_file_and_line(folder: Path, name: str, story: str) -> None:
    with pytest.raises(UserCodeError, match=story) as caught:
        train(SOLO, folder, {"name": f"{HOOKS}:{name}"}, {})
    assert "hook_examples.py:" in str(caught.value)


def test_a_function_that_interrupts_is_told_where_no_ctrl_c_comes() -> None:
    hook: Hook[object] = Hook(f"{HOOKS}:interrupting", "learner.advantage_function")
    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(hook).exception()
    assert isinstance(error, UserCodeError)
    assert re.search(r"interrupting raised KeyboardInterrupt \(hook_examples.py:\d+\)$", str(error))
    with pytest.raises(KeyboardInterrupt):
        hook()


def failure(workers: WorkerGroup, folder: Path, keys: dict[str, Any], hooks: dict[str, str]) -> str:
    """What ended a step."""
    with pytest.raises(UserCodeError) as caught:
        train(workers, folder, keys, hooks, size=16)
    return str(caught.value)


@pytest.mark.long_run
def test_ranks_that_are_given_different_numbers_do_not_train_on(folder: Path, ranks: Ranks) -> None:
    for keys, hooks in (
        ({"name": "grpo"}, {"advantage_function": "drawn"}),
        (DECOUPLED, {"importance_function": "drawn_weights"}),
    ):
        for story in ranks.run(2, failure, folder, keys, hooks):
            assert "differ between the 2 ranks" in story


@pytest.mark.long_run
def test_a_loss_of_the_users_own_trains_the_same_on_ranks(folder: Path, ranks: Ranks) -> None:
    keys = {"name": f"{HOOKS}:policy_gradient"}
    plain = train(SOLO, folder, keys, {})
    for found in ranks.run(2, train, folder, keys, {}, size=64):  # one micro-batch: a rank has none
        for name, tensor in plain.weights.items():
            torch.testing.assert_close(found.weights[name], tensor, rtol=0, atol=1e-6)


def test_a_function_that_is_not_there_is_told_before_anything_is_trained(folder: Path) -> None:
    with pytest.raises(UserCodeError, match="has no 'same_reward'; did you mean 'same_rewards'"):
        train(SOLO, folder, {"name": "grpo"}, {"postprocess_function": "same_reward"})


def test_weights_reach_engines_under_the_names_of_the_user() -> None:
    held = HeldWeights()
    exporter = RenamingExporter(held, f"{HOOKS}:prefixed")
    canary = Canary(tokens=b"", logprobs=b"")
    exporter.export({"a": torch.ones(2), "b": torch.zeros(1)}, version=1, publish=1, canary=canary)
    assert {name: tensor.tolist() for name, tensor in held.published[0].items()} == {
        "policy.a": [1.0, 1.0], "policy.b": [0.0],
    }  # fmt: skip
    with pytest.raises(UserCodeError, match=r"returned 'weight' for 'b' and for 'a'; every weight needs its own name"):
        RenamingExporter(held, f"{HOOKS}:one_name").export(
            {"a": torch.ones(2), "b": torch.zeros(1)}, version=1, publish=1, canary=canary
        )
