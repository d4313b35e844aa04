"""Packed training against the plain model: the same loss and the same gradient, however the tokens are split.

The plain side runs transformers' own attention on one unpadded sequence at a time, or on a right-padded batch, and
computes the objective from its formula.
"""

# Transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock.backends.learners.batch.packing import pack
from penstock.backends.learners.batch.sequences import read_groups
from penstock.backends.learners.options import LearnerOptions, ObjectiveOptions
from penstock.backends.learners.torch.model import CheckpointError, PackedModel
from penstock.backends.learners.torch.trainer import PolicyTrainer
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens, tokens_view
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AutoModel: Any = AutoModelForCausalLM  # transformers' factories have no types
CPU = torch.device("cpu")
VOCAB = 50
TEMPERATURE = 0.8
VERSION = 7
"""Of the policy that opens the step; tokens are made by versions 4 and 5."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large weights, so that attention to the wrong token could not hide in rounding.
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3 with experts and a dense layer": Qwen3MoeConfig(
        **SIZES, tie_word_embeddings=False, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2,
        norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "mistral with a sliding window": MistralConfig(**SIZES, head_dim=8, sliding_window=5),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    name = cast("str", request.param)
    path = tmp_path_factory.mktemp("model")
    AutoModel.from_config(ARCHITECTURES[name]).save_pretrained(path)
    return path


def make_part(draw: random.Random, *, masked: bool, context: bool) -> Part:
    num_tokens = draw.randint(1, 30)
    num_old = draw.randint(0, num_tokens)
    return Part(
        tokens=pack_tokens(draw.randrange(2, VOCAB) for _ in range(num_tokens)),
        logprobs=pack_floats(draw.uniform(-6.0, 0.0) for _ in range(num_tokens)),
        spans=(VersionSpan(4, num_old), VersionSpan(5, num_tokens - num_old)),
        loss_mask=bytes(draw.randint(0, 1) for _ in range(num_tokens)) if masked else b"",
        context_tokens=pack_tokens(draw.randrange(2, VOCAB) for _ in range(7)) if context else b"",
    )


def make_groups() -> tuple[Group, ...]:
    """Three groups of different sizes; with loss masks, two versions, and a sample of two parts."""
    draw = random.Random(11)
    groups: list[Group] = []
    for group_id, size in ((40, 3), (41, 5), (38, 2)):
        samples = tuple(
            Sample(
                key=SampleKey(group_id, index),
                parts=(
                    make_part(draw, masked=index % 2 == 1, context=False),
                    *([make_part(draw, masked=True, context=True)] if index == 1 else []),
                ),
                outcome=Completed(reward=Reward(value=draw.random())),
            )
            for index in range(size)
        )
        prompt = Prompt(row=0, epoch=0, tokens=pack_tokens(draw.randrange(2, VOCAB) for _ in range(4 + group_id % 5)))
        groups.append(Group(group_id=group_id, prompt=prompt, samples=samples))
    return tuple(groups)


def learner_options(max_tokens: int, objective: ObjectiveOptions) -> LearnerOptions:
    return LearnerOptions(max_tokens_per_micro_batch=max_tokens, objective=objective)


def packed_gradient(
    folder: Path, options: LearnerOptions, *, min_token_version: int = 0
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient as the learner computes them."""
    model = PackedModel.load(folder, dtype="float32", device=CPU)
    reference = perturbed(PackedModel.load(folder, dtype="float32", device=CPU))
    trainer = PolicyTrainer(
        model,
        options,
        temperature=TEMPERATURE,
        num_steps=10,
        reference=reference if options.objective.kl_coef else None,
        check_stop=lambda: None,
    )
    figures = trainer.accumulate(read_groups(make_groups(), min_token_version=min_token_version), version=VERSION)
    return figures["train/loss"], gradients(model.model)


def perturbed(model: PackedModel) -> PackedModel:
    """A reference policy that is not the policy."""
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.mul_(1.1)
    return model


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: cast("torch.Tensor", parameter.grad) for name, parameter in model.named_parameters()}


def plain_model(folder: Path) -> PreTrainedModel:
    loaded = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return cast("PreTrainedModel", loaded)


def sample_advantages(group: Group) -> list[float]:
    rewards = torch.tensor([cast("float", sample.reward) for sample in group.samples], dtype=torch.float64)
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()


