"""Weights into and out of megatron-core's models, and what these say then, against transformers."""

# transformers' models have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import CONFIGS, has_experts, load_tiny

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames
from penstock.backends.learners.torch.model import PackedModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

pytestmark = pytest.mark.megatron

DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor 2": (2, {"tensor_parallel": 2}),
    "tensor 2, whole sequences": (2, {"tensor_parallel": 2, "sequence_parallel": False}),
    "tensor 2, pipeline 2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "context 2, data 2": (4, {"context_parallel": 2}),
    "virtual pipeline 2": (2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "tensor 4": (4, {"tensor_parallel": 4, "vocab_multiple": 1}),
    "uneven stages": (2, {"pipeline_parallel": 2, "transformer": {"num_layers_in_first_pipeline_stage": 1}}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert 2": (2, {"expert_parallel": 2}),
    "expert 4": (4, {"expert_parallel": 4}),
    "tensor 2, expert 2, pipeline 2": (4, {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2}),
    "tensor 2, expert 2 × tensor 2": (4, {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2}),
}
EVERYWHERE = ("one", "tensor 2, pipeline 2", "tensor 4", "expert 2")
"""Layouts of every family; two of them have the others as well."""
OF_LATENT = ("context 2, data 2", "tensor 2, expert 2 × tensor 2")
# One family with experts and one without has all layouts in CI. The tensors of the others are divided by two there; by
# four, so that two ranks share a group of heads, at night.
AT_NIGHT = "tensor 4"
CASES = [
    pytest.param(family, layout, marks=[pytest.mark.slow] if layout == AT_NIGHT and not has_all else [])
    for family in CONFIGS
    for has_all in (family in ("qwen3", "qwen3_moe"),)
    for layout in (*DENSE, *(EXPERTS if has_experts(family) else ()))
    if (has_all or layout in EVERYWHERE or (family == "deepseek_v3" and layout in OF_LATENT))
    and not (has_experts(family) and "whole sequences" in layout)
]
LAYOUTS = DENSE | EXPERTS
BATCHES = [[9, 30, 5], [14]]
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def digest_of_one(ranks: Callable[[int], Ranks]) -> Callable[[Path], str]:
    """Of what leaves a single rank, by the folder of its checkpoint."""

    @cache
    def digest(folder: Path) -> str:
        found: str = ranks(1).run("weight_cases:round_trip", str(folder), {}, 1)[0][1]
        return found

    return digest


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_weights_come_out_as_they_went_in_and_say_what_they_say_in_transformers(
    family: str,
    layout: str,
    ranks: Callable[[int], Ranks],
    tiny_family: Callable[[str], Path],
    digest_of_one: Callable[[Path], str],
) -> None:
    num_ranks, keys = LAYOUTS[layout]
    folder = tiny_family(family)
    answers = ranks(num_ranks).run("weight_cases:outputs", str(folder), keys, num_ranks, BATCHES, TEMPERATURE)
    wrong, digest = answers[0][0]
    assert not wrong
    assert digest == digest_of_one(folder), "order and buckets know no layout"
    assert answers[-1][1], "the last rank is of the last stage"
    wanted = said_by_transformers(folder, CONFIGS[family].vocab_size)
    for _, answer in answers:
        for found, expected in zip(answer, wanted, strict=False):
            np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
            np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["one", "tensor 2, pipeline 2"])
def test_what_is_float32_in_a_model_of_bfloat16_leaves_as_float32(
    layout: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    num_ranks, keys = LAYOUTS[layout]
    folder = str(tiny_family("deepseek_v3"))
    wrong, _ = ranks(num_ranks).run("weight_cases:round_trip", folder, keys, num_ranks, "bfloat16")[0]
    assert not wrong


def test_layers_that_predict_several_tokens_at_once_are_left_out_and_said_to_be(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_family("deepseek_v3 plain")
    assert ranks(1).run("weight_cases:noted_while_loading", str(folder)) == [[]]
    tensors = load_file(folder / "model.safetensors")
    more = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128), "model.layers.4.enorm.weight": torch.ones(64)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    [[said]] = ranks(1).run("weight_cases:noted_while_loading", str(tmp_path))
    assert "layers 4, beyond the model's 4, are left out" in said


def test_a_kimi_k2_is_a_deepseek_v3_that_needs_none_of_its_own_code(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "kimi"
    shutil.copytree(tiny_family("deepseek_v3 plain"), folder)
    config = json.loads((folder / "config.json").read_bytes())
    own_code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    config |= {"model_type": "kimi_k2", "auto_map": own_code, "architectures": ["DeepseekV3ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    [[(wrong, _), answer]] = ranks(1).run("weight_cases:outputs", str(folder), {}, 1, BATCHES, TEMPERATURE)
    assert not wrong
    model = PackedModel.load(folder, dtype="float32", device=torch.device("cpu")).model
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert model.config.model_type == "deepseek_v3"
    named = CheckpointNames(model).rename(dict(model.named_parameters()))
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in named.items())
    for found, wanted in zip(answer, said_by_transformers(tiny_family("deepseek_v3 plain"), 101), strict=True):
        np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=1e-5)


@cache
def said_by_transformers(folder: Path, vocab_size: int) -> list[tuple[Any, Any]]:
    """Log-probs and entropy of every micro-batch."""
    model = load_tiny(folder)
    said: list[tuple[Any, Any]] = []
    for number, lengths in enumerate(BATCHES):
        drawn = np.random.default_rng(number)
        rows = [torch.from_numpy(drawn.integers(0, vocab_size, length)) for length in lengths]
        parts = []
        for row in rows:
            with torch.no_grad():
                logprobs = (model(row[None, :-1]).logits[0] / TEMPERATURE).log_softmax(-1)
            parts.append((logprobs.gather(1, row[1:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)))
        said.append((torch.cat([p[0] for p in parts]).numpy(), torch.cat([p[1] for p in parts]).numpy()))
    return said
