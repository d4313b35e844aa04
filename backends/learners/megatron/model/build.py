"""Builds this rank's share of a model, and fills it from a checkpoint.

The caller has called ``no_cuda.install()`` before this module is imported, and joined the default process group.

Invariants:

* A model is in evaluation mode, but for what recomputes, and drops nothing out: the learner's log-probs are comparable
  with an engine's.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch.nn import functional

from penstock.backends.learners.megatron.bridge.weight_map import padded_vocab_size
from penstock.backends.learners.megatron.cpu import gaps
from penstock.backends.learners.megatron.layout.config_fields import DTYPE_NAMES
from penstock.backends.learners.megatron.layout.layout import check_layout
from penstock.backends.learners.megatron.layout.model_config import transformer_fields, with_options
from penstock.backends.learners.megatron.model.layer_spec import block_spec, mtp_spec
from penstock.backends.learners.megatron.model.moe import connect_routers
from penstock.backends.learners.megatron.model.mtp import PredictingModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from penstock.backends.learners.megatron.bridge.architecture import Architecture, LatentAttention, Rope
    from penstock.backends.learners.megatron.layout.layout import Layout
    from penstock.backends.learners.megatron.layout.model_config import Fields, Precision
    from penstock.backends.learners.megatron_options import MegatronOptions, MtpOptions

gaps.mend()

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModel:
    """This rank's share of a model."""

    architecture: Architecture
    layout: Layout
    config: TransformerConfig
    chunks: list[GPTModel]
    """Model chunks by virtual pipeline stage; one without such stages."""
    padded_vocab_size: int
    precision: Precision
    mtp: MtpOptions | None = None
    """How layers that predict further tokens are trained; None: the model has none."""


def open_groups(layout: Layout, *, seed: int, timeout_s: float = 1800.0) -> None:
    """Divide the ranks of the default process group, once for each layout; :func:`close_groups` undoes it.

    Args:
        layout: the same on every rank.
        seed: of what is drawn.
        timeout_s: how long ranks wait for each other in a collective.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,  # a part of a minute is fine with it
    )
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def let_go(chunks: Sequence[DistributedDataParallel]) -> None:
    """Of models that will not be trained any more. Each is in a circle with its optimizer that goes through hooks in
    C++: otherwise neither is ever collected, nor are their groups."""
    for chunk in chunks:
        chunk.grad_accs.clear()
        chunk.config.grad_scale_func = None


def close_groups() -> None:
    """Undo the division of ranks; models that were built in it are of no use any more."""
    let_go([found for found in gc.get_objects() if type(found) is DistributedDataParallel])
    made: list[ProcessGroup | None] = list(parallel_state._global_process_group_list or ())
    parallel_state.destroy_model_parallel()
    # megatron-core forgets most groups without ending them, and each of gloo's has threads.
    for group in made:
        if group is not None:
            with contextlib.suppress(ValueError):  # it has ended this one
                dist.destroy_process_group(group)
    gc.collect()


def build_model(
    architecture: Architecture,
    layout: Layout,
    options: MegatronOptions,
    *,
    precision: Precision,
    device: torch.device,
) -> ParallelModel:
    """This rank's share of a model, with weights that mean nothing yet.

    Raises:
        LayoutError: the layout is not possible.
        UserFault: the model has no such layers as ``options.mtp`` asks for.
    """
    architecture = with_options(architecture, options)
    check_layout(layout, architecture, options.transformer)
    is_cpu = device.type == "cpu"
    fields = transformer_fields(architecture, layout, options, precision=precision, is_cpu=is_cpu)
    kind = MLATransformerConfig if architecture.latent else TransformerConfig
    config = kind(**as_objects(fields), activation_func=functional.silu)
    vocab = padded_vocab_size(architecture.vocab_size, multiple=options.vocab_multiple, num_tensor=layout.tensor)
    stages = [None] if layout.virtual_pipeline == 1 else list(range(layout.virtual_pipeline))
    trains_trunk = options.mtp is not None and options.mtp.trains_trunk
    chunks = [_chunk(architecture, config, vocab, stage, is_cpu=is_cpu, trains_trunk=trains_trunk) for stage in stages]
    if options.recompute != "none":
        _let_recompute(chunks)
    _mark_experts(chunks, layout)
    connect_routers(architecture, chunks)
    return ParallelModel(
        architecture=architecture,
        layout=layout,
        config=config,
        chunks=chunks,
        padded_vocab_size=vocab,
        precision=precision,
        mtp=options.mtp,
    )


def _let_recompute(chunks: list[GPTModel]) -> None:
    """megatron-core computes again only what is in training mode, and says nothing where it is not. These modules ask
    for that mode for nothing else."""
    for chunk in chunks:
        for module in (chunk.decoder, *(layer.self_attention for layer in chunk.decoder.layers)):
            module.training = True
        for layer in mtp_layers(chunk):
            layer.training = layer.inner.self_attention.training = True


def mtp_layers(chunk: GPTModel) -> list[Any]:
    """The layers of a chunk that predict further tokens."""
    block: Any = getattr(chunk, "mtp", None)
    return [] if block is None else list(block.layers)


def _mark_experts(chunks: list[GPTModel], layout: Layout) -> None:
    """megatron-core's own layers look at the expert-parallel ranks only. Where the tensor-parallel ones alone make the
    difference, gradients of experts would be those of each rank's own tokens, without a word."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." in name:
                parameter.allreduce = not layout.reduces_experts_apart  # type: ignore[attr-defined]  # asked for by DDP


