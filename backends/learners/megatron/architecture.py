"""What a Hugging Face ``config.json`` says about a model, in the terms that megatron-core builds it from.

Invariants:

* A model is of a family in :mod:`.families`, or it is refused. What a family's checkpoints can say and megatron-core
  would compute otherwise is refused as well, never ignored.
* Nothing here imports torch, transformers or megatron-core, so a layout can be checked before anything is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.backends.learners.megatron.families import FAMILIES, Family

if TYPE_CHECKING:
    from pathlib import Path


class ArchitectureError(ValueError):
    """A model that is not among those that the learner can build."""


class RopeParameters(msgspec.Struct, frozen=True):
    """``rope_parameters`` of transformers 5, ``rope_scaling`` before."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


class HfConfig(msgspec.Struct, frozen=True):
    """The keys of ``config.json`` that are read; the others do not change what is computed."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    rope_theta: float | None = None
    rope_parameters: RopeParameters | None = None
    rope_scaling: RopeParameters | None = None
    partial_rotary_factor: float | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    """Another name of the same; which one is written depends on the version of transformers."""
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How positions turn queries and keys."""

    theta: float
    fraction: float = 1.0
    """Of a head's channels that are turned."""
    is_interleaved: bool = False
    """Whether neighbouring channels are turned together, and not those half a head apart."""
    kind: Literal["default", "llama3"] = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts of a layer."""

    count: int
    per_token: int
    ffn_size: int
    """Of one expert."""
    layers: tuple[bool, ...]
    """Whether each layer of the model has experts."""
    renormalizes: bool
    """Whether the weights of a token's chosen experts add up to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A causal model, whole."""

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Of a layer without experts."""
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    has_tied_embeddings: bool
    has_qkv_bias: bool
    rope: Rope
    experts: Experts | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts."""
        return self.experts is not None and self.experts.layers[layer]


def read_architecture(folder: Path) -> Architecture:
    """Read ``config.json`` of a checkpoint.

    Raises:
        ArchitectureError: there is none, or the model cannot be built.
    """
    file = folder / "config.json"
    try:
        text = file.read_bytes()
    except OSError as error:
        problem = f"{file} cannot be read ({error.strerror}); expected a Hugging Face checkpoint"
        raise ArchitectureError(problem) from None
    return decode_architecture(text, str(file))


def decode_architecture(text: bytes, origin: str) -> Architecture:
    """Read the text of a ``config.json``.

    Args:
        text: JSON.
        origin: where it is from, for errors.

    Raises:
        ArchitectureError: the model cannot be built.
    """
    try:
        kind = msgspec.json.decode(text, type=_Kind).model_type
        family = FAMILIES.get(kind)
        if family is None:
            raise ArchitectureError(
                f"{origin}: the Megatron learner has no family for model_type '{kind}'; there are "
                f"{', '.join(FAMILIES)}. Use learner.backend: torch, which takes any causal model of transformers"
            )
        config = msgspec.json.decode(text, type=HfConfig)
    except msgspec.DecodeError as error:
        raise ArchitectureError(f"{origin}: {error}") from None
    if problem := _unsupported(config, family):
        raise ArchitectureError(f"{origin}: {problem}; the Megatron learner would compute something else")
    head_dim = config.head_dim or family.head_dim or config.hidden_size // config.num_attention_heads
    return Architecture(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_epsilon=config.rms_norm_eps,
        has_tied_embeddings=config.tie_word_embeddings,
        has_qkv_bias=family.qkv_bias == "always" or (family.qkv_bias == "as said" and config.attention_bias),
        rope=_rope(config, family),
        experts=_experts(config, family, origin),
    )


class _Kind(msgspec.Struct, frozen=True):
    model_type: str


ROPE_KINDS: Final[dict[str, Literal["default", "llama3"]]] = {
    "default": "default",
    "llama3": "llama3",
}


def _unsupported(config: HfConfig, family: Family) -> str | None:
    """What the config asks for that would be computed otherwise."""
    if config.hidden_act != "silu":
        return f"hidden_act is '{config.hidden_act}', expected 'silu'"
    if config.mlp_bias:
        return "mlp_bias is true, expected false"
    if config.use_sliding_window:
        return "use_sliding_window is true, expected false"
    if config.attention_bias and family.qkv_bias == "never":
        return "attention_bias is true, expected false"
    kind = _rope_kind(config)
    if kind not in family.rope_kinds:
        return f"rope_type is '{kind}', expected one of {', '.join(family.rope_kinds)}"
    return None


def _rope_parameters(config: HfConfig) -> RopeParameters:
    return config.rope_parameters or config.rope_scaling or RopeParameters()


def _rope_kind(config: HfConfig) -> str:
    parameters = _rope_parameters(config)
    return parameters.rope_type or parameters.type or "default"


def _rope(config: HfConfig, family: Family) -> Rope:
    given = _rope_parameters(config)
    fraction = given.partial_rotary_factor or config.partial_rotary_factor or family.rope_fraction
    return Rope(
        theta=given.rope_theta or config.rope_theta or 10000.0,
        fraction=fraction,
        is_interleaved=family.has_interleaved_rope,
        kind=ROPE_KINDS[_rope_kind(config)],
        factor=given.factor,
        low_frequency_factor=given.low_freq_factor,
        high_frequency_factor=given.high_freq_factor,
        original_positions=given.original_max_position_embeddings or config.max_position_embeddings,
    )


def _experts(config: HfConfig, family: Family, origin: str) -> Experts | None:
    if not family.has_experts:
        return None
    count = config.num_experts or config.num_local_experts
    per_token, ffn_size = config.num_experts_per_tok, config.moe_intermediate_size
    if not (count and per_token and ffn_size):
        raise ArchitectureError(
            f"{origin}: a model of {config.model_type} needs its number of experts, num_experts_per_tok and "
            "moe_intermediate_size, and not all of them are there"
        )
    layers = tuple(
        layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    )
    return Experts(
        count=count,
        per_token=per_token,
        ffn_size=ffn_size,
        layers=layers,
        renormalizes=config.norm_topk_prob,
    )
