"""What a model folder says about its model: architecture, sizes, rotary embedding, end tokens.

Invariants:

* A field that changes what the model computes is either understood here or refused by name; nothing is guessed.
* Only ``config.json``, ``generation_config.json`` and ``tokenizer_config.json`` are read, never a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from tokenizers import Tokenizer

from penstock.backends.checkpoint.hf_config import (
    CONFIG_FILE,
    GENERATION_FILE,
    SIZES,
    UNQUANTIZED,
    DecoderConfig,
    HfConfig,
    find_config,
    find_tokenizer_config,
    need,
    read_config,
)
from penstock.backends.checkpoint.tokenizer_files import CONVERT, has_tiktoken_only
from penstock.backends.checkpoint.vision_config import SEEING_FAMILY, VisionPart, read_vision_part
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2_5_VLForConditionalGeneration": SEEING_FAMILY,
}
QWEN2_LIKE: Final = ("qwen2", SEEING_FAMILY)
DEFAULT_MAX_POSITIONS: Final = 2048
QWEN3_HEAD_DIM: Final = 128
EXPERT_SIZE_STEP: Final = 8
"""The grouped matrix product takes rows of a multiple of 16 bytes; so it does with every dtype."""


class OtherArchitectureFault(UserFault):
    """A model that is sound, for all that ``config.json`` says, and that this forward pass does not compute."""


class Llama3Scaling(NamedTuple):
    """Llama 3's stretching of the rotary embedding: low frequencies are divided by ``factor``, high ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The MLPs of a mixture of experts."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalized: bool
    """Whether the weights of a token's experts add up to 1; otherwise they are their shares among all experts."""
    layers: frozenset[int]
    """Layers that have experts; the others have one MLP of the model's own intermediate size."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the forward pass depends on besides the weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    rope_divisor: float = 1.0
    """Positions are divided by this (``linear`` scaling)."""
    llama3_scaling: Llama3Scaling | None = None
    max_positions: int
    """Longest context that the model was made for, in tokens."""
    tied_head: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    experts: ExpertsConfig | None = None
    vision: VisionPart | None = None
    """None: it takes text only."""

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None: the layer has one MLP for all tokens."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration of the model in ``folder``.

    Raises:
        OtherArchitectureFault: a model that this forward pass does not compute.
        UserFault: no such folder, no ``config.json``, or one that is malformed.
    """
    path = folder / CONFIG_FILE
    raw = read_config(folder, DecoderConfig)
    need(raw, str(path), *SIZES)
    family = _family(path, raw)
    _refuse_unsupported(path, raw)
    if raw.num_attention_heads % raw.num_kv_heads:
        raise UserFault(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads,"
            f" got {raw.num_attention_heads} and {raw.num_kv_heads}"
        )
    default_head_dim = QWEN3_HEAD_DIM if family == "qwen3" else raw.hidden_size // raw.num_attention_heads
    head_dim = raw.head_dim or default_head_dim
    if head_dim % 2:
        raise UserFault(f"{path}: head_dim must be even for rotary embeddings, got {head_dim}")
    divisor, llama3 = _rope_scaling(path, raw)
    return ModelConfig(
        architecture=family,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_kv_heads,
        head_dim=head_dim,
        intermediate_size=raw.intermediate_size,
        rms_eps=raw.rms_norm_eps,
        rope_theta=raw.rope_base,
        rope_divisor=divisor,
        llama3_scaling=llama3,
        max_positions=raw.max_position_embeddings or DEFAULT_MAX_POSITIONS,
        tied_head=raw.tie_word_embeddings,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family in QWEN2_LIKE or raw.attention_bias,
        output_bias=family not in QWEN2_LIKE and raw.attention_bias,
        mlp_bias=family == "llama" and raw.mlp_bias,
        experts=_experts(path, raw) if family == "qwen3_moe" else None,
        vision=read_vision_part(folder) if family == SEEING_FAMILY else None,
    )


