"""Low-rank adapters: merged as peft merges them, the base without them, and nothing else trained."""

# transformers and peft are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from engine_cases import make_case
from learner_cases import RunningLearner, open_learner, train_command
from peft import PeftModel
from transformers import AutoModelForCausalLM

from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.learners.options import LearnerOptions, LoraOptions, ObjectiveOptions
from penstock.backends.learners.torch.lora import Adapters
from penstock.messages.commands import OpenLearner, PublishWeights, SaveCheckpoint
from penstock.messages.errors import UserFault
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, WeightsPublished

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IDS = torch.arange(24)[None] + 5


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
        torch.autograd.backward(loss)
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
    with pytest.raises(UserFault, match=r"rank 4 makes 28 matrices, .*\[4, 64\], and the checkpoint has none"):
        others.restore({})
    with pytest.raises(UserFault, match=r"of shape \[8, 64\]; resume with the learner.lora"):
        others.restore(Adapters(loaded(model_folder), LoraOptions(rank=8)).state())


def test_targets_are_found_by_the_end_of_their_name_or_refused(model_folder: Path) -> None:
    adapters = Adapters(loaded(model_folder), LoraOptions(target_modules=("q_proj", "self_attn.v_proj")))
    assert len(adapters.state()) == 2 * 2 * 2
    with pytest.raises(
        UserFault, match=r"lm_head is no matrix of Qwen3ForCausalLM between .* there are q_proj, k_proj"
    ):
        Adapters(loaded(model_folder), LoraOptions(target_modules=("lm_head",)))


@pytest.mark.parametrize("targets", ["auto", ("gate_proj",)])
def test_dense_layers_beside_experts_are_not_taken_for_them(targets: Any, tmp_path: Path) -> None:  # noqa: ANN401
    model = make_case("qwen3_moe", tmp_path).model
    with pytest.raises(UserFault, match=r"peft takes model\.layers\.1\.mlp\.\w+_proj for one of theirs"):
        Adapters(model, LoraOptions(target_modules=targets))
    adapters = Adapters(make_case("qwen3_moe", tmp_path).model, LoraOptions(target_modules=("q_proj", "v_proj")))
    assert len(adapters.state()) == 3 * 2 * 2


# --- the learner --------------------------------------------------------------------------------------------------

LORA = LearnerOptions(learning_rate=1e-2, lora=LoraOptions(rank=4, alpha=8))
WITH_KL = LearnerOptions(
    learning_rate=1e-2, lora=LoraOptions(rank=4, alpha=8), objective=ObjectiveOptions(kl_coef=0.1), num_updates=2
)


def figures(learner: RunningLearner, version: int) -> dict[str, float]:
    trained = learner.ask(train_command(version), BatchTrained)
    return {metric.name: metric.value for metric in trained.metrics if not metric.name.startswith("perf/")}


def published(learner: RunningLearner, version: int) -> dict[str, torch.Tensor]:
    learner.ask(PublishWeights(version=version, publish=version + 1), WeightsPublished)
    return learner.weights.published[-1]


