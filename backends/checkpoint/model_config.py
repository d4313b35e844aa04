"""What a model folder says about its model: architecture, sizes, rotary embedding, end tokens.

Invariants:

* A field that changes what the model computes is either understood here or refused by name; nothing is guessed.
* Only ``config.json``, ``generation_config.json`` and ``tokenizer_config.json`` are read, never a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec
from tokenizers import Tokenizer

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES: Final = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
DEFAULT_ROPE_THETA: Final = 10_000.0
QWEN3_HEAD_DIM: Final = 128
EXPERT_SIZE_STEP: Final = 8
"""The grouped matrix product takes rows of a multiple of 16 bytes; so it does with every dtype."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


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

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None: the layer has one MLP for all tokens."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None


class _RawRope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


class _RawConfig(msgspec.Struct, kw_only=True):
    architectures: list[str] | None = None
    model_type: str = ""
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool | None = None
    rope_theta: float | None = None
    rope_scaling: _RawRope | None = None
    rope_parameters: _RawRope | None = None
    eos_token_id: int | list[int] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    """What transformers 5 calls ``num_experts`` when it writes."""
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


class _RawGeneration(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _AddedToken(msgspec.Struct):
    content: str


class _RawTokenizerConfig(msgspec.Struct):
    eos_token: str | _AddedToken | None = None


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration of the model in ``folder``.

    Raises:
        UserFault: no such folder, no ``config.json``, or a model that this engine does not compute.
    """
    if not folder.is_dir():
        raise UserFault(f"model folder {folder} does not exist; give a folder written by save_pretrained")
    path = folder / "config.json"
    raw = _decode(path, _RawConfig)
    if raw is None:
        raise UserFault(f"{folder} has no config.json; give a folder written by save_pretrained")
    family = _family(path, raw)
    _refuse_unsupported(path, raw)
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise UserFault(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads,"
            f" got {raw.num_attention_heads} and {num_kv_heads}"
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
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=raw.intermediate_size,
        rms_eps=raw.rms_norm_eps,
        rope_theta=_rope_theta(raw),
        rope_divisor=divisor,
        llama3_scaling=llama3,
        max_positions=raw.max_position_embeddings,
        tied_head=raw.tie_word_embeddings,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=family == "qwen2" or raw.attention_bias,
        output_bias=family != "qwen2" and raw.attention_bias,
        mlp_bias=family == "llama" and raw.mlp_bias,
        experts=_experts(path, raw) if family == "qwen3_moe" else None,
    )


def read_end_token_ids(folder: Path) -> frozenset[int]:
    """Token ids that end a response: those that ``generate`` would stop at, and the tokenizer's own.

    Raises:
        UserFault: one of the files is malformed, or the tokenizer does not know its end token.
    """
    config = _decode(folder / "config.json", _RawConfig)
    generation = _decode(folder / "generation_config.json", _RawGeneration)
    named = generation.eos_token_id if generation is not None else None
    if named is None and config is not None:
        named = config.eos_token_id
    ids = set[int]() if named is None else {named} if isinstance(named, int) else set(named)
    tokenizer_config = _decode(folder / "tokenizer_config.json", _RawTokenizerConfig)
    token = tokenizer_config.eos_token if tokenizer_config is not None else None
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
    if not path.is_file():
        raise UserFault(f"{folder} has no tokenizer.json; save the tokenizer beside the model")
    return Tokenizer.from_file(str(path))


def _family(path: Path, raw: _RawConfig) -> str:
    for name in raw.architectures or ():
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not raw.architectures and raw.model_type in ARCHITECTURES.values():
        return raw.model_type
    found = ", ".join(raw.architectures or ()) or raw.model_type or "none"
    raise UserFault(
        f"{path}: the torch engine serves {', '.join(ARCHITECTURES)}, found {found}; use an engine that supports it"
    )


def _refuse_unsupported(path: Path, raw: _RawConfig) -> None:
    if raw.hidden_act != "silu":
        raise UserFault(f"{path}: hidden_act must be silu, found {raw.hidden_act}")
    if raw.use_sliding_window:
        raise UserFault(f"{path}: sliding-window attention is not supported; set use_sliding_window to false")
    for rope in (raw.rope_parameters, raw.rope_scaling):
        if rope is not None and rope.partial_rotary_factor not in (None, 1.0):
            raise UserFault(f"{path}: partial_rotary_factor must be 1, found {rope.partial_rotary_factor}")


def _experts(path: Path, raw: _RawConfig) -> ExpertsConfig | None:
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
    dense = raw.mlp_only_layers or []
    step = raw.decoder_sparse_step
    layers = frozenset(range(step - 1, raw.num_hidden_layers, step)).difference(dense)
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


def _rope_theta(raw: _RawConfig) -> float:
    if raw.rope_parameters is not None and raw.rope_parameters.rope_theta is not None:
        return raw.rope_parameters.rope_theta
    return DEFAULT_ROPE_THETA if raw.rope_theta is None else raw.rope_theta


def _rope_scaling(path: Path, raw: _RawConfig) -> tuple[float, Llama3Scaling | None]:
    rope = raw.rope_parameters or raw.rope_scaling
    kind = "default" if rope is None else (rope.rope_type or rope.type or "default")
    if rope is None or kind == "default":
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
    raise UserFault(f"{path}: rope type must be default, linear (with a factor) or llama3, found {kind}")


def _decode(path: Path, kind: type[StructT]) -> StructT | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise UserFault(f"{path}: not the JSON that belongs there: {error}; copy it anew from its model") from error