def read_end_token_ids(folder: Path) -> frozenset[int]:
    """Token ids that end a response: those that ``generate`` would stop at, and the tokenizer's own.

    Raises:
        UserFault: one of the files is malformed, or the tokenizer does not know its end token.
    """
    generation = find_config(folder / GENERATION_FILE, HfConfig)
    ids = set(generation.eos_token_id if generation is not None else ())
    if not ids and (config := find_config(folder / CONFIG_FILE, HfConfig)) is not None:
        ids |= set(config.eos_token_id)
    token = find_tokenizer_config(folder).eos_token
    if token is not None and (folder / "tokenizer.json").is_file():
        text = token if isinstance(token, str) else token.content
        token_id = read_tokenizer(folder).token_to_id(text)
        if token_id is None:
            raise UserFault(f"{folder}: tokenizer.json does not know the eos_token {text!r} that it should have")
        ids.add(token_id)
    return frozenset(ids)


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the model folder.

    Raises:
        UserFault: there is no ``tokenizer.json``.
    """
    path = folder / "tokenizer.json"
    if has_tiktoken_only(folder):
        raise UserFault(f"{folder}: {CONVERT}")
    if not path.is_file():
        raise UserFault(f"{folder} has no tokenizer.json; save the tokenizer beside the model")
    return Tokenizer.from_file(str(path))


def _family(path: Path, raw: DecoderConfig) -> str:
    for name in raw.architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not raw.architectures and raw.model_type in ARCHITECTURES.values():
        return raw.model_type
    found = ", ".join(raw.architectures) or raw.model_type or "none"
    raise OtherArchitectureFault(
        f"{path}: the torch engine serves {', '.join(ARCHITECTURES)}, found {found}; use an engine that supports it"
    )


def _refuse_unsupported(path: Path, raw: DecoderConfig) -> None:
    if raw.quantization_config is not None:
        raise UserFault(f"{path}: its weights are quantized, {UNQUANTIZED}")
    if raw.hidden_act != "silu":
        raise OtherArchitectureFault(f"{path}: hidden_act must be silu, found {raw.hidden_act}")
    if raw.use_sliding_window:
        raise OtherArchitectureFault(
            f"{path}: sliding-window attention is not supported; set use_sliding_window to false"
        )
    for rope in (raw.rope_parameters, raw.rope_scaling):
        if rope is not None and rope.partial_rotary_factor not in (None, 1.0):
            raise OtherArchitectureFault(f"{path}: partial_rotary_factor must be 1, found {rope.partial_rotary_factor}")


def _experts(path: Path, raw: DecoderConfig) -> ExpertsConfig | None:
    num_experts, written = raw.num_experts, raw.num_local_experts
    if num_experts is not None and written is not None and num_experts != written:
        raise UserFault(f"{path}: num_experts is {num_experts} and num_local_experts {written}; keep one of them")
    num_experts = written if num_experts is None else num_experts
    per_token, size, normalized = raw.num_experts_per_tok, raw.moe_intermediate_size, raw.norm_topk_prob
    if num_experts is None or per_token is None or size is None or normalized is None:
        raise UserFault(
            f"{path}: a mixture of experts needs num_experts, num_experts_per_tok, moe_intermediate_size and"
            f" norm_topk_prob, found {num_experts}, {per_token}, {size} and {normalized}"
        )
    if raw.decoder_sparse_step < 1:
        raise UserFault(f"{path}: decoder_sparse_step must be at least 1, found {raw.decoder_sparse_step}")
    step = raw.decoder_sparse_step
    layers = frozenset(range(step - 1, raw.num_hidden_layers, step)).difference(raw.mlp_only_layers)
    if not layers or not num_experts:
        return None
    if not 1 <= per_token <= num_experts:
        raise UserFault(f"{path}: num_experts_per_tok must be 1 to num_experts, {num_experts}, found {per_token}")
    if size < 1 or size % EXPERT_SIZE_STEP or raw.hidden_size % EXPERT_SIZE_STEP:
        raise UserFault(
            f"{path}: with experts, hidden_size and moe_intermediate_size must be multiples of {EXPERT_SIZE_STEP},"
            f" found {raw.hidden_size} and {size}"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=per_token,
        intermediate_size=size,
        normalized=normalized,
        layers=layers,
    )


def _rope_scaling(path: Path, raw: DecoderConfig) -> tuple[float, Llama3Scaling | None]:
    rope, kind = raw.rope, raw.rope.kind
    if kind == "default" or (kind == "mrope" and rope.mrope_section is not None):
        return 1.0, None
    if kind == "linear" and rope.factor is not None:
        return rope.factor, None
    if kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        original = rope.original_max_position_embeddings
        if rope.factor is None or low is None or high is None or original is None:
            raise UserFault(
                f"{path}: rope type llama3 needs factor, low_freq_factor, high_freq_factor and"
                " original_max_position_embeddings"
            )
        return 1.0, Llama3Scaling(rope.factor, low, high, original)
    raise OtherArchitectureFault(f"{path}: rope type must be default, linear (with a factor) or llama3, found {kind}")
