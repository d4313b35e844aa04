"""How far the canary of wrong weights is from what is allowed, and that of right ones."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from engine_cases import make_case, open_engine, weights_of

from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.training.canary import canary_under, choose_canary
from penstock.messages.arrays import pack_floats, pack_tokens, tokens_view
from penstock.messages.canary import canary_difference
from penstock.messages.weights import Canary
from penstock.runtime.scenario.resolve import EXACT_CANARY, LOOSE_CANARY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Weights = dict[str, torch.Tensor]
NORM = "model.norm.weight"


def opened(family: str, folder: Path, dtype: str, *, sharpness: float = 1.0) -> tuple[Weights, Callable[..., float]]:
    """Right weights, and how far an engine that is given some is from the learner with the right ones.

    Args:
        family: of the model.
        folder: for it.
        dtype: of both.
        sharpness: what its matrices are multiplied with; 3 makes it say something, as a trained one does.
    """
    case = make_case(family, folder)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.mul_(sharpness if parameter.ndim > 1 else 1.0)
    case.model.save_pretrained(folder)
    model = PackedModel.load(case.folder, dtype=dtype, device=torch.device("cpu"))
    canary = canary_under(model, choose_canary(model))
    engine = open_engine(case, dtype=getattr(torch, dtype))

    def difference(weights: Weights) -> float:
        engine.load(weights, 1)
        return canary_difference(canary, engine.probe(tokens_view(canary.tokens)).numpy().tobytes())

    return weights_of(case.model), difference


def swaps(right: Weights) -> Iterator[Weights]:
    """Each two weights of one shape in each other's place."""
    for left, other in itertools.combinations(right, 2):
        if right[left].shape == right[other].shape and not torch.equal(right[left], right[other]):
            yield {**right, left: right[other], other: right[left]}


@pytest.mark.parametrize("family", ["qwen3_tied", "llama_untied"])
def test_any_two_swapped_weights_are_far_outside_and_right_ones_far_inside(family: str, tmp_path: Path) -> None:
    right, difference = opened(family, tmp_path, "float32")
    assert difference(right) < EXACT_CANARY / 100
    swapped = [difference(weights) for weights in swaps(right)]
    assert len(swapped) > 10
    assert min(swapped) > 3 * EXACT_CANARY


@pytest.mark.parametrize("family", ["qwen3_tied", "llama_untied", "qwen3_moe"])
def test_in_bfloat16_any_wrong_matrix_is_far_outside_too(family: str, tmp_path: Path) -> None:
    right, difference = opened(family, tmp_path, "bfloat16", sharpness=3.0)
    assert difference(right) < LOOSE_CANARY / 3
    matrices = {name: weight for name, weight in right.items() if weight.ndim > 1 and "experts" not in name}
    swapped = [difference({**right, **weights}) for weights in swaps(matrices)]
    assert len(swapped) > 10
    assert min(swapped) > 3 * LOOSE_CANARY


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", EXACT_CANARY), ("bfloat16", LOOSE_CANARY)])
@pytest.mark.parametrize("fault", ["half of a matrix", "a layer twice", "no head", "a transposed matrix"])
def test_usual_mistakes_in_loading_are_outside(fault: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    right, difference = opened("llama_untied", tmp_path, dtype, sharpness=3.0)
    wrong = dict(right)
    match fault:
        case "half of a matrix":  # of two ranks each has loaded the first's share
            gate = right["model.layers.0.mlp.gate_proj.weight"]
            wrong["model.layers.0.mlp.gate_proj.weight"] = gate[: len(gate) // 2].repeat(2, 1)
        case "a layer twice":
            wrong |= {name: right[name.replace("layers.1.", "layers.0.")] for name in right}
        case "no head":
            wrong["lm_head.weight"] = torch.zeros_like(right["lm_head.weight"])
        case _:
            wrong["model.layers.1.self_attn.q_proj.weight"] = right["model.layers.1.self_attn.q_proj.weight"].T
    assert difference(wrong) > 2 * tolerance


def test_one_wrong_weight_of_a_norm_is_outside_in_float32(tmp_path: Path) -> None:
    right, difference = opened("qwen3_tied", tmp_path, "float32")
    for name in (name for name in right if "norm" in name):
        wrong = right[name].clone()
        wrong[0] *= 1.3
        assert difference({**right, name: wrong}) > 3 * EXACT_CANARY, name


def canary(*logprobs: float) -> Canary:
    """Of two tokens at one place, as the learner has them."""
    return Canary(tokens=pack_tokens([4, 5]), logprobs=pack_floats(logprobs))


def test_a_difference_is_a_share_of_the_spread() -> None:
    told = canary(-1.0, -3.0)  # 1 from their mean each: √2 in all
    assert canary_difference(told, pack_floats([-1.0, -3.0])) == 0
    assert canary_difference(told, pack_floats([-1.0, -3.0 - 0.1 * 2**0.5])) == pytest.approx(0.1)
    assert canary_difference(told, pack_floats([-1.0])) == float("inf")
    assert canary_difference(told, b"") == float("inf")
    assert canary_difference(told, pack_floats([-1.0, float("nan")])) == float("inf")
    assert canary_difference(told, pack_floats([-1.0, float("-inf")])) == float("inf")


def test_rounding_is_no_share_of_nothing() -> None:
    flat = canary(-4.0, -4.0)
    assert canary_difference(flat, pack_floats([-4.0, -4.000001])) < EXACT_CANARY
    assert canary_difference(flat, pack_floats([-4.0, -4.1])) > LOOSE_CANARY
