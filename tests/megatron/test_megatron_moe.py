"""Experts: auxiliary losses and given choices against plain torch on the model of transformers."""

# transformers' models have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import moe_plan
import numpy as np
import pytest
import torch
import training_plan as plan
from tiny_families import load_tiny
from torch.nn import functional

from penstock.backends.models.checkpoint_names import CheckpointNames

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

pytestmark = pytest.mark.megatron

MOE = "qwen3_moe"
BOTH = "sequences and step"
CASES: dict[str, tuple[str, int, dict[str, Any], str, str]] = {
    "four micro-batches": (MOE, 1, {}, "four", BOTH),
    "one micro-batch": (MOE, 1, {}, "one", BOTH),
    "with a stand-in": (MOE, 1, {}, "stand-in", BOTH),
    "layers without experts": (f"{MOE} mixed", 1, {}, "four", BOTH),
    "whole layers again": (MOE, 1, {"recompute": "full"}, "four", BOTH),
    "experts again": (MOE, 1, {"recompute": "selective", "transformer": {"recompute_modules": ["moe"]}}, "four", BOTH),
    "of the step": (MOE, 1, {}, "four", "step"),
    "data 2": (MOE, 2, {}, "four", BOTH),
    "expert 2, one each": (MOE, 2, {"expert_parallel": 2}, "one", BOTH),
    "tensor 2 expert 2": (MOE, 2, {"tensor_parallel": 2, "expert_parallel": 2}, "four", BOTH),
    "context 2": (MOE, 2, {"context_parallel": 2}, "four", BOTH),
    "pipeline 2, whole layers again": (MOE, 2, {"pipeline_parallel": 2, "recompute": "full"}, "four", BOTH),
    "tensor 2 expert 2 pipeline 2": (
        f"{MOE} mixed", 4, {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2}, "four", "sequences",
    ),
    "tensor 2 context 2": (MOE, 4, {"tensor_parallel": 2, "context_parallel": 2}, "four", BOTH),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_auxiliary_losses_are_those_of_the_step(
    case: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    family, num_ranks, keys, division, losses = CASES[case]
    folder = tiny_family(family)
    keys = {**keys, "transformer": {**keys.get("transformer", {}), **moe_plan.fields(losses)}}
    answers = ranks(num_ranks).run("moe_cases:balanced", str(folder), keys, num_ranks, division)
    figures, weights = by_transformers(folder, losses)
    for found, _ in answers:
        for step, wanted in enumerate(figures):
            assert found[step].keys() == wanted.keys()
            for name, value in wanted.items():
                assert found[step][name] == pytest.approx(value, abs=1e-5), (step, name)
    after: dict[str, Any] = answers[0][1]
    for name, wanted in weights.items():
        np.testing.assert_allclose(after[name], wanted, rtol=0, atol=5e-6, err_msg=name)


def test_without_them_the_steps_would_end_elsewhere(tiny_family: Callable[[str], Path]) -> None:
    folder = tiny_family(MOE)
    with_, without = (by_transformers(folder, losses)[1] for losses in (BOTH, "z"))
    assert max(float(np.abs(with_[name] - without[name]).max()) for name in with_) > 1e-4


@cache
def by_transformers(folder: Path, losses: str) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Figures of each step, and the weights after the last by their names in a checkpoint."""
    model = load_tiny(folder)
    asked = RouterLogits(model)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=plan.LEARNING_RATE, betas=plan.BETAS, eps=plan.EPSILON,
    )  # fmt: skip
    figures: list[dict[str, float]] = []
    for step in range(moe_plan.NUM_STEPS):
        adam.zero_grad()
        batches = plan.micro_batches(step, model.config.vocab_size)
        count = plan.num_trained(batches)
        loss = torch.zeros(())
        logits: list[list[torch.Tensor]] = []
        for sequence in (sequence for batch in batches for sequence in batch):
            tokens, trained = torch.from_numpy(sequence.tokens).long(), torch.from_numpy(sequence.trained)
            said = model(tokens[None, :-1]).logits[0][trained - 1]
            chosen = (said / plan.TEMPERATURE).log_softmax(-1).gather(1, tokens[trained, None])
            loss = loss - chosen.sum() / count
            logits.append(asked.taken())
        found = auxiliary(logits, moe_plan.LOSSES[losses])
        total = loss + sum(moe_plan.LOSSES[losses][name] * values.sum() for name, values in found.items())
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), plan.MAX_GRAD_NORM)
        adam.step()
        figures.append(
            {"loss": float(loss.detach()), "norm": float(norm)}
            | {f"train/moe_{name}": float(values.detach().mean()) for name, values in found.items()}
        )
    named = CheckpointNames(model).rename({name: p.detach() for name, p in model.named_parameters()})
    return figures, {name: tensor.numpy() for name, tensor in named.items()}


def auxiliary(logits: list[list[torch.Tensor]], losses: dict[str, float]) -> dict[str, torch.Tensor]:
    """Of the logits ``[T, E]`` of each sequence and layer, by kind ``[layers]``."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in losses}
    for of_layer in zip(*logits, strict=True):
        whole = torch.cat(of_layer)
        for name in losses:
            if name == "z_loss":
                found[name].append(whole.logsumexp(-1).square().mean())
            elif name == "seq_aux_loss":
                parts = [len(part) / len(whole) * switch_loss(part) for part in of_layer]
                found[name].append(torch.stack(parts).sum())
            else:
                found[name].append(switch_loss(whole))
    return {name: torch.stack(values) for name, values in found.items()}


def switch_loss(logits: torch.Tensor) -> torch.Tensor:
    """``E · Σ_e f_e P_e``: what part of the choices expert e has, and of the probability."""
    scores = logits.softmax(-1)
    chosen = functional.one_hot(scores.topk(moe_plan.PER_TOKEN).indices, moe_plan.NUM_EXPERTS).sum(1).float()
    share = chosen.mean(0) / moe_plan.PER_TOKEN
    return moe_plan.NUM_EXPERTS * (share * scores.mean(0)).sum()


class RouterLogits:
    """What the routers of a model say, computed beside them."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - a model of transformers
        self._found: list[torch.Tensor] = []
        for layer in model.model.layers:
            if (gate := getattr(layer.mlp, "gate", None)) is not None:
                gate.register_forward_pre_hook(self._ask)

    def taken(self) -> list[torch.Tensor]:
        """Of each layer since the last time ``[T, E]``."""
        found, self._found = self._found, []
        return found

    def _ask(self, gate: Any, inputs: tuple[torch.Tensor, ...]) -> None:  # noqa: ANN401 - a module of transformers
        self._found.append(functional.linear(inputs[0].flatten(0, -2), gate.weight))
