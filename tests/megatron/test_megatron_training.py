"""Three optimizer steps under every layout, against transformers and AdamW in float32."""

# transformers' models have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import training_plan as plan
from tiny_families import load_tiny

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

pytestmark = pytest.mark.megatron

OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
MOE = "qwen3_moe"
LATENT = "deepseek_v3"
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("qwen3", 1, {}),
    "one, plain optimizer": ("qwen3", 1, {"distributed_optimizer": False}),
    "data 2, plain optimizer": ("qwen3", 2, {"distributed_optimizer": False}),
    "data 2 with overlaps": ("qwen3", 2, OVERLAPS),
    "tensor 2": ("qwen2", 2, {"tensor_parallel": 2}),
    "tensor 2, whole sequences": ("qwen3", 2, {"tensor_parallel": 2, "sequence_parallel": False}),
    "tensor 2, recomputed": ("qwen3", 2, {"tensor_parallel": 2, "recompute": "full"}),
    "pipeline 2": ("llama scaled", 2, {"pipeline_parallel": 2}),
    "pipeline 2, tied": ("qwen3 tied", 2, {"pipeline_parallel": 2}),
    "virtual pipeline": ("qwen3", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "context 2": ("qwen3", 2, {"context_parallel": 2}),
    "post norms, tensor 2": ("glm4", 2, {"tensor_parallel": 2}),
    "expert 2": (MOE, 2, {"expert_parallel": 2}),
    "experts, tensor 2": (MOE, 2, {"tensor_parallel": 2}),
    "mixed, expert 2": (f"{MOE} mixed", 2, {"expert_parallel": 2}),
    "tensor 2 expert 2": (MOE, 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "latent attention, data 2": (LATENT, 2, {}),
    "latent attention, tensor 2": (LATENT, 2, {"tensor_parallel": 2}),
    "latent attention, context 2": (LATENT, 2, {"context_parallel": 2}),
    "latent attention without a query rank, expert 2": (f"{LATENT} plain", 2, {"expert_parallel": 2}),
    "tensor 2 pipeline 2": ("qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tensor 2 data 2": ("qwen3", 4, {"tensor_parallel": 2}),
    "tensor 2 context 2": ("qwen3", 4, {"tensor_parallel": 2, "context_parallel": 2}),
    "pipeline 4": ("qwen3", 4, {"pipeline_parallel": 4}),
    "pipeline 2 virtual 2 data 2 with overlaps": (
        "qwen3", 4, {"pipeline_parallel": 2, "virtual_pipeline": 2, **OVERLAPS},
    ),
    "expert 4": (MOE, 4, {"expert_parallel": 4}),
    "tensor 2 expert 2 pipeline 2": (
        MOE, 4, {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2},
    ),
    "latent attention, tensor 2 expert 2 pipeline 2": (
        LATENT, 4, {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2},
    ),
    "tensor 2 expert 2 × tensor 2": (
        MOE, 4, {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2},
    ),
}  # fmt: skip


AT_NIGHT = ("tensor 2 data 2", "tensor 2 context 2", "pipeline 4", "expert 4", "tensor 2 expert 2 pipeline 2")
"""Of four ranks: what each of these joins has been joined above, or is once more with latent attention."""


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if name in AT_NIGHT else []) for name in LAYOUTS]
)
def test_three_steps_end_where_transformers_ends(
    layout: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    family, num_ranks, keys = LAYOUTS[layout]
    folder = tiny_family(family)
    answers = ranks(num_ranks).run("training_cases:trained", str(folder), keys, num_ranks, True)
    figures, weights = by_transformers(folder)
    for found, _ in answers:
        np.testing.assert_allclose(found, figures, rtol=0, atol=5e-6)
    after: dict[str, Any] = answers[0][1]
    assert after.keys() == weights.keys()
    for name, wanted in weights.items():
        np.testing.assert_allclose(after[name], wanted, rtol=0, atol=5e-6, err_msg=name)


def test_a_decay_of_norms_would_have_shown(tiny_family: Callable[[str], Path]) -> None:
    """Those of the reference do not decay, and neither do ours if the steps end in the same place."""
    before = dict(load_tiny(tiny_family("qwen3")).named_parameters())
    norms = [parameter for parameter in before.values() if parameter.dim() == 1]
    lost = plan.NUM_STEPS * plan.LEARNING_RATE * plan.WEIGHT_DECAY
    assert min(float(norm.detach().abs().mean()) for norm in norms) * lost > 50 * 5e-6


@pytest.mark.parametrize("family", ["qwen3", LATENT])
@pytest.mark.parametrize(("recompute", "times"), [("none", (1, 1)), ("selective", (1, 2)), ("full", (2, 2))])
def test_what_is_to_be_computed_again_is(
    recompute: str,
    times: tuple[int, int],
    family: str,
    ranks: Callable[[int], Ranks],
    tiny_family: Callable[[str], Path],
) -> None:
    found = ranks(1).run("training_cases:num_calls", str(tiny_family(family)), {"recompute": recompute}, 1)[0]
    assert found == tuple(count * plan.NUM_MICRO_BATCHES for count in times)


def test_weights_that_were_not_gathered_are_behind(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    folder = str(tiny_family("qwen3"))
    keys = {**OVERLAPS}
    behind = ranks(2).run("training_cases:trained", folder, keys, 2, False)[0][1]
    after = ranks(2).run("training_cases:trained", folder, keys, 2, True)[0][1]
    without = ranks(2).run("training_cases:trained", folder, {}, 2, True)[0][1]
    assert all(np.array_equal(after[name], without[name]) for name in without)
    assert max(float(np.abs(behind[name] - after[name]).max()) for name in after) > 1e-4


@cache
def by_transformers(folder: Path) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Loss and gradient norm of each step, and the weights after the last by their names in a checkpoint."""
    model = load_tiny(folder)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=plan.LEARNING_RATE, betas=plan.BETAS, eps=plan.EPSILON,
    )  # fmt: skip
    figures: list[tuple[float, float]] = []
    for step in range(plan.NUM_STEPS):
        adam.zero_grad()
        batches = plan.micro_batches(step, model.config.vocab_size)
        total = 0.0
        for sequence in (sequence for batch in batches for sequence in batch):
            tokens, trained = torch.from_numpy(sequence.tokens).long(), torch.from_numpy(sequence.trained)
            logits = model(tokens[None, :-1]).logits[0][trained - 1]
            logprobs = (logits / plan.TEMPERATURE).log_softmax(-1)
            entropy = -(logprobs.exp() * logprobs).sum()
            chosen = logprobs.gather(1, tokens[trained, None]).sum()
            loss = -(chosen + plan.ENTROPY_COEF * entropy) / plan.num_trained(batches)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), plan.MAX_GRAD_NORM)
        adam.step()
        figures.append((total, float(norm)))
        assert norm > plan.MAX_GRAD_NORM, "clipping is active"
    kept = [(name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()]
    named = CheckpointNames(model).rename({name: p.detach() for name, p in (*model.named_parameters(), *kept)})
    return figures, {name: tensor.numpy() for name, tensor in named.items()}
