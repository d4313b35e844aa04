"""What a Hugging Face ``config.json`` says about a model, in the terms that megatron-core builds it from.

Invariants:

* A model is of a family in :mod:`.families`, or it is refused. What a family's checkpoints can say and megatron-core
  would compute otherwise is refused as well (:mod:`.refusals`), never ignored.
* Nothing here imports torch, transformers or megatron-core, so a layout can be checked before anything is installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from penstock.backends.checkpoint.hf_config import (
    CONFIG_FILE,
    SIZES,
    DecoderConfig,
    RopeParameters,
    decode_config,
    need,
    read_config,
)
from penstock.backends.learners.megatron.bridge.families import FAMILIES, Family
from penstock.backends.learners.megatron.bridge.refusals import unsupported
from penstock.backends.learners.megatron.bridge.unbuilt import why_unbuilt
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path


class NoMtpLayersError(UserFault):
    """A model without layers that predict further tokens, where they are to be trained."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"learner.megatron.mtp: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How positions turn queries and keys."""

    theta: float
    fraction: float = 1.0
    """Share of a head's channels that are rotated."""
    is_interleaved: bool = False
    """Whether neighbouring channels are turned together, and not those half a head apart."""
    kind: Literal["default", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """What ``yarn`` multiplies turned queries and keys by."""
    mscale_all_dim: float = 0.0
    """Of which ``yarn`` makes what scores are multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Queries, keys and values that are made of short vectors, and positions that only a part of a head sees."""

    query_rank: int | None
    """None: queries are made of the hidden state itself."""
    kv_rank: int
    plain_dim: int
    """Channels of a head that know no position."""
    rope_dim: int
    """Those that do; keys of all heads have the same."""
    value_dim: int
    norm_epsilon: float
    """Epsilon of the norms of the compressed vectors."""

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.plain_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts of a layer."""

    count: int
    per_token: int
    ffn_size: int
    """Feed-forward size of one expert."""
    layers: tuple[bool, ...]
    """Whether each layer of the model has experts."""
    renormalizes: bool
    """Whether the weights of a token's chosen experts add up to one, before they are scaled."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    has_choice_bias: bool = False
    """Whether experts are chosen by their scores with a bias added, which is in no weight."""
    num_groups: int | None = None
    """Groups of experts, of which a token's lie in ``groups_per_token``; None: they may be any."""
    groups_per_token: int | None = None
    weight_scale: float | None = None
    shared_ffn_size: int = 0
    """Of what every token goes through besides."""


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
    """Feed-forward size of a layer without experts."""
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    rope: Rope
    experts: Experts | None = None
    latent: LatentAttention | None = None
    num_published_mtp_layers: int = field(default=0, compare=False)
    """Layers that the checkpoint has beyond these, to predict further tokens; two configs that differ in nothing else
    are of one model."""
    num_mtp_layers: int = 0
    """Those that are built: all of them, or none."""

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts. Layers beyond the model's are like its last ones."""
        return self.experts is not None and (layer >= self.num_layers or self.experts.layers[layer])

    def with_mtp(self) -> Architecture:
        """The same model with all layers that predict further tokens.

        Raises:
            NoMtpLayersError: it has none, or none that can be built.
        """
        if problem := _why_no_mtp(self):
            raise NoMtpLayersError(f"{problem}; remove the key")
        return replace(self, num_mtp_layers=self.num_published_mtp_layers)


def _why_no_mtp(architecture: Architecture) -> str | None:
    name = architecture.family.model_type
    if not architecture.family.has_mtp:
        return f"models of {name} have no layers that predict further tokens, or none that the Megatron learner knows"
    if not architecture.num_published_mtp_layers:
        return "the model's config.json has no layers that predict further tokens (num_nextn_predict_layers is 0)"
    if architecture.has_tied_embeddings:
        return "such layers are not built for a model whose output head is its embedding"
    return None


def read_architecture(folder: Path) -> Architecture:
    """Read ``config.json`` of a checkpoint.

    Raises:
        UserFault: there is none, or the model cannot be built.
    """
    return architecture_of(read_config(folder, DecoderConfig), str(folder / CONFIG_FILE))


def decode_architecture(text: bytes, origin: str) -> Architecture:
    """Read the text of a ``config.json``.

    Args:
        text: JSON.
        origin: where it is from, for errors.

    Raises:
        UserFault: the model cannot be built.
    """
    return architecture_of(decode_config(text, origin, DecoderConfig), origin)


def architecture_of(config: DecoderConfig, origin: str) -> Architecture:
    """What a ``config.json`` says, in the terms of megatron-core; ``origin`` is where it is from, for errors.

    Raises:
        UserFault: the model cannot be built.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserFault(f"{origin}: {why_unbuilt(config.model_type, ', '.join(FAMILIES))}")
    need(config, origin, *SIZES)
    if problem := unsupported(config, family):
        raise UserFault(f"{origin}: {problem}; the Megatron learner would compute something else")
    latent = _latent(config, family, origin)
    plain_head_dim = config.head_dim or family.head_dim or config.hidden_size // config.num_attention_heads
    return Architecture(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=latent.head_dim if latent else plain_head_dim,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings or DEFAULT_MAX_POSITIONS,
        norm_epsilon=config.rms_norm_eps,
        has_tied_embeddings=config.tie_word_embeddings,
        has_qkv_bias=family.qkv_bias == "always" or (family.qkv_bias == "as said" and config.attention_bias),
        has_qk_norm=family.qk_norm == "always" or (family.qk_norm == "as said" and config.use_qk_norm),
        rope=_rope(config, family),
        experts=_experts(config, family, origin),
        latent=latent,
        num_published_mtp_layers=config.num_nextn_predict_layers or 0,
    )


DEFAULT_MAX_POSITIONS: Final = 32768
ROPE_KINDS: Final[dict[str, Literal["default", "llama3", "yarn"]]] = {
    "default": "default",
    "llama3": "llama3",
    "yarn": "yarn",
}


def _rope(config: DecoderConfig, family: Family) -> Rope:
    given = config.rope
    fraction = given.partial_rotary_factor or config.partial_rotary_factor or family.rope_fraction
    positions = config.max_position_embeddings or DEFAULT_MAX_POSITIONS
    original = given.original_max_position_embeddings or positions
    kind = ROPE_KINDS[given.kind]
    factor = given.factor or (positions / original if kind == "yarn" else 1.0)
    return Rope(
        theta=config.rope_base,
        fraction=fraction,
        is_interleaved=family.has_interleaved_rope,
        kind=kind,
        factor=factor,
        low_frequency_factor=1.0 if given.low_freq_factor is None else given.low_freq_factor,
        high_frequency_factor=4.0 if given.high_freq_factor is None else given.high_freq_factor,
        original_positions=original,
        beta_fast=given.beta_fast or 32.0,
        beta_slow=given.beta_slow or 1.0,
        attention_factor=_attention_factor(given, factor) if kind == "yarn" else 1.0,
        mscale_all_dim=given.mscale_all_dim or 0.0,
    )


def _attention_factor(given: RopeParameters, factor: float) -> float:
    if given.attention_factor is not None:
        return given.attention_factor
    if given.mscale and given.mscale_all_dim:
        return yarn_mscale(factor, given.mscale) / yarn_mscale(factor, given.mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much sharper attention has to be in a context that is ``factor`` times as long (arXiv:2309.00071, §3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _latent(config: DecoderConfig, family: Family, origin: str) -> LatentAttention | None:
    if not family.has_latent_attention:
        return None
    rank, plain, turned, value = (
        config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
    )  # fmt: skip
    if not (rank and plain and turned and value):
        raise UserFault(
            f"{origin}: a model of {config.model_type} needs kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and "
            "v_head_dim, and not all of them are there"
        )
    return LatentAttention(
        query_rank=config.q_lora_rank,
        kv_rank=rank,
        plain_dim=plain,
        rope_dim=turned,
        value_dim=value,
        norm_epsilon=family.latent_norm_epsilon,
    )


def _experts(config: DecoderConfig, family: Family, origin: str) -> Experts | None:
    if not family.has_experts:
        return None
    count, per_token, ffn_size = config.expert_count, config.num_experts_per_tok, config.moe_intermediate_size
    if not (count and per_token and ffn_size):
        raise UserFault(
            f"{origin}: a model of {config.model_type} needs its number of experts, num_experts_per_tok and "
            "moe_intermediate_size, and not all of them are there"
        )
    first = family.num_dense_first if config.first_k_dense_replace is None else config.first_k_dense_replace
    layers = tuple(kind == "sparse" for kind in config.mlp_layer_types) or tuple(
        layer >= first and layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    )
    renormalizes = family.renormalizes if config.norm_topk_prob is None else config.norm_topk_prob
    plain = Experts(count=count, per_token=per_token, ffn_size=ffn_size, layers=layers, renormalizes=renormalizes)
    return replace(plain, **_sigmoid_router(config, plain, origin)) if family.router == "sigmoid" else plain


class _Router(TypedDict):
    score: Literal["sigmoid"]
    has_choice_bias: bool
    num_groups: int | None
    groups_per_token: int | None
    weight_scale: float
    shared_ffn_size: int


def _sigmoid_router(config: DecoderConfig, experts: Experts, origin: str) -> _Router:
    """What a model adds whose experts are chosen by sigmoids and a bias, in groups."""
    groups, chosen, scale = config.n_group, config.topk_group, config.routed_scaling_factor
    if groups is None or chosen is None or scale is None or config.n_shared_experts is None:
        raise UserFault(
            f"{origin}: a model of {config.model_type} needs n_group, topk_group, routed_scaling_factor and "
            "n_shared_experts, and not all of them are there"
        )
    if experts.count % groups:
        raise UserFault(f"{origin}: n_group {groups} does not divide the {experts.count} experts")
    is_limited = chosen < groups
    return {
        "score": "sigmoid",
        "has_choice_bias": True,
        "num_groups": groups if is_limited else None,
        "groups_per_token": chosen if is_limited else None,
        "weight_scale": scale,
        "shared_ffn_size": config.n_shared_experts * experts.ffn_size,
    }
