"""Low-rank adapters: merged as peft merges them, the base without them, and nothing else trained."""

# transformers and peft are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from penstock.backends.learners.options import LoraOptions
from penstock.backends.learners.torch.lora import Adapters, LoraError
from penstock.backends.models.make import make_model
from penstock.backends.models.terminal import quiet_transformers

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

IDS = torch.arange(24)[None] + 5


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "model"
    with quiet_transformers():
        make_model("xs", folder, 0)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with quiet_transformers():
        return cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))


def logits(model: Any) -> torch.Tensor:  # noqa: ANN401  # peft's model is none of transformers
    return cast("torch.Tensor", model(IDS).logits)


def moved(adapters: Adapters) -> Adapters:
    generator = torch.Generator().manual_seed(1)
    for tensor in adapters.state().values():
        tensor.data.normal_(std=0.05, generator=generator)
    return adapters


@torch.no_grad()
def test_merged_weights_are_those_of_peft_and_make_the_same_model(model_folder: Path, tmp_path: Path) -> None:
    model = loaded(model_folder)
    adapters = moved(Adapters(model, LoraOptions()))
    adapters.save(tmp_path / "adapter", adapters.state(), base=str(model_folder))
    peft_model = cast("Any", PeftModel.from_pretrained(loaded(model_folder), str(tmp_path / "adapter")))
    assert torch.equal(logits(peft_model), logits(model))
    expected = dict(peft_model.merge_and_unload().named_parameters())
    merged = dict(adapters.merged())
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name])
    plain = loaded(model_folder)
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_without_adapters_the_model_is_the_base_bit_for_bit(model_folder: Path) -> None:
    model, base = loaded(model_folder), loaded(model_folder)
    adapters = Adapters(model, LoraOptions(rank=4, alpha=8))
    assert torch.equal(logits(model), logits(base))
    moved(adapters)
    assert not torch.allclose(logits(model), logits(base), atol=1e-2)
    with adapters.switched_off():
        assert torch.equal(logits(model), logits(base))
    weights = dict(base.named_parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in adapters.base())


def test_asking_the_base_in_between_leaves_the_gradient_as_it_is(model_folder: Path) -> None:
    model = loaded(model_folder)
    adapters = moved(Adapters(model, LoraOptions()))

    def gradients(*, asks_base: bool) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss = logits(model).log_softmax(-1)[..., 3].sum()
        if asks_base:
            with adapters.switched_off():
                model(IDS)
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    alone, between = gradients(asks_base=False), gradients(asks_base=True)
    assert len(alone) == len(adapters.state())
    assert alone.keys() == between.keys()
    assert all(torch.equal(alone[name], between[name]) for name in alone)


def test_adapters_of_a_bfloat16_model_are_float32_and_merged_in_float32(model_folder: Path) -> None:
    model = loaded(model_folder, torch.bfloat16)
    base = copy.deepcopy(dict(model.named_parameters()))
    adapters = moved(Adapters(model, LoraOptions(rank=8, alpha=16)))
    assert {tensor.dtype for tensor in adapters.state().values()} == {torch.float32}
    state = {name.removeprefix("adapter/"): tensor for name, tensor in adapters.state().items()}
    for name, tensor in adapters.merged():
        assert tensor.dtype == torch.bfloat16
        path = name.removesuffix(".weight")
        if f"{path}.lora_B.default.weight" in state:
            delta = state[f"{path}.lora_B.default.weight"] @ state[f"{path}.lora_A.default.weight"] * 2.0
            assert torch.equal(tensor, (base[name].float() + delta).bfloat16())


def test_adapters_are_taken_over_whole_or_refused(model_folder: Path) -> None:
    first, second = loaded(model_folder), loaded(model_folder)
    adapters, others = moved(Adapters(first, LoraOptions(rank=4))), Adapters(second, LoraOptions(rank=4))
    others.restore(adapters.state())
    assert torch.equal(logits(first), logits(second))
    with pytest.raises(LoraError, match=r"rank 4 makes 28 matrices, .*\[4, 64\], and the checkpoint has none"):
        others.restore({})
    with pytest.raises(LoraError, match=r"of shape \[8, 64\]; resume with the learner.lora"):
        others.restore(Adapters(loaded(model_folder), LoraOptions(rank=8)).state())


def test_targets_are_found_by_the_end_of_their_name_or_refused(model_folder: Path) -> None:
    adapters = Adapters(loaded(model_folder), LoraOptions(target_modules=("q_proj", "self_attn.v_proj")))
    assert len(adapters.state()) == 2 * 2 * 2
    with pytest.raises(LoraError, match=r"lm_head is no matrix of Qwen3ForCausalLM between .* there are q_proj, k_proj"):
        Adapters(loaded(model_folder), LoraOptions(target_modules=("lm_head",)))
