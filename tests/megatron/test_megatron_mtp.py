"""Layers that predict further tokens, trained beside the policy: against a plain loop over transformers' layers."""

# transformers' models have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import io
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
import trainer_plan
import training_plan as plan
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_families import load_tiny, make_predicting
from torch import nn

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames
from penstock.backends.checkpoint.make import make_model
from penstock.backends.checkpoint.tokenizer_files import copy_tokenizer
from penstock.backends.learners.megatron_options import MtpOptions
from penstock.backends.learners.objectives.spec import objective
from penstock.runtime.cli.convert import convert

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

    from penstock.backends.learners.options import ObjectiveOptions

pytestmark = pytest.mark.megatron

Layout = tuple[int, dict[str, Any]]

APART = MtpOptions(loss_coef=0.3)
TOGETHER = MtpOptions(loss_coef=0.3, trains_trunk=True)
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
LATENT, GLM, TWO = "deepseek_v3", "glm4_moe", "glm4_moe two"
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": (LATENT, 1, {}),
    "one, plain optimizer, recomputed": (GLM, 1, {"distributed_optimizer": False, "recompute": "full"}),
    "two such layers, data 2": (TWO, 2, {}),
    "tensor 2 expert 2": (LATENT, 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "pipeline 2 with overlaps": (GLM, 2, {"pipeline_parallel": 2, "overlap_grad_reduce": True}),
    "context 2": (GLM, 2, {"context_parallel": 2}),
    "pipeline 2 virtual 2 data 2 with overlaps": (
        GLM, 4, {"pipeline_parallel": 2, "virtual_pipeline": 2, **OVERLAPS},
    ),
    "two such layers, tensor 2 context 2": (TWO, 4, {"tensor_parallel": 2, "context_parallel": 2}),
    "tensor 2 expert 2 pipeline 2": (LATENT, 4, {"tensor_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2}),
}  # fmt: skip
RESHARDED: list[tuple[Layout, Layout]] = [
    ((2, {"tensor_parallel": 2, "expert_parallel": 2}), (1, {})),
    ((1, {}), (2, {"pipeline_parallel": 2})),
]
AROUND = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


@pytest.fixture(scope="session")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    parent = tmp_path_factory.mktemp("predicting")

    def make(name: str) -> Path:
        folder = parent / name.replace(" ", "_")
        num_further = 2 if name.endswith("two") else 1
        return folder if folder.exists() else make_predicting(name.split()[0], folder, num_further=num_further)

    return make


@pytest.mark.parametrize("options", [APART, TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_end_where_a_plain_loop_ends(
    layout: str, options: MtpOptions, ranks: Callable[[int], Ranks], predicting: Callable[[str], Path]
) -> None:
    name, num_ranks, keys = LAYOUTS[layout]
    folder = predicting(name)
    answers = ranks(num_ranks).run("mtp_cases:trained", str(folder), keys | {"mtp": options}, num_ranks)
    figures, weights = by_a_plain_loop(folder, options)
    for found, _ in answers:
        np.testing.assert_allclose(np.array(found, dtype=float), np.array(figures, dtype=float), rtol=0, atol=5e-6)
    after: dict[str, Any] = answers[0][1]
    assert after.keys() == weights.keys()
    for tensor, wanted in weights.items():
        np.testing.assert_allclose(after[tensor], wanted, rtol=0, atol=1e-5, err_msg=tensor)


def test_the_policy_does_not_know_of_layers_that_are_trained_apart(
    ranks: Callable[[int], Ranks], predicting: Callable[[str], Path]
) -> None:
    folder = str(predicting(LATENT))
    [[with_them, after]] = ranks(1).run("mtp_cases:trained", folder, {"mtp": APART}, 1)
    [[without, policy]] = ranks(1).run("mtp_cases:trained", folder, {}, 1)
    [[_, together]] = ranks(1).run("mtp_cases:trained", folder, {"mtp": TOGETHER}, 1)
    assert [row[:2] for row in with_them] == [row[:2] for row in without]
    assert all(np.array_equal(after[name], tensor) for name, tensor in policy.items())
    trunk = "model.layers.0.self_attn.o_proj.weight"
    assert np.abs(together[trunk] - policy[trunk]).max() > 1e-4
    assert len(after) > len(policy)


@pytest.mark.parametrize(
    "given",
    [objective("gspo"), objective("ppo", kl_coef=0.1), objective("ppo", critic="shared", critic_only_steps=1)],
    ids=["coupled", "reference and critic", "shared critic"],
)
def test_batches_of_any_objective_go_as_without_them(
    given: ObjectiveOptions, ranks: Callable[[int], Ranks], predicting: Callable[[str], Path]
) -> None:
    folder, batches = str(predicting(GLM)), msgspec.msgpack.encode(trainer_plan.make_batches(2))
    keys: dict[str, Any] = {"pipeline_parallel": 2}
    found: list[tuple[list[dict[str, float]], dict[str, Any]]] = []
    for megatron in (keys, keys | {"mtp": APART}):
        options = msgspec.msgpack.encode(trainer_plan.learner_options(given, megatron, num_updates=2, num_ranks=2))
        found.append(ranks(2).run("trainer_cases:trained", folder, options, 2, batches)[0])
    (without, policy), (beside, after) = found
    for each, other in zip(without, beside, strict=True):
        is_trained = "train/grad_norm" in each
        more = {"train/mtp_loss", "train/mtp_grad_norm", "train/mtp_grad_norm_max"}
        assert other.keys() - each.keys() == (more if is_trained else set())
        for name, value in each.items():
            if not name.startswith("perf/"):
                assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, tensor in policy.items():
        np.testing.assert_allclose(after[name], tensor, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_come_out_as_they_went_in_but_for_the_copies(
    num_ranks: int, ranks: Callable[[int], Ranks], predicting: Callable[[str], Path]
) -> None:
    keys = {"mtp": APART, "tensor_parallel": num_ranks}
    wrong, _ = ranks(num_ranks).run("weight_cases:round_trip", str(predicting(TWO)), keys, num_ranks)[0]
    copies = [f"model.layers.{n}.{name}.weight" for n in (4, 5) for name in ("embed_tokens", "shared_head.head")]
    assert wrong == sorted(copies)


@pytest.mark.parametrize(("saved_in", "loaded_in"), RESHARDED)
def test_a_checkpoint_has_them_with_their_optimizer_whatever_the_layout(
    saved_in: Layout,
    loaded_in: Layout,
    ranks: Callable[[int], Ranks],
    predicting: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    model = str(predicting(LATENT))
    num_ranks, keys = saved_in
    case = ("resharding_cases:saved", model, str(tmp_path), keys | {"mtp": APART}, num_ranks)
    path, weights, after = ranks(num_ranks).run(*case)[0]
    num_ranks, keys = loaded_in
    case = ("resharding_cases:gone_on", model, path, keys | {"mtp": APART}, num_ranks)
    found, found_after, _ = ranks(num_ranks).run(*case)[0]
    beyond = "model.layers.4.mlp.experts.3.up_proj.weight"
    assert found.keys() == weights.keys() >= {beyond}
    assert all(np.array_equal(found[name], weights[name]) for name in weights)
    assert max(float(np.abs(found_after[name] - after[name]).max()) for name in after) < 5e-7
    assert np.abs(after[beyond] - weights[beyond]).max() > 1e-4
    with pytest.raises(AssertionError, match=r"learner\.megatron\.mtp is null, so they would be lost"):
        ranks(1).run("resharding_cases:gone_on", model, path, {}, 1)


def test_a_checkpoint_without_them_is_refused_where_they_are_trained(
    ranks: Callable[[int], Ranks], predicting: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(predicting(LATENT))
    path, _, _ = ranks(1).run("resharding_cases:saved", model, str(tmp_path), {}, 1)[0]
    with pytest.raises(AssertionError, match="was written without layers that predict further tokens"):
        ranks(1).run("resharding_cases:gone_on", model, path, {"mtp": APART}, 1)


def test_converted_they_are_as_they_were_trained_and_their_copies_the_models_own(
    ranks: Callable[[int], Ranks], predicting: Callable[[str], Path], tmp_path: Path
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(predicting(GLM), model)
    make_model("xs", tmp_path / "tokenizer", seed=0)
    copy_tokenizer(tmp_path / "tokenizer", model)
    case = ("resharding_cases:saved", str(model), str(run / "checkpoints"), {"mtp": TOGETHER}, 1)
    _, weights, _ = ranks(1).run(*case)[0]
    converted(run, tmp_path / "back", "huggingface")
    converted(tmp_path / "back", tmp_path / "megatron", "megatron")
    converted(tmp_path / "megatron", tmp_path / "again", "huggingface")
    before = load_file(model / "model.safetensors")
    for folder in ("back", "again"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == before.keys()
        assert all(np.array_equal(found[name].numpy(), tensor) for name, tensor in weights.items())
        embedding, head = found["model.embed_tokens.weight"], found["lm_head.weight"]
        assert torch.equal(found["model.layers.4.embed_tokens.weight"], embedding)
        assert torch.equal(found["model.layers.4.shared_head.head.weight"], head)
        assert not torch.equal(embedding, before["model.embed_tokens.weight"])
    for folder in ("back", "megatron"):
        case = ("resharding_cases:weights_in", str(model), str(tmp_path / folder), {"mtp": APART}, 1)
        begun = ranks(1).run(*case)[0]
        assert begun.keys() == weights.keys()
        assert all(np.array_equal(begun[name], tensor) for name, tensor in weights.items())


def test_a_head_of_their_own_is_refused(
    ranks: Callable[[int], Ranks], predicting: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = load_file(predicting(GLM) / "model.safetensors")
    tensors["model.layers.4.shared_head.head.weight"][7, 3] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(predicting(GLM) / "config.json", tmp_path)
    with pytest.raises(AssertionError, match=r"shared_head\.head\.weight is another matrix than lm_head\.weight"):
        ranks(1).run("weight_cases:round_trip", str(tmp_path), {"mtp": APART}, 1)


def converted(source: Path, target: Path, target_format: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    assert not convert(
        source, target, console, version=None, dtype=None, max_shard_size="1GB", target_format=target_format
    )


class Plain:
    """transformers' own layers in the place of such layers, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = load_tiny(folder / "whole")
        kept = [(name, buffer) for name, buffer in self.model.named_buffers() if name in self.model.state_dict()]
        inner = {name: p.detach() for name, p in (*self.model.named_parameters(), *kept)}
        self.named = CheckpointNames(self.model).rename(inner)  # views of the same memory, where they are trained
        tensors = load_file(folder / "model.safetensors")
        num_layers = self.model.config.num_hidden_layers - (len([n for n in tensors if n.endswith("eh_proj.weight")]))
        layers = self.model.model.layers
        self.model.model.layers, further = layers[:num_layers], layers[num_layers:]
        self.model.config.num_hidden_layers = num_layers
        self.further: list[tuple[Any, dict[str, nn.Parameter]]] = []
        self.around: dict[str, nn.Parameter] = {}
        for number, layer in enumerate(further, num_layers):
            prefix = f"model.layers.{number}."
            around = {part: nn.Parameter(tensors[f"{prefix}{part}.weight"]) for part in AROUND}
            self.around |= {f"{prefix}{part}.weight": parameter for part, parameter in around.items()}
            self.further.append((layer, around))

    @property
    def of_further(self) -> list[nn.Parameter]:
        return [*self.around.values(), *(p for layer, _ in self.further for p in layer.parameters())]

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model.model(tokens[None, :-1], use_cache=False).last_hidden_state
        return hidden

    def further_logits(self, hidden: torch.Tensor, tokens: torch.Tensor, *, is_apart: bool) -> list[torch.Tensor]:
        """By distance ``[T, V]``, from ``T`` inputs less those after which too few tokens are left."""
        inputs, table, head = tokens[:-1], self.model.model.embed_tokens.weight, self.model.lm_head.weight
        if is_apart:
            hidden, table, head = hidden.detach(), table.detach(), head.detach()
        found: list[torch.Tensor] = []
        for distance, (layer, around) in enumerate(self.further, 1):
            count = len(inputs) - distance
            if count <= 0:
                break
            made = nn.functional.embedding(inputs[distance:], table)[None]
            joined = torch.cat(
                [self.normed(made, around["enorm"]), self.normed(hidden[:, :count], around["hnorm"])], -1
            )
            positions = torch.arange(count)[None]
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            out = layer(
                nn.functional.linear(joined, around["eh_proj"]),
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=self.model.model.rotary_emb(joined, positions),
            )
            hidden = self.normed(out if isinstance(out, torch.Tensor) else out[0], around["shared_head.norm"])
            found.append(nn.functional.linear(hidden[0], head))
        return found

    def normed(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(values, values.shape[-1:], weight, self.model.config.rms_norm_eps)


@cache
def by_a_plain_loop(folder: Path, options: MtpOptions) -> tuple[list[tuple[float, ...]], dict[str, Any]]:
    """As of ``mtp_cases:trained``."""
    plain, is_apart = Plain(folder), not options.trains_trunk
    policy, further = list(plain.model.parameters()), plain.of_further
    both = [*policy, *further]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in both if p.dim() > 1], "weight_decay": plan.WEIGHT_DECAY},
            {"params": [p for p in both if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=plan.LEARNING_RATE, betas=plan.BETAS, eps=plan.EPSILON,
    )  # fmt: skip
    figures: list[tuple[float, ...]] = []
    for step in range(plan.NUM_STEPS):
        adam.zero_grad()
        batches = plan.micro_batches(step, plain.model.config.vocab_size)
        sequences = [sequence for batch in batches for sequence in batch]
        distances = range(1, len(plain.further) + 1)
        counts = [sum(int((s.trained > distance).sum()) for s in sequences) for distance in distances]
        total, mtp_total = 0.0, 0.0
        for sequence in sequences:
            tokens, trained = torch.from_numpy(sequence.tokens).long(), torch.from_numpy(sequence.trained)
            hidden = plain.hidden(tokens)
            logprobs = (plain.model.lm_head(hidden)[0, trained - 1] / plan.TEMPERATURE).log_softmax(-1)
            entropy = -(logprobs.exp() * logprobs).sum()
            chosen = logprobs.gather(1, tokens[trained, None]).sum()
            loss = -(chosen + plan.ENTROPY_COEF * entropy) / plan.num_trained(batches)
            total += float(loss.detach())
            mtp = torch.zeros(())
            for distance, logits in enumerate(plain.further_logits(hidden, tokens, is_apart=is_apart), 1):
                far = trained[trained > distance]
                said = logits.log_softmax(-1)[far - 1 - distance].gather(1, tokens[far, None])
                mtp = mtp - said.sum() / counts[distance - 1] / len(counts)
            mtp_total += float(mtp.detach())
            (loss + options.loss_coef * mtp).backward()
        norm = float(nn.utils.clip_grad_norm_(policy if is_apart else both, plan.MAX_GRAD_NORM))
        mtp_norm = float(nn.utils.clip_grad_norm_(further, plan.MAX_GRAD_NORM)) if is_apart else float("nan")
        assert norm > plan.MAX_GRAD_NORM, "clipping is active"
        adam.step()
        figures.append((total, norm, mtp_total, mtp_norm))
    weights = {**plain.named, **plain.around}
    return figures, {name: tensor.detach().numpy() for name, tensor in weights.items()}
