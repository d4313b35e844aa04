"""How much memory a layout takes on its fullest rank, before anything is started.

Weights, gradients and optimizer are counted parameter by parameter and are exact but for what buffers are filled up
with. A weight of a model in bfloat16 takes 2 bytes, 4 for its gradient (which is summed in float32), and 12 for what
AdamW keeps: a float32 copy and two moments. The distributed optimizer divides the last over the data-parallel ranks
(ZeRO, arXiv:1910.02054, stage 1).

Activations follow the count of Korthikanti et al. (arXiv:2205.05198), for layers with a gate and with fewer heads for
keys than for queries, and with attention that keeps no matrix of scores. A layer keeps of each token::

    4 h + 2 q + 2 kv + 3 f          numbers, with f the MLP's width, or that of the experts that a token goes through

``h`` is divided over tensor-parallel ranks under sequence parallelism only, the rest always. Recomputed layers keep
``h`` each, and all of one while it is computed again. The first of ``p`` stages has ``p`` micro-batches under way, so
as much as all layers keep of one, and ``1 + (p − 1) / (p v)`` times that with ``v`` virtual stages. The last has one
micro-batch under way and its logits: in the model's dtype, and twice in float32.

What libraries take for themselves and what is lost between blocks is not counted; a tenth above is a fair guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.megatron.families import EMBEDDING
from penstock.backends.learners.megatron.weight_map import map_weights, padded_vocab_size

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.architecture import Architecture
    from penstock.backends.learners.megatron.layout import Layout
    from penstock.backends.learners.megatron.model_config import Precision
    from penstock.backends.learners.megatron.options import MegatronOptions

FLOAT32_BYTES: Final = 4
WEIGHT_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(int(getattr(self, part.name)) for part in fields(self))


@dataclass(frozen=True, slots=True)
class _Count:
    """Parameters of one rank."""

    dense: int = 0
    experts: int = 0


def estimate_memory(
    architecture: Architecture,
    layout: Layout,
    options: MegatronOptions,
    *,
    precision: Precision,
    max_tokens: int,
) -> MemoryEstimate:
    """Of the rank that needs most.

    Args:
        architecture: of the model.
        layout: that :func:`.layout.check_layout` lets pass.
        options: of the learner.
        precision: what the model computes in.
        max_tokens: of a micro-batch, all context-parallel ranks together.
    """
    tokens = -(-max_tokens // layout.context)
    stages = {0, layout.pipeline - 1} if layout.pipeline > 1 else {0}
    estimates = [
        _estimate(architecture, layout, options, precision=precision, tokens=tokens, stage=stage) for stage in stages
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def _estimate(
    architecture: Architecture,
    layout: Layout,
    options: MegatronOptions,
    *,
    precision: Precision,
    tokens: int,
    stage: int,
) -> MemoryEstimate:
    count = _count(architecture, layout, options, stage)
    kept = 2 * FLOAT32_BYTES + (FLOAT32_BYTES if precision == "bfloat16" else 0)
    is_divided = options.distributed_optimizer
    dense_ranks, expert_ranks = (layout.data * layout.context, layout.expert_data) if is_divided else (1, 1)
    parameters = count.dense + count.experts
    return MemoryEstimate(
        weights=parameters * WEIGHT_BYTES[precision],
        gradients=parameters * FLOAT32_BYTES,
        optimizer=math.ceil(count.dense / dense_ranks + count.experts / expert_ranks) * kept,
        activations=tokens * _activations(architecture, layout, options, stage) * WEIGHT_BYTES[precision],
        logits=_logits(architecture, layout, options, precision, tokens) if stage == layout.pipeline - 1 else 0,
    )


def _count(architecture: Architecture, layout: Layout, options: MegatronOptions, stage: int) -> _Count:
    """Parameters of a rank of this stage, layers divided evenly."""
    weights = map_weights(
        architecture,
        num_tensor=layout.tensor,
        num_expert_tensor=layout.expert_tensor,
        padded_vocab_size=_vocab(architecture, layout, options),
    )
    dense = experts = 0
    for parameter in weights.parameters.values():
        if parameter.layer is None:
            at = 0 if parameter.name == EMBEDDING.megatron else layout.pipeline - 1
            is_here = at == stage or (parameter.name == EMBEDDING.megatron and _holds_copy(architecture, layout, stage))
        else:
            is_here = stage == _stage_of(parameter.layer, architecture, layout)
        if is_here:
            size = math.prod(weights.part_shape(parameter))
            dense, experts = (dense + size, experts) if parameter.expert is None else (dense, experts + size)
    return _Count(dense, experts // layout.expert)


def _holds_copy(architecture: Architecture, layout: Layout, stage: int) -> bool:
    return architecture.has_tied_embeddings and stage == layout.pipeline - 1


def _stage_of(layer: int, architecture: Architecture, layout: Layout) -> int:
    per_piece = architecture.num_layers // (layout.pipeline * layout.virtual_pipeline)
    return min(layer // max(1, per_piece), layout.pipeline * layout.virtual_pipeline - 1) % layout.pipeline


def _vocab(architecture: Architecture, layout: Layout, options: MegatronOptions) -> int:
    return padded_vocab_size(architecture.vocab_size, multiple=options.vocab_multiple, num_tensor=layout.tensor)


def _activations(architecture: Architecture, layout: Layout, options: MegatronOptions, stage: int) -> int:
    """Numbers kept per token on a rank of this stage, at the fullest moment."""
    under_way = layout.pipeline - stage
    layers = architecture.num_layers / layout.pipeline * under_way
    if layout.virtual_pipeline > 1 and stage == 0:
        layers *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual_pipeline)
    whole = architecture.hidden_size // (layout.tensor if layout.sequence_parallel else 1)
    of_layer = max(_of_layer(architecture, layout, has_experts=kind) for kind in _kinds(architecture))
    if options.recompute == "full":
        return math.ceil(layers * whole + of_layer)
    return math.ceil(layers * of_layer)


def _kinds(architecture: Architecture) -> set[bool]:
    return {architecture.has_experts(layer) for layer in range(architecture.num_layers)}


def _of_layer(architecture: Architecture, layout: Layout, *, has_experts: bool) -> float:
    whole = architecture.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    heads = (architecture.num_heads + architecture.num_kv_heads) * architecture.head_dim
    attention = 2 * whole + 2 * heads / layout.tensor
    experts = architecture.experts
    if not has_experts or experts is None:
        return attention + 2 * whole + 3 * architecture.ffn_size / layout.tensor
    # A token is copied for each expert that it goes through; a rank has its share of the copies of all ranks' tokens.
    copies = experts.per_token / (layout.tensor if layout.sequence_parallel else 1)
    return attention + 2 * whole + copies * (2 * architecture.hidden_size + 3 * experts.ffn_size)


def _logits(
    architecture: Architecture, layout: Layout, options: MegatronOptions, precision: Precision, tokens: int
) -> int:
    share = _vocab(architecture, layout, options) // layout.tensor
    return tokens * share * (WEIGHT_BYTES[precision] + 2 * FLOAT32_BYTES)