def plain_gradient(
    folder: Path, objective: ObjectiveOptions, *, min_token_version: int = 0
) -> tuple[float, dict[str, torch.Tensor]]:
    """The same one sequence at a time, from the formulas."""
    model, reference = plain_model(folder), plain_model(folder)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.1)
    rows: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # per-token loss, mask, sample
    for group in make_groups():
        for sample, advantage in zip(group.samples, sample_advantages(group), strict=True):
            for part in sample.parts:
                tokens = list(tokens_view(part.tokens))
                context = list(tokens_view(part.context_tokens or group.prompt.tokens))
                new = plain_logprobs(model, context, tokens)
                old = torch.tensor(list(floats_view(part.logprobs)))
                ratio = (new - old).exp()
                loss = torch.maximum(
                    -ratio * advantage, -ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantage
                )
                if objective.kl_coef:
                    with torch.no_grad():
                        base = plain_logprobs(reference, context, tokens)
                    loss = loss + objective.kl_coef * ((base - new).exp() - 1 + new - base)
                mask = torch.tensor(list(part.loss_mask or bytes([1] * len(tokens))), dtype=torch.float32)
                versions = torch.tensor([span.version for span in part.spans for _ in range(span.num_tokens)])
                number = sample.key.group_id * 100 + sample.key.index
                rows.append((loss, mask * (versions >= min_token_version), number))
    total = reduced(rows, objective.reduction)
    torch.autograd.backward(total)
    return float(total.detach()), gradients(model)


def plain_logprobs(model: PreTrainedModel, context: list[int], tokens: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1] / TEMPERATURE
    return cast("torch.Tensor", logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0])


def reduced(rows: list[tuple[torch.Tensor, torch.Tensor, int]], reduction: str) -> torch.Tensor:
    if reduction == "token_mean":
        return torch.stack([(loss * mask).sum() for loss, mask, _ in rows]).sum() / sum(
            float(mask.sum()) for _, mask, _ in rows
        )
    means: list[torch.Tensor] = []
    for sample in {sample for _, _, sample in rows}:
        own = [(loss, mask) for loss, mask, other in rows if other == sample]
        num_tokens = max(1.0, sum(float(mask.sum()) for _, mask in own))
        means.append(torch.stack([(loss * mask).sum() for loss, mask in own]).sum() / num_tokens)
    return torch.stack(means).mean()


def assert_same(actual: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert actual[0] == pytest.approx(expected[0], abs=1e-5)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(actual[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    "objective",
    [ObjectiveOptions(), ObjectiveOptions(reduction="sequence_mean", kl_coef=0.2)],
    ids=["token mean", "sequence mean with KL"],
)
@pytest.mark.parametrize("max_tokens", [16, 100, 4096])
def test_packed_gradients_are_those_of_single_sequences(
    folder: Path, objective: ObjectiveOptions, max_tokens: int
) -> None:
    packed = packed_gradient(folder, learner_options(max_tokens, objective))
    assert_same(packed, plain_gradient(folder, objective))


def test_tokens_of_older_versions_get_no_loss(folder: Path) -> None:
    packed = packed_gradient(folder, learner_options(100, ObjectiveOptions()), min_token_version=5)
    assert_same(packed, plain_gradient(folder, ObjectiveOptions(), min_token_version=5))


def test_packed_gradients_are_those_of_a_padded_batch(folder: Path) -> None:
    """Likelihood of every response token, right-padded with an attention mask."""
    sequences = read_groups(make_groups(), min_token_version=0).sequences
    longest = max(len(sequence.tokens) for sequence in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    seen, trained = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens.tolist())
        seen[row, : len(sequence.tokens)] = 1
        trained[row, sequence.trained] = 1
    padded = plain_model(folder)
    logprobs = padded(ids, attention_mask=seen).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    torch.autograd.backward((logprobs * trained[:, 1:]).sum() / trained.sum())

    model = PackedModel.load(folder, dtype="float32", device=CPU)
    mean = model.logprobs(pack(sequences), temperature=1.0).mean()
    torch.autograd.backward(mean)
    value = float(mean.detach())
    assert_same((value, gradients(model.model)), (value, gradients(padded)))


def test_an_architecture_that_mixes_packed_sequences_gets_padded_rows_and_says_so(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4, initializer_range=0.3)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    model = PackedModel.load(tmp_path, dtype="float32", device=CPU)
    assert model.layout == "padded"
    [notice] = model.notices
    assert "padded" in notice


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json there"):
        PackedModel.load(tmp_path / "nothing", dtype="float32", device=CPU)


def edited_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "story"),
    [
        (edited_config(num_hidden_layers=3), "9 weights of the architecture are not in the checkpoint"),
        (edited_config(intermediate_size=64), r"down_proj.weight first: \[32, 48\] in the checkpoint, \[32, 64\]"),
        (edited_config(hidden_size="wide"), "expected int, got str"),
        (edited_config(model_type="unheard_of"), "unheard_of"),
        (cut_weights, "invalid header length"),
        (remove_weights, "no file named model.safetensors"),
    ],
    ids=["missing weights", "other shapes", "no number", "unknown architecture", "cut off", "no weights"],
)
def test_a_damaged_checkpoint_is_refused_with_its_story(
    damage: Callable[[Path], None], story: str, tmp_path: Path
) -> None:
    AutoModel.from_config(ARCHITECTURES["llama"]).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=story):
        PackedModel.load(tmp_path, dtype="float32", device=CPU)
