"""Experts: auxiliary losses and given choices against plain torch on the model of transformers."""

# transformers' models have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

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

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames

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


REPLAYS: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "one": (MOE, 1, {}, "all"),
    "some inputs": (MOE, 1, {}, "some"),
    "layers without experts": (f"{MOE} mixed", 1, {"recompute": "full"}, "some"),
    "tensor 2 expert 2": (MOE, 2, {"tensor_parallel": 2, "expert_parallel": 2}, "some"),
    "context 2": (MOE, 2, {"context_parallel": 2}, "some"),
    "pipeline 2, experts again": (
        MOE, 2,
        {"pipeline_parallel": 2, "recompute": "selective", "transformer": {"recompute_modules": ["moe"]}}, "all",
    ),
    "tensor 2 context 2": (MOE, 4, {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 2}, "some"),
}  # fmt: skip
LENGTHS = [[17, 9, 12], [21, 6], [8, 13, 5], [26]]


@pytest.mark.parametrize("case", REPLAYS)
def test_inputs_go_to_the_experts_that_were_recorded(
    case: str, ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    family, num_ranks, keys, choices = REPLAYS[case]
    folder = tiny_family(family)
    answers = ranks(num_ranks).run("moe_cases:replayed", str(folder), keys, num_ranks, LENGTHS, choices)
    for found, wanted in zip(joined(answers, num_ranks), given(folder, choices)[:2], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    after: dict[str, Any] = answers[0][2]
    for name, wanted in given(folder, choices)[2].items():
        np.testing.assert_allclose(after[name], wanted, rtol=0, atol=5e-6, err_msg=name)


def test_the_model_s_own_choices_change_nothing_and_others_do(
    ranks: Callable[[int], Ranks], tiny_family: Callable[[str], Path]
) -> None:
    folder = tiny_family(MOE)
    without = joined(ranks(1).run("moe_cases:replayed", str(folder), {}, 1, LENGTHS, "ignored"), 1)[0]
    own = joined(ranks(1).run("moe_cases:replayed", str(folder), {}, 1, LENGTHS, own_choices(folder)), 1)[0]
    np.testing.assert_allclose(own, without, rtol=0, atol=1e-6)
    assert np.abs(given(folder, "all")[0] - without).max() > 0.1


def joined(answers: list[Any], num_ranks: int) -> list[Any]:
    """Log-probs before and after the step, from a rank of the last stage; layouts here have one replica or several."""
    by_batch: list[dict[int, Any]] = [{}, {}]
    for _, (before, after, _, numbers) in enumerate(answers):
        for place, found in enumerate((before, after)):
            by_batch[place] |= dict(zip(numbers, found, strict=False))
    return [np.concatenate([found[number] for number in sorted(found)]) for found in by_batch]


def own_choices(folder: Path) -> list[Any]:
    """Of transformers, for each sequence ``[N, layers, k]``."""
    model = load_tiny(folder)
    asked = RouterLogits(model)
    found: list[Any] = []
    for sequence in (s for batch in moe_plan.recorded(LENGTHS, model.config.vocab_size, "all") for s in batch):
        with torch.no_grad():
            model(torch.from_numpy(sequence.tokens).long()[None, :-1])
        chosen = [logits.topk(moe_plan.PER_TOKEN).indices for logits in asked.taken()]
        found.append(torch.stack(chosen, dim=1).numpy().astype(np.int16))
    return found


@cache
def given(folder: Path, choices: str) -> tuple[Any, Any, dict[str, Any]]:
    """Log-probs before and after a step, and the weights after it, of the model whose routers are given choices."""
    model = load_tiny(folder)
    layers = [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    forced = ForcedRouters(layers, renormalizes=model.config.norm_topk_prob)
    batches = moe_plan.recorded(LENGTHS, model.config.vocab_size, choices, len(model.model.layers))
    count = plan.num_trained(batches)
    sequences = [sequence for batch in batches for sequence in batch]
    sparse = [index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=plan.LEARNING_RATE, betas=plan.BETAS, eps=plan.EPSILON,
    )  # fmt: skip

    def logprobs() -> torch.Tensor:
        found: list[torch.Tensor] = []
        for sequence in sequences:
            tokens, trained = torch.from_numpy(sequence.tokens).long(), torch.from_numpy(sequence.trained)
            forced.choices = None if sequence.experts is None else torch.from_numpy(sequence.experts[:, sparse]).long()
            said = model(tokens[None, :-1]).logits[0][trained - 1] / plan.TEMPERATURE
            found.append(said.log_softmax(-1).gather(1, tokens[trained, None])[:, 0])
        return torch.cat(found)

    before = logprobs()
    torch.autograd.backward(-before.sum() / count)
    torch.nn.utils.clip_grad_norm_(model.parameters(), plan.MAX_GRAD_NORM)
    adam.step()
    with torch.no_grad():
        after = logprobs()
    named = CheckpointNames(model).rename({name: p.detach() for name, p in model.named_parameters()})
    return before.detach().numpy(), after.numpy(), {name: tensor.numpy() for name, tensor in named.items()}


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
        torch.autograd.backward(total)
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


class ForcedRouters:
    """Gives the routers of a model their choices, with the probabilities that they have for them."""

    def __init__(self, layers: list[Any], *, renormalizes: bool) -> None:
        self.choices: torch.Tensor | None = None
        """``[N, layers with experts, k]`` of the first N inputs."""
        self._renormalizes = renormalizes
        for place, layer in enumerate(layers):
            layer.mlp.gate.register_forward_hook(
                lambda gate, inputs, output, place=place: self._force(gate, inputs, output, place)
            )

    def _force(self, gate: Any, inputs: tuple[torch.Tensor, ...], output: Any, place: int) -> Any:  # noqa: ANN401
        if self.choices is None:
            return None
        logits = functional.linear(inputs[0].flatten(0, -2), gate.weight)
        chosen = logits.topk(moe_plan.PER_TOKEN).indices
        recorded = self.choices[:, place]
        chosen = torch.cat([recorded, chosen[len(recorded) :]])
        weights = logits.softmax(-1).gather(1, chosen)
        if self._renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return output[0], weights, chosen
