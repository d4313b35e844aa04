"""Every parameter of one model with the tensors of its checkpoint, in the order in which weights leave."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.learners.megatron.bridge.families import (
    EMBEDDING,
    EXPERT_BIAS,
    FINAL_NORM,
    HEAD,
    MTP,
    MTP_COPIES,
    MTP_LAYER,
    Form,
    Rule,
)
from penstock.backends.learners.megatron.bridge.forms import Division, blocks, part_shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.learners.megatron.bridge.architecture import Architecture, LatentAttention
    from penstock.backends.learners.megatron.bridge.forms import Block

QK_NORMS: Final = (".q_layernorm.weight", ".k_layernorm.weight")
_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT: Final = re.compile(r"(?<=\.mlp\.experts\.linear_fc[12]\.weight)(\d+)$")


class CheckpointTensor(NamedTuple):
    """One tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Parameter(NamedTuple):
    """One parameter of megatron-core's model, whole."""

    name: str
    """Counted over the whole model."""
    form: Form
    tensors: tuple[CheckpointTensor, ...]
    layer: int | None
    """None outside of the layers."""
    expert: int | None
    """None for what is no expert's."""

    @property
    def is_buffer(self) -> bool:
        """Whether nothing trains it; it is float32 then."""
        return self.name.endswith(EXPERT_BIAS)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tensor.shape for tensor in self.tensors]

    @property
    def num_elements(self) -> int:
        """In the checkpoint."""
        return sum(tensor.num_elements for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The parameters of one model, divided over ``tensor`` (experts: ``expert_tensor``) ranks."""

    parameters: Mapping[str, Parameter]
    """By name, in the order in which weights leave."""
    dense: Division
    sparse: Division

    def division(self, parameter: Parameter) -> Division:
        return self.dense if parameter.expert is None else self.sparse

    def blocks(self, parameter: Parameter, shard: int) -> list[Block]:
        """Of a rank's part of a parameter."""
        return blocks(parameter.form, parameter.shapes, shard, self.division(parameter))

    def part_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Of each rank's part of a parameter."""
        return part_shape(parameter.form, parameter.shapes, self.division(parameter))


def map_weights(
    architecture: Architecture,
    *,
    num_tensor: int,
    num_expert_tensor: int,
    padded_vocab_size: int,
    has_all_experts: bool = True,
) -> WeightMap:
    """Lay out the weights of a model for a number of ranks; or of the experts of a layer only the first."""
    heads = architecture.num_kv_heads
    parameters = parameters_of(architecture, has_all_experts=has_all_experts)
    return WeightMap(
        parameters={parameter.name: parameter for parameter in parameters},
        dense=Division(num_tensor, heads, padded_vocab_size),
        sparse=Division(num_expert_tensor, heads, padded_vocab_size),
    )


def num_weights(architecture: Architecture) -> int:
    """Of the whole model, and numbers that nothing trains."""
    count = architecture.experts.count if architecture.experts else 0
    parameters = parameters_of(architecture, has_all_experts=False)
    return sum(parameter.num_elements * (1 if parameter.expert is None else count) for parameter in parameters)


def parameters_of(architecture: Architecture, *, has_all_experts: bool = True) -> Iterator[Parameter]:
    """All parameters of a model that a checkpoint has tensors for, in order; or, of the experts of a layer, which are
    all alike, those of the first."""
    sizes = sizes_of(architecture)
    yield _parameter(EMBEDDING, sizes)
    for layer in range(architecture.num_layers):
        yield from _of_layer(architecture, sizes, layer, has_all_experts=has_all_experts)
    yield _parameter(FINAL_NORM, sizes)
    if not architecture.has_tied_embeddings:
        yield _parameter(HEAD, sizes)
    for mtp in range(architecture.num_mtp_layers):
        layer = architecture.num_layers + mtp
        yield from (_beyond(_parameter(rule, sizes, layer, mtp=mtp)) for rule in MTP)
        for parameter in _of_layer(architecture, sizes, layer, has_all_experts=has_all_experts):
            yield _beyond(parameter, MTP_LAYER.format(mtp=mtp))


def _of_layer(
    architecture: Architecture, sizes: Mapping[str, int], layer: int, *, has_all_experts: bool
) -> Iterator[Parameter]:
    family, sparse = architecture.family, architecture.has_experts(layer)
    num_experts = architecture.experts.count if architecture.experts else 0
    for rule in (*family.attention, *(family.sparse if sparse else family.dense)):
        if _has(architecture, sizes, rule):
            yield _parameter(rule, sizes, layer)
    for expert in range((num_experts if has_all_experts else 1) if sparse else 0):
        for rule in family.expert:
            yield _parameter(rule, sizes, layer, expert)


def _beyond(parameter: Parameter, prefix: str = "") -> Parameter:
    """One of a layer that predicts further tokens, which is of no stage's layers but on the last stage."""
    name = _LAYER.sub(prefix, parameter.name) if prefix else parameter.name
    return parameter._replace(name=name, layer=None)


def mtp_copies(architecture: Architecture) -> dict[str, str]:
    """Tensors of the checkpoint that layers which predict further tokens have once more, with those they are copies
    of."""
    layers = range(architecture.num_layers, architecture.num_layers + architecture.num_mtp_layers)
    return {f"model.layers.{layer}.{name}": original for layer in layers for name, original in MTP_COPIES.items()}


def _has(architecture: Architecture, sizes: Mapping[str, int], rule: Rule) -> bool:
    if rule.megatron.endswith(".bias"):
        return architecture.has_qkv_bias
    if rule.megatron.endswith(QK_NORMS):
        return architecture.has_qk_norm
    return all(sizes[size] for part in rule.checkpoint for size in part.sizes)


def sizes_of(architecture: Architecture) -> dict[str, int]:
    """What the tables of :mod:`.families` call the sizes of a model; 0 is what it does not have."""
    experts = architecture.experts
    return {
        "vocab": architecture.vocab_size,
        "hidden": architecture.hidden_size,
        "two_hidden": 2 * architecture.hidden_size,
        "q": architecture.num_heads * architecture.head_dim,
        "kv": architecture.num_kv_heads * architecture.head_dim,
        "head": architecture.head_dim,
        "ffn": architecture.ffn_size,
        "two_ffn": 2 * architecture.ffn_size,
        "experts": experts.count if experts else 0,
        "expert_ffn": experts.ffn_size if experts else 0,
        "shared_ffn": experts.shared_ffn_size if experts else 0,
        **(_latent_sizes(architecture, architecture.latent) if architecture.latent else {}),
    }


def _latent_sizes(architecture: Architecture, latent: LatentAttention) -> dict[str, int]:
    heads = architecture.num_heads
    return {
        "q_rank": latent.query_rank or 0,
        "q_of_hidden": 0 if latent.query_rank else heads * latent.head_dim,
        "kv_rank": latent.kv_rank,
        "kv_rank_rope": latent.kv_rank + latent.rope_dim,
        "plain_k_v": heads * (latent.plain_dim + latent.value_dim),
        "v": heads * latent.value_dim,
    }


def padded_vocab_size(vocab_size: int, *, multiple: int, num_tensor: int) -> int:
    """The vocabulary filled up so that it can be divided; the same for all usual numbers of ranks, since ``multiple``
    is divisible by them, so that checkpoints fit between layouts."""
    step = math.lcm(multiple, num_tensor)
    return -(-vocab_size // step) * step


def global_name(local: str, *, layers: Mapping[int, int], first_expert: int) -> str:
    """The name over the whole model of a parameter of one pipeline stage.

    Args:
        local: as the stage names it.
        layers: layer of the model by layer of the stage.
        first_expert: the first one that this rank has.
    """
    local = local.replace(".mtp_model_layer.", ".transformer_layer.")  # as newer versions call it
    name = _LAYER.sub(lambda found: f"decoder.layers.{layers[int(found[1])]}.", local)
    return _EXPERT.sub(lambda found: str(first_expert + int(found[1])), name)


def _parameter(
    rule: Rule,
    sizes: Mapping[str, int],
    layer: int | None = None,
    expert: int | None = None,
    *,
    mtp: int | None = None,
) -> Parameter:
    places = {"layer": layer, "expert": expert, "mtp": mtp}
    return Parameter(
        name=rule.megatron.format(**places),
        form=rule.form,
        tensors=tuple(
            CheckpointTensor(part.name.format(**places), tuple(sizes[size] for size in part.sizes))
            for part in rule.checkpoint
        ),
        layer=layer,
        expert=expert,
    )
