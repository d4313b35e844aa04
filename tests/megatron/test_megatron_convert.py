"""``penstock convert`` of what the Megatron learner writes, and of what it begins with."""

# safetensors is typed in part only:
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from penstock.backends.checkpoint.make import make_model
from penstock.backends.checkpoint.tokenizer_files import copy_tokenizer
from penstock.runtime.cli.convert import convert, show_problems

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

pytestmark = pytest.mark.megatron

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3 tied", 2, {"tensor_parallel": 2}),
    ("qwen3_moe mixed", 4, {"expert_parallel": 2, "pipeline_parallel": 2}),
    ("glm4", 2, {"pipeline_parallel": 2}),
    ("deepseek_v3", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    ("glm4_moe", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
]


@pytest.mark.parametrize(("family", "num_ranks", "keys"), CASES)
def test_a_checkpoint_becomes_the_model_that_is_published_and_a_checkpoint_again(
    family: str,
    num_ranks: int,
    keys: dict[str, Any],
    ranks: Callable[[int], Ranks],
    tiny_family: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    model = tiny_family(family)
    make_model("xs", tmp_path / "tokenizer", seed=0)
    copy_tokenizer(tmp_path / "tokenizer", model)
    console = Console(file=io.StringIO(), width=200)
    run, back, again = tmp_path / "run", tmp_path / "back", tmp_path / "again"
    _, weights, _ = ranks(num_ranks).run(
        "resharding_cases:saved", str(model), str(run / "checkpoints"), keys, num_ranks
    )[0]
    assert show_problems(run, console, version=None) == 0
    run_convert(run, back, console, "huggingface")
    found = {name: tensor.numpy() for name, tensor in load_file(back / "model.safetensors").items()}
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name], weights[name]) for name in weights)

    run_convert(back, again, console, "megatron")
    begun = ranks(1).run("resharding_cases:weights_in", str(model), str(again), {}, 1)[0]
    assert all(np.array_equal(begun[name], weights[name]) for name in weights)


def test_what_predicts_a_second_token_comes_through_a_run_as_it_was(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(tiny_family("glm4_moe air"), model)
    make_model("xs", tmp_path / "tokenizer", seed=0)
    copy_tokenizer(tmp_path / "tokenizer", model)
    own = load_file(model / "model.safetensors")
    torch.manual_seed(1)
    more = {f"model.layers.4.{name}": torch.randn(shape) for name, shape in (
        ("eh_proj.weight", (64, 128)), ("enorm.weight", (64,)), ("mlp.experts.0.up_proj.weight", (32, 64)),
    )}  # fmt: skip
    save_file(own | more, model / "model.safetensors", {"format": "pt"})
    console = Console(file=io.StringIO(), width=200)
    ranks(1).run("resharding_cases:saved", str(model), str(run / "checkpoints"), {}, 1)
    run_convert(run, tmp_path / "back", console, "huggingface")
    run_convert(tmp_path / "back", tmp_path / "megatron", console, "megatron")
    run_convert(tmp_path / "megatron", tmp_path / "again", console, "huggingface")
    for folder in ("back", "again"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == (own | more).keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in more.items())


def run_convert(source: Path, target: Path, console: Console, target_format: str) -> None:
    assert not convert(
        source, target, console, version=None, dtype=None, max_shard_size="1GB", target_format=target_format
    )