def test_adapted_matrices_move_and_nothing_else_does(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = open_learner(model_folder, tmp_path / "checkpoints", LORA)
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    before = published(learner, 0)
    original = dict(loaded(model_folder).named_parameters())
    assert before.keys() == original.keys()
    assert all(torch.equal(before[name], original[name]) for name in before)
    for version in (1, 2):
        figures(learner, version)
    after = published(learner, 2)
    moved_names = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved_names == {name for name in after if "_proj." in name}
    assert len(moved_names) == 14


def test_the_canary_of_the_learner_is_what_the_published_weights_say(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = open_learner(model_folder, tmp_path / "checkpoints", LORA)
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    figures(learner, 1)
    weights = published(learner, 1)
    plain = loaded(model_folder)
    plain.load_state_dict(weights, strict=False)
    canary = learner.weights.canaries[-1]
    ids = torch.frombuffer(bytearray(canary.tokens), dtype=torch.int32).long()
    said = cast("torch.Tensor", plain(ids[None]).logits)[0, :-1].log_softmax(-1)[:, ids].flatten()
    expected = torch.frombuffer(bytearray(canary.logprobs), dtype=torch.float32)
    torch.testing.assert_close(said, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "dtype"), [(LORA, "float32"), (WITH_KL, "float32"), (LORA, "bfloat16"), (LORA, "float16")]
)
def test_a_learner_with_adapters_goes_on_bit_for_bit(
    options: LearnerOptions, dtype: str, model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    straight = open_learner(model_folder, tmp_path / "straight", options, dtype=dtype, seed=3)
    straight.ask(OpenLearner(), LearnerOpened)
    expected = [figures(straight, version) for version in (1, 2, 3, 4)]
    first = open_learner(model_folder, tmp_path / "checkpoints", options, dtype=dtype, seed=3)
    first.ask(OpenLearner(), LearnerOpened)
    for version in (1, 2):
        figures(first, version)
    path = first.ask(SaveCheckpoint(version=2), CheckpointWritten).path
    torch.manual_seed(99)
    second = open_learner(model_folder, tmp_path / "checkpoints", options, dtype=dtype, seed=3, epoch=2)
    opened += (straight, first, second)
    second.ask(OpenLearner(version=2, path=path), LearnerOpened)
    assert [figures(second, version) for version in (3, 4)] == expected[2:]
    weights, others = published(straight, 4), published(second, 4)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["reference", "version-0000002"]


def test_a_checkpoint_is_the_merged_model_with_small_adapters_beside_it(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    learner = open_learner(model_folder, tmp_path / "checkpoints", LORA)
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    figures(learner, 1)
    weights = published(learner, 1)
    folder = Path(learner.ask(SaveCheckpoint(version=1), CheckpointWritten).path)
    merged = loaded(folder)
    assert all(torch.equal(weights[name], tensor) for name, tensor in merged.named_parameters())
    base = loaded(folder.parent / "reference")
    peft_model = PeftModel.from_pretrained(base, str(folder / "adapter"))
    torch.testing.assert_close(logits(peft_model), logits(merged), rtol=1e-5, atol=1e-5)
    size_bytes = (folder / "adapter" / "adapter_model.safetensors").stat().st_size
    assert size_bytes < (folder / "model.safetensors").stat().st_size / 5


def test_the_kl_is_to_the_model_without_adapters(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    options = LearnerOptions(learning_rate=1e-2, lora=LORA.lora, objective=ObjectiveOptions(kl_coef=0.1))
    learner = open_learner(model_folder, tmp_path / "checkpoints", options)
    opened.append(learner)
    learner.ask(OpenLearner(), LearnerOpened)
    assert figures(learner, 1)["train/kl_loss"] == 0.0
    later = figures(learner, 2)
    assert later["train/kl_loss"] > 1e-6
    assert later["rollout/ref_log_probs"] != later["rollout/log_probs"]


def test_a_checkpoint_with_adapters_is_no_place_to_go_on_from_without_them(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    adapted = open_learner(model_folder, tmp_path / "checkpoints", LORA)
    opened.append(adapted)
    adapted.ask(OpenLearner(), LearnerOpened)
    figures(adapted, 1)
    path = adapted.ask(SaveCheckpoint(version=1), CheckpointWritten).path
    plain = open_learner(model_folder, tmp_path / "checkpoints", LearnerOptions(learning_rate=1e-2), epoch=2)
    opened.append(plain)
    error = plain.error(OpenLearner(version=1, path=path))
    assert "written with learner.lora" in str(error)


def test_a_checkpoint_without_adapters_is_no_place_to_go_on_from_with_them(
    model_folder: Path, tmp_path: Path, opened: list[RunningLearner]
) -> None:
    plain = open_learner(model_folder, tmp_path / "checkpoints", LearnerOptions(learning_rate=1e-2))
    opened.append(plain)
    plain.ask(OpenLearner(), LearnerOpened)
    figures(plain, 1)
    path = plain.ask(SaveCheckpoint(version=1), CheckpointWritten).path
    adapted = open_learner(model_folder, tmp_path / "checkpoints", LORA, epoch=2)
    opened.append(adapted)
    error = adapted.error(OpenLearner(version=1, path=path))
    assert "written without learner.lora" in str(error)
