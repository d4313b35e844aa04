"""How much memory a layout takes on its fullest rank, before anything is started.

Weights, gradients and optimizer are counted parameter by parameter and are exact but for what buffers are filled up
with. A weight of a model in bfloat16 takes 2 bytes, 4 for its gradient (which is summed in float32), and 12 for what
AdamW keeps: a float32 copy and two moments. The distributed optimizer divides the last over the data-parallel ranks
(ZeRO, arXiv:1910.02054, stage 1). A reference is a second set of weights; a critic of its own has everything once more.

Activations follow the count of Korthikanti et al. (arXiv:2205.05198), for layers with a gate and with fewer heads for
keys than for queries, and with attention that keeps no matrix of scores. A layer keeps of each token::

    4 h + 2 q + 2 kv + 3 f          numbers, with f the MLP's width, or that of the experts that a token goes through

(``2 kv`` is as much as ``2 q`` with latent attention, and its short vectors come twice besides.)
``h`` is divided over tensor-parallel ranks under sequence parallelism only, the rest always. Recomputed layers keep
``h`` each, and all of one while it is computed again. Stage ``s`` of ``p`` has ``p − s`` micro-batches under way, and
with ``v`` virtual stages ``(2 (p − s − 1) + (v − 1) p + 1) / v``. The last has its logits besides: twice in the model's
dtype, and twice in float32.

That is what fused layers keep; those in plain torch, on CPUs, keep about twice as much.

What libraries take for themselves, what is lost between blocks, experts that get more than their share of the tokens,
and the few kilobytes that experts are chosen with are not counted; a tenth above is a fair guess.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.learners.megatron.bridge.families import EMBEDDING, HEAD, MTP_BLOCK
from penstock.backends.learners.megatron.bridge.weight_map import map_weights, padded_vocab_size
from penstock.backends.learners.megatron.layout.model_config import with_options
from penstock.backends.learners.megatron.layout.offload_options import offloaded_fraction, offloads_main_weights
from penstock.backends.learners.megatron.layout.stages import layers_of_pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.checkpoint.options import ModelDtype
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron.layout.layout import Layout
    from penstock.backends.learners.megatron_options import ConfigValue, MegatronOptions

FLOAT32_BYTES: Final = 4
WEIGHT_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPE_BYTES: Final[dict[str, int]] = WEIGHT_BYTES | {"uint8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank."""

    stage: int
    """Pipeline stage of this rank."""
    weights: int
    gradients: int
    optimizer: int
    reference: int = 0
    """A second set of weights, that nothing trains."""
    critic: int = 0
    """Of its own, beside a policy: weights, gradients and optimizer."""
    activations: int
    logits: int
    on_host: int = 0
    """What of the optimizer is in the host's memory instead; not in the total."""

    @property
    def total(self) -> int:
        return (
            self.weights + self.gradients + self.optimizer + self.reference + self.critic + self.activations
            + self.logits
        )  # fmt: skip


class Extras(NamedTuple):
    """What there is on a rank beside the policy."""

    has_reference: bool = False
    has_own_critic: bool = False
    has_policy: bool = True
    """Otherwise the critic is what weights, gradients and optimizer are of."""


POLICY_ALONE: Final = Extras()


@dataclass(frozen=True, slots=True)
class _Count:
    """Parameters of one rank."""

    dense: int = 0
    experts: int = 0
    head: int = 0
    """Of the dense ones, the output head's, that a critic has none of."""
    mtp_dense: int = 0
    """Of the dense ones, those of layers that predict further tokens, which neither critic nor reference has."""
    mtp_experts: int = 0
    """Likewise of the experts'."""

    @property
    def of_reference(self) -> _Count:
        return replace(self, dense=self.dense - self.mtp_dense, experts=self.experts - self.mtp_experts)

    @property
    def of_critic(self) -> _Count:
        return replace(self.of_reference, dense=self.of_reference.dense - self.head)

    @property
    def all(self) -> int:
        return self.dense + self.experts


class _Training(NamedTuple):
    """Bytes that training takes."""

    weights: int
    gradients: int
    optimizer: int
    on_host: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def estimate_memory(
    architecture: Architecture,
    layout: Layout,
    options: MegatronOptions,
    *,
    precision: ModelDtype,
    max_tokens: int,
    extras: Extras = POLICY_ALONE,
) -> MemoryEstimate:
    """Of the rank that needs most.

    Args:
        architecture: of the model.
        layout: that :func:`.layout.check_layout` lets pass.
        options: of the learner.
        precision: what the model computes in.
        max_tokens: of a micro-batch, all context-parallel ranks together.
        extras: what else is trained or kept.
    """
    return max(
        estimate_stages(architecture, layout, options, precision=precision, max_tokens=max_tokens, extras=extras),
        key=lambda estimate: estimate.total,
    )


