"""Tiny random checkpoints that transformers wrote, and what transformers computes with them."""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack, cast

import msgspec
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.backends.checkpoint.checkpoint_names import CheckpointNames
from penstock.backends.checkpoint.make import END_ID, SYMBOLS, character_tokenizer
from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.requests import Advanced, Ended, GenerationRequest
from penstock.messages.arrays import floats_view, pack_floats, pack_tokens, tokens_view
from penstock.messages.samples import Part, VersionSpan
from penstock.messages.weights import Canary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from transformers import PreTrainedModel

    from penstock.backends.engines.torch.engine_settings import OtherSampling
    from penstock.backends.engines.torch.sampling import Sampler
    from penstock.backends.engines.torch.stopping import StopStrings


VOCAB_SIZE = len(SYMBOLS)
CONTEXT = 1536
EXTRA: dict[str, Any] = {"head_dim": 16}
"""Qwen3-MoE's configuration takes this and does not declare it."""

torch.set_num_threads(1)


def _qwen3_tied() -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
            eos_token_id=END_ID,
        )
    )  # fmt: skip


def _qwen3_untied() -> PreTrainedModel:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE, hidden_size=40, intermediate_size=80, num_hidden_layers=3, num_attention_heads=3,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
            attention_bias=True, eos_token_id=END_ID,
        )
    )  # fmt: skip


def _llama_untied() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=CONTEXT, tie_word_embeddings=False, attention_bias=True,
            mlp_bias=True, eos_token_id=END_ID,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        )
    )  # fmt: skip


def _llama_tied() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=True, eos_token_id=END_ID,
            rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        )
    )  # fmt: skip


def _qwen2_tied() -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1, max_position_embeddings=CONTEXT, tie_word_embeddings=True, eos_token_id=END_ID,
        )
    )  # fmt: skip


def _qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, **EXTRA, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
            eos_token_id=END_ID, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
            mlp_only_layers=[1],
        )
    )  # fmt: skip


def _qwen3_moe_shares() -> PreTrainedModel:
    """The weights of a token's experts are their shares among all; the first layer is dense; many experts."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE, hidden_size=40, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1, **EXTRA, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
            eos_token_id=END_ID, attention_bias=True, moe_intermediate_size=16, num_experts=32, num_experts_per_tok=4,
            norm_topk_prob=False, decoder_sparse_step=2,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_tied": _qwen3_tied,
    "qwen3_untied": _qwen3_untied,
    "llama_untied": _llama_untied,
    "llama_tied": _llama_tied,
    "qwen2_tied": _qwen2_tied,
    "qwen3_moe": _qwen3_moe,
    "qwen3_moe_shares": _qwen3_moe_shares,
}


class Case(NamedTuple):
    """A checkpoint folder and the model that wrote it."""

    folder: Path
    model: PreTrainedModel


def make_case(name: str, folder: Path, *, seed: int = 0, max_shard_size: str = "1GB") -> Case:
    """A model with weights that are all random, gains and biases too (their usual start hides mistakes)."""
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = MODELS[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    character_tokenizer().save(str(folder / "tokenizer.json"))
    return Case(folder, model)


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's parameters by their names in a checkpoint, copied."""
    named = CheckpointNames(model).rename(model.state_dict())
    return {name: tensor.detach().clone() for name, tensor in named.items()}


class Settings(TypedDict, total=False):
    """The fields of ``EngineSettings``."""

    num_slots: int
    max_context: int
    dtype: torch.dtype
    device: torch.device
    sampler: Sampler
    stop_token_ids: frozenset[int]
    stop_strings: StopStrings | None
    others: tuple[OtherSampling, ...]
    progress_tokens: int | None
    records_experts: bool


def open_engine(case: Case, *, version: int = 0, **settings: Unpack[Settings]) -> TorchEngine:
    """An engine with the weights of the case's folder."""
    engine = TorchEngine(read_model_config(case.folder), replace(EngineSettings(num_slots=4), **settings))
    with CheckpointTensors(case.folder) as tensors:
        engine.load(tensors, version)
    return engine


