"""The learner with a mixture of experts: the names under which weights leave it, and an engine that takes them."""

# Transformers and safetensors are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine_cases import make_case, random_tokens
from learner_cases import RunningLearner, open_learner, train_command
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.messages.arrays import floats_view, tokens_view
from penstock.messages.commands import OpenLearner, PublishWeights, SaveCheckpoint
from penstock.messages.local import BatchTrained, CheckpointWritten, LearnerOpened, WeightsPublished

if TYPE_CHECKING:
    from collections.abc import Generator

AutoModel: Any = AutoModelForCausalLM  # transformers' factories have no types
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
EXPERTS: dict[str, Any] = {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3 with a tied head": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen3 with experts": Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1]),
    "qwen3 with experts and a tied head": Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}


@pytest.fixture(params=list(ARCHITECTURES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    AutoModel.from_config(ARCHITECTURES[str(request.param)]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_weights_leave_under_the_names_of_the_checkpoint(folder: Path) -> None:
    in_file = load_file(folder / "model.safetensors")
    model = PackedModel.load(folder, dtype="float32", device=CPU)
    exported = model.named_tensors()
    assert exported.keys() == in_file.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in in_file.items())
    model.save(folder.parent / "again")
    assert load_file(folder.parent / "again" / "model.safetensors").keys() == in_file.keys()


def test_experts_are_exported_without_a_copy(tmp_path: Path) -> None:
    AutoModel.from_config(ARCHITECTURES["qwen3 with experts"]).save_pretrained(tmp_path)
    model = PackedModel.load(tmp_path, dtype="float32", device=CPU)
    exported = model.named_tensors()
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.fill_(2.0)
    assert all(bool((tensor == 2.0).all()) for tensor in exported.values())


def test_a_checkpoint_in_bfloat16_is_taken(tmp_path: Path) -> None:
    AutoModel.from_config(ARCHITECTURES["qwen3 with experts"]).save_pretrained(tmp_path)
    model = PackedModel.load(tmp_path, dtype="bfloat16", device=CPU)
    assert {tensor.dtype for tensor in model.named_tensors().values()} == {torch.bfloat16}


@pytest.fixture
def learner(tmp_path: Path) -> Generator[RunningLearner]:
    case = make_case("qwen3_moe", tmp_path / "model")
    running = open_learner(case.folder, tmp_path / "checkpoints", LearnerOptions(learning_rate=1e-2))
    yield running
    running.close()


def test_an_engine_serves_what_a_trained_mixture_of_experts_publishes(learner: RunningLearner, tmp_path: Path) -> None:
    engine = TorchEngine(read_model_config(tmp_path / "model"), EngineSettings(num_slots=2))
    learner.ask(OpenLearner(), LearnerOpened)
    tokens = random_tokens(40, seed=1)
    scores: list[torch.Tensor] = []
    for version in (0, 1):
        if version:
            learner.ask(train_command(version), BatchTrained)
        learner.ask(PublishWeights(version=version, publish=version), WeightsPublished)
        engine.load(learner.weights.published[version], version)
        canary = learner.weights.canaries[version]
        own = torch.tensor(list(floats_view(canary.logprobs)))
        torch.testing.assert_close(engine.probe(tokens_view(canary.tokens)).flatten(), own, atol=1e-5, rtol=0)
        scores.append(engine.score(tokens))
    assert (scores[0] - scores[1]).abs().max() > 1e-3


def test_a_checkpoint_of_a_trained_mixture_of_experts_is_what_was_published(learner: RunningLearner) -> None:
    learner.ask(OpenLearner(), LearnerOpened)
    learner.ask(train_command(), BatchTrained)
    learner.ask(PublishWeights(version=1, publish=0), WeightsPublished)
    path = Path(learner.ask(SaveCheckpoint(version=1), CheckpointWritten).path)
    published = learner.weights.published[0]
    with CheckpointTensors(path) as tensors:
        assert tensors.keys() == published.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in published.items())
    assert "Qwen3MoeForCausalLM" in json.loads((path / "config.json").read_text())["architectures"]


def test_a_mixture_of_experts_goes_on_from_its_checkpoint_bit_for_bit(learner: RunningLearner, tmp_path: Path) -> None:
    learner.ask(OpenLearner(), LearnerOpened)
    learner.ask(train_command(1), BatchTrained)
    path = learner.ask(SaveCheckpoint(version=1), CheckpointWritten).path
    learner.ask(train_command(2), BatchTrained)
    learner.ask(PublishWeights(version=2, publish=0), WeightsPublished)
    options = LearnerOptions(learning_rate=1e-2)
    resumed = open_learner(tmp_path / "model", tmp_path / "checkpoints", options, epoch=2)
    resumed.ask(OpenLearner(version=1, path=path), LearnerOpened)
    resumed.ask(train_command(2), BatchTrained)
    resumed.ask(PublishWeights(version=2, publish=0), WeightsPublished)
    straight, again = learner.weights.published[0], resumed.weights.published[0]
    resumed.close()
    assert straight.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in straight.items())