def estimate_stages(
    architecture: Architecture,
    layout: Layout,
    options: MegatronOptions,
    *,
    precision: ModelDtype,
    max_tokens: int,
    extras: Extras = POLICY_ALONE,
) -> list[MemoryEstimate]:
    """Of a rank of each pipeline stage; see :func:`estimate_memory`."""
    if not extras.has_policy:
        options = msgspec.structs.replace(options, mtp=None)
    architecture = with_options(architecture, options)
    tokens = -(-max_tokens // layout.context)
    counts = _counts(architecture, layout, options)
    estimates: list[MemoryEstimate] = []
    for stage, count in enumerate(counts):
        critic = _training(count.of_critic, layout, options, precision)
        own = _training(count, layout, options, precision) if extras.has_policy else critic
        beside = critic if extras.has_policy and extras.has_own_critic else None
        numbers = _activations(architecture, layout, options, stage)
        has_logits = stage == layout.pipeline - 1 and extras.has_policy
        estimates.append(
            MemoryEstimate(
                stage=stage,
                weights=own.weights,
                gradients=own.gradients,
                optimizer=own.optimizer,
                reference=count.of_reference.all * WEIGHT_BYTES[precision] if extras.has_reference else 0,
                critic=0 if beside is None else beside.total,
                activations=tokens * numbers * WEIGHT_BYTES[precision],
                logits=_logits(architecture, layout, options, precision, tokens) if has_logits else 0,
                on_host=own.on_host + (0 if beside is None else beside.on_host),
            )
        )
    return estimates


def pieces_of(architecture: Architecture, layout: Layout, options: MegatronOptions) -> tuple[int, ...]:
    """Layers of each piece of the model, in its order."""
    return layers_of_pieces(
        architecture.num_layers,
        num_stages=layout.pipeline,
        pieces_per_stage=layout.virtual_pipeline,
        fields=options.transformer,
    )


def _training(count: _Count, layout: Layout, options: MegatronOptions, precision: ModelDtype) -> _Training:
    is_divided = options.distributed_optimizer
    dense_ranks, expert_ranks = (layout.data * layout.context, layout.expert_data) if is_divided else (1, 1)
    share = count.dense / dense_ranks + count.experts / expert_ranks
    main, moments = _optimizer_bytes(options.optimizer, precision)
    moved = offloaded_fraction(options)
    main_moved = moved if offloads_main_weights(options) else 0.0
    is_float32 = options.ddp.get("grad_reduce_in_fp32", True)
    return _Training(
        weights=count.all * WEIGHT_BYTES[precision],
        gradients=count.all * (FLOAT32_BYTES if is_float32 else WEIGHT_BYTES[precision]),
        optimizer=math.ceil(share * (main * (1 - main_moved) + moments * (1 - moved))),
        # The host has gradients of what it updates as well.
        on_host=math.ceil(share * moved * (main + moments + FLOAT32_BYTES)),
    )


def _optimizer_bytes(given: Mapping[str, ConfigValue], precision: ModelDtype) -> tuple[int, int]:
    """What AdamW keeps of one parameter: of the weight itself, and of its two moments."""
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    main, *moments = (DTYPE_BYTES[str(given.get(name) or "float32")] for name in names)
    return main if precision != "float32" else 0, sum(moments)


def _number(value: ConfigValue) -> float:
    return value if isinstance(value, (int, float)) else 0.0


def _counts(architecture: Architecture, layout: Layout, options: MegatronOptions) -> list[_Count]:
    """Parameters of a rank of each stage."""
    weights = map_weights(
        architecture,
        has_all_experts=False,
        num_tensor=layout.tensor,
        num_expert_tensor=layout.expert_tensor,
        padded_vocab_size=_vocab(architecture, layout, options),
    )
    ends = list(itertools.accumulate(pieces_of(architecture, layout, options)))
    last = layout.pipeline - 1
    dense, experts, head, mtp_dense, mtp_experts = ([0] * layout.pipeline for _ in range(5))
    for parameter in (parameter for parameter in weights.parameters.values() if not parameter.is_buffer):
        size = math.prod(weights.part_shape(parameter))
        if parameter.layer is not None:
            stage = bisect.bisect_right(ends, parameter.layer) % layout.pipeline
            (dense if parameter.expert is None else experts)[stage] += size
        elif parameter.name.startswith(MTP_BLOCK):
            for counts in (dense, mtp_dense) if parameter.expert is None else (experts, mtp_experts):
                counts[last] += size
        elif parameter.name == EMBEDDING.megatron:
            dense[0] += size
            if architecture.num_mtp_layers and last:  # a copy for these layers
                dense[last] += size
                mtp_dense[last] += size
            if architecture.has_tied_embeddings and last:
                dense[last] += size
                head[last] += size
        else:
            dense[last] += size
            head[last] += size if parameter.name == HEAD.megatron else 0
    per_rank = architecture.experts.count // layout.expert if architecture.experts else 0
    return [
        _Count(
            dense[stage], experts[stage] * per_rank, head[stage], mtp_dense[stage], mtp_experts[stage] * per_rank
        )
        for stage in range(layout.pipeline)
    ]  # fmt: skip


def _vocab(architecture: Architecture, layout: Layout, options: MegatronOptions) -> int:
    return padded_vocab_size(architecture.vocab_size, multiple=options.vocab_multiple, num_tensor=layout.tensor)


def _activations(architecture: Architecture, layout: Layout, options: MegatronOptions, stage: int) -> int:
    """Numbers kept per token on a rank of this stage, at the fullest moment."""
    pieces = pieces_of(architecture, layout, options)
    starts = [0, *itertools.accumulate(pieces)]
    own = [
        _of_layer(architecture, layout, has_experts=architecture.has_experts(layer))
        for piece in range(stage, len(pieces), layout.pipeline)
        for layer in range(starts[piece], starts[piece + 1])
    ]
    if stage == layout.pipeline - 1:
        # Around its layer: the embedding, what is joined of both norms, what is made of it, and the last norm.
        around = 6 * architecture.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
        layer = _of_layer(architecture, layout, has_experts=architecture.has_experts(architecture.num_layers))
        own += [layer + around] * architecture.num_mtp_layers
    if not own:
        return 0
    whole = architecture.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    under_way = _under_way(layout, stage)
    if options.recompute != "full":
        return math.ceil(under_way * sum(own))
    at_once = max(1, int(_number(options.transformer.get("recompute_num_layers"))))
    if options.transformer.get("recompute_method") == "block":  # so many layers are computed again, the others kept
        return math.ceil(under_way * (min(at_once, len(own)) * whole + sum(own[at_once:])) + max(own))
    return math.ceil(under_way * whole * math.ceil(len(own) / at_once) + at_once * max(own))


def _under_way(layout: Layout, stage: int) -> float:
    """Micro-batches that a stage keeps at once, in parts of all that it holds."""
    stages, pieces = layout.pipeline, layout.virtual_pipeline
    if pieces == 1:
        return stages - stage
    return (2 * (stages - stage - 1) + (pieces - 1) * stages + 1) / pieces


def _of_layer(architecture: Architecture, layout: Layout, *, has_experts: bool) -> float:
    whole = architecture.hidden_size / (layout.tensor if layout.sequence_parallel else 1)
    attention = 2 * whole + _of_attention(architecture, layout)
    experts = architecture.experts
    if not has_experts or experts is None:
        return attention + 2 * whole + 3 * architecture.ffn_size / layout.tensor
    # A token is copied for each expert that it goes through; a rank has its share of the copies of all ranks' tokens,
    # and those that share an expert's matrices have each other's copies as well.
    copies = experts.per_token / (layout.tensor if layout.sequence_parallel else 1)
    routed = copies * (2 * architecture.hidden_size * layout.expert_tensor + 3 * experts.ffn_size)
    return attention + 2 * whole + routed + 3 * experts.shared_ffn_size / layout.tensor


def _of_attention(architecture: Architecture, layout: Layout) -> float:
    latent = architecture.latent
    if latent is None:
        return 2 * (architecture.num_heads + architecture.num_kv_heads) * architecture.head_dim / layout.tensor
    # Each head has keys and values of its own; the short vectors, and these normed, are of a rank's own tokens.
    heads = 2 * architecture.num_heads * (latent.head_dim + latent.value_dim) / layout.tensor
    short = 2 * ((latent.query_rank or 0) + latent.kv_rank) + latent.rope_dim
    return heads + short / (layout.tensor if layout.sequence_parallel else 1)


def _logits(
    architecture: Architecture, layout: Layout, options: MegatronOptions, precision: ModelDtype, tokens: int
) -> int:
    share = _vocab(architecture, layout, options) // layout.tensor
    # Those of layers that predict further tokens are there once, when the model's own are made.
    return (2 + architecture.num_mtp_layers) * tokens * share * (WEIGHT_BYTES[precision] + FLOAT32_BYTES)