def as_objects(fields: Fields) -> dict[str, Any]:
    """Fields with dtypes in the place of their names."""
    dtypes = {name: DTYPES[value] for name, value in fields.items() if name.endswith("_dtype") and value in DTYPES}
    return {**fields, **dtypes}


def _chunk(
    architecture: Architecture,
    config: TransformerConfig,
    vocab_size: int,
    stage: int | None,
    *,
    is_cpu: bool,
    trains_trunk: bool,
) -> GPTModel:
    is_whole = stage is None
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=is_whole, vp_stage=stage)
    predicts = architecture.num_mtp_layers > 0
    model = (PredictingModel if predicts else GPTModel)(
        config,
        block_spec(architecture, config, virtual_stage=stage, is_cpu=is_cpu),
        vocab_size=vocab_size,
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=is_whole, vp_stage=stage),
        post_process=is_last,
        mtp_block_spec=mtp_spec(architecture, config, is_cpu=is_cpu) if predicts and is_last else None,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.has_tied_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope.theta,  # type: ignore[arg-type]  # said to be whole, and raised to powers only
        rotary_percent=architecture.rope.fraction,
        vp_stage=stage,
    )
    if architecture.rope.kind == "llama3":
        rotary: Any = model.rotary_pos_emb
        rotary.inv_freq = llama3_frequencies(rotary.inv_freq, architecture.rope)
    if architecture.latent:
        _set_latent_epsilon(model, architecture.latent)
    if isinstance(model, PredictingModel):
        model.trains_trunk = trains_trunk
    return model.eval()


def _set_latent_epsilon(model: GPTModel, latent: LatentAttention) -> None:
    """The configuration has one epsilon for all norms."""
    for layer in (*model.decoder.layers, *(layer.inner for layer in mtp_layers(model))):
        attention: Any = layer.self_attention
        attention.linear_kv_up_proj.eps = latent.norm_epsilon
        if latent.query_rank:
            attention.linear_q_up_proj.eps = latent.norm_epsilon


def llama3_frequencies(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Frequencies whose waves are longer than a part of the original context are divided, those of much shorter waves
    stay, and between the two they go over into each other. megatron-core has this too, for one original context and
    one pair of bounds only."""
    wave = 2 * math.pi / frequencies
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    smooth = ((rope.original_positions / wave - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