def reference_logprobs(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Float32 ``[T − 1]``: what transformers' forward pass gives each token but the first."""
    return _reference_rows(model, tokens, temperature).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def reference_canary(model: PreTrainedModel, tokens: list[int]) -> Canary:
    """As a learner would publish it."""
    logprobs = _reference_rows(model, tokens, 1.0)[:, tokens]
    return Canary(tokens=pack_tokens(tokens), logprobs=pack_floats(as_list(logprobs.flatten())))


def _reference_rows(model: PreTrainedModel, tokens: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = cast("torch.Tensor", model(torch.tensor([tokens])).logits)[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1)


def greedy_reference(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What ``generate`` takes as the likeliest tokens, up to the end token."""
    generate = cast("Callable[..., torch.Tensor]", model.generate)
    ids = generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=END_ID,
        pad_token_id=0,
    )
    return cast("list[int]", ids[0, len(prompt) :].tolist())


def part_of(model: PreTrainedModel, prompt: list[int], tokens: list[int], version: int = 0) -> Part:
    """A response that transformers has scored."""
    logprobs = as_list(reference_logprobs(model, prompt + tokens)[len(prompt) - 1 :])
    spans = (VersionSpan(version, len(tokens)),)
    return Part(tokens=pack_tokens(tokens), logprobs=pack_floats(logprobs), spans=spans)


def expected_logprobs(case: Case, context: list[int], tokens: list[int]) -> list[float]:
    """What transformers gives each of ``tokens`` after ``context``, except one that nothing stands before."""
    return as_list(reference_logprobs(case.model, context + tokens)[max(0, len(context) - 1) :])


def as_list(tensor: torch.Tensor) -> list[float]:
    """The numbers of a tensor ``[T]``."""
    return cast("list[float]", tensor.tolist())


def request(tag: int, prompt: list[int], max_new_tokens: int, seed: int | None = None) -> GenerationRequest:
    """A request whose seed is its tag unless given."""
    return GenerationRequest(
        tag=tag, prompt=pack_tokens(prompt), seed=tag if seed is None else seed, max_new_tokens=max_new_tokens
    )


def run_all(engine: TorchEngine, requests: Iterable[GenerationRequest]) -> dict[int, Ended]:
    """Submit all and step until all have ended."""
    ended = [early for wanted in requests if (early := engine.submit(wanted)) is not None]
    while engine.num_running or engine.num_queued:
        ended += engine.step().ended
    return {cast("int", end.tag): end for end in ended}


def run_steps(engine: TorchEngine, num_steps: int) -> tuple[list[Ended], list[Advanced]]:
    """So many steps, and what they brought about."""
    ended: list[Ended] = []
    advanced: list[Advanced] = []
    for _ in range(num_steps):
        tick = engine.step()
        ended += tick.ended
        advanced += tick.advanced
    return ended, advanced


def tokens_of(part: Part) -> list[int]:
    """Token ids of a part."""
    return tokens_view(part.tokens).tolist()


def logprobs_of(part: Part) -> torch.Tensor:
    """Float32 ``[T]`` log-probs of a part."""
    return torch.tensor(floats_view(part.logprobs).tolist())


def largest_error(case: Case, prompt: list[int], part: Part, temperature: float = 1.0) -> float:
    """Largest difference between the part's log-probs and those of transformers."""
    expected = reference_logprobs(case.model, prompt + tokens_of(part), temperature)[len(prompt) - 1 :]
    return float((expected - logprobs_of(part)).abs().max())


def drawn(end: Ended) -> Ended:
    """Without what the engine counted: how much it read from its cache depends on who else was there."""
    return replace(end, part=msgspec.structs.replace(end.part, counts=None))


def random_tokens(count: int, seed: int) -> list[int]:
    """Ids of ordinary symbols."""
    generator = torch.Generator().manual_seed(seed)
    return cast("list[int]", torch.randint(2, VOCAB_SIZE, (count,), generator=generator).tolist())
