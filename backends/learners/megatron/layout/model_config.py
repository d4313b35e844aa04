"""What megatron-core's configuration classes are given: from the model, the layout, and what the scenario passes on.

Values are those of the classes' fields, with dtypes by name; :mod:`.build` makes objects of them. Nothing here imports
torch or megatron-core.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from penstock.backends.learners.megatron.bridge.architecture import yarn_mscale

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.bridge.architecture import Architecture, Experts, LatentAttention, Rope
    from penstock.backends.learners.megatron.layout.layout import Layout
    from penstock.backends.learners.megatron_options import ConfigValue, MegatronOptions

Precision = Literal["float32", "bfloat16", "float16"]
Fields = dict[str, "ConfigValue"]

CPU_FIELDS: Final[Fields] = {
    # Their kernels are those of Transformer Engine and Apex:
    "apply_rope_fusion": False, "gradient_accumulation_fusion": False, "moe_permute_fusion": False,
    "moe_router_fusion": False, "persist_layer_norm": False,
    # They are compiled for a CPU for seconds, and gain nothing there:
    "bias_activation_fusion": False, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
    # Over gloo they give wrong numbers, without a word:
    "batch_p2p_comm": False, "deallocate_pipeline_outputs": False,
}  # fmt: skip
GPU_FIELDS: Final[Fields] = {
    "apply_rope_fusion": True, "moe_permute_fusion": True, "persist_layer_norm": True, "bias_activation_fusion": True,
    "bias_dropout_fusion": True, "masked_softmax_fusion": True, "deallocate_pipeline_outputs": True,
}  # fmt: skip


def transformer_fields(
    architecture: Architecture, layout: Layout, options: MegatronOptions, *, precision: Precision, is_cpu: bool
) -> Fields:
    """Of ``TransformerConfig``. What a scenario passes on is laid over the rest; it has been checked to be its own to
    set. The activation, a function, is not among them."""
    overlaps_p2p = options.overlap_p2p and layout.virtual_pipeline > 1
    fields = {
        **_model_fields(architecture),
        **(_latent_fields(architecture, architecture.latent) if architecture.latent else {}),
        **_layout_fields(layout),
        **_recompute_fields(options),
        **(CPU_FIELDS if is_cpu else GPU_FIELDS),
        "params_dtype": precision,
        "pipeline_dtype": precision,
        "bf16": precision == "bfloat16",
        "fp16": precision == "float16",
        "overlap_p2p_comm": overlaps_p2p,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        # Weights come from the checkpoint; but who skips drawing them skips marking them as divided, and then norms of
        # gradients leave out all but the first rank's, without a word.
        "perform_initialization": True,
        "use_cpu_initialization": is_cpu,
    }
    if architecture.num_mtp_layers:
        fields["mtp_num_layers"] = architecture.num_mtp_layers
    if overlaps_p2p:
        fields["batch_p2p_comm"] = False  # the library takes one of the two
    if architecture.latent:
        # Where Transformer Engine is, its layers hold the norms of the short vectors if this is asked for; ours have
        # them either way, and newer versions would ask for Transformer Engine's.
        fields["qk_layernorm"] = not is_cpu
    if architecture.rope.is_interleaved or (architecture.latent and architecture.rope.kind != "yarn"):
        # The kernel for packed sequences turns halves of a head; that of latent attention takes yarn only.
        fields["apply_rope_fusion"] = False
    return fields | options.transformer


def with_options(architecture: Architecture, options: MegatronOptions) -> Architecture:
    """What of a model is built.

    Raises:
        UserFault: it does not have what the options ask for.
    """
    return replace(architecture, num_mtp_layers=0) if options.mtp is None else architecture.with_mtp()


def ddp_fields(options: MegatronOptions) -> Fields:
    """Of ``DistributedDataParallelConfig``."""
    return {
        "use_distributed_optimizer": options.distributed_optimizer,
        "overlap_grad_reduce": options.overlap_grad_reduce,
        "overlap_param_gather": options.overlap_param_gather,
        "grad_reduce_in_fp32": True,
        **options.ddp,
    }


def _model_fields(architecture: Architecture) -> Fields:
    fields: Fields = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_heads,
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_dim,
        "ffn_hidden_size": architecture.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_epsilon,
        "qk_layernorm": architecture.has_qk_norm,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.has_qkv_bias,
        "rotary_interleaved": architecture.rope.is_interleaved,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        # Variable lengths ask for it, of models without experts as well.
        "moe_token_dispatcher_type": "alltoall",
    }
    return fields if architecture.experts is None else fields | _expert_fields(architecture.experts)


def _latent_fields(architecture: Architecture, latent: LatentAttention) -> Fields:
    """Of ``MLATransformerConfig``, besides. megatron-core always turns neighbouring channels there."""
    rope = architecture.rope
    fields: Fields = {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": rope.theta,
        "rotary_percent": 1.0,
    }
    if rope.kind != "yarn":
        return fields | {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    return fields | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_positions,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": _mscale(rope),
        "mscale_all_dim": rope.mscale_all_dim,
    }


def _mscale(rope: Rope) -> float:
    """megatron-core takes the one from which the quotient of two follows that queries and keys are multiplied by."""
    if rope.factor <= 1:
        return 1.0
    return (rope.attention_factor * yarn_mscale(rope.factor, rope.mscale_all_dim) - 1) / (0.1 * math.log(rope.factor))


def _expert_fields(experts: Experts) -> Fields:
    fields: Fields = {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.per_token,
        "moe_layer_freq": [int(sparse) for sparse in experts.layers],
        "moe_grouped_gemm": True,
        # The softmax is over all experts either way. Taken before the choice, the chosen weights stay as they are;
        # after it, they add up to one.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.renormalizes,
        "moe_router_score_function": experts.score,
        "moe_router_num_groups": experts.num_groups,
        "moe_router_group_topk": experts.groups_per_token,
        "moe_router_topk_scaling_factor": experts.weight_scale,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size or None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    if experts.has_choice_bias:
        # Left as the checkpoint has it: what the engine chose experts by would be behind the learner otherwise.
        fields |= {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
    return fields


def _layout_fields(layout: Layout) -> Fields:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
    }


def _recompute_fields(options: MegatronOptions) -> Fields:
    match options.recompute:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective"}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def optimizer_fields(
    options: MegatronOptions,
    *,
    precision: Precision,
    betas: tuple[float, float],
    weight_decay: float,
    max_grad_norm: float,
) -> Fields:
    """Of ``OptimizerConfig``. The learning rate is set for each step."""
    return {
        "optimizer": "adam",
        "lr": 0.0,
        "min_lr": 0.0,
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "weight_decay": weight_decay,
        "clip_grad": max_grad_norm,
        "bf16": precision == "bfloat16",
        "fp16": precision == "float16",
        # A constant one, which is set to ours before each step; megatron-core's own would go by its own rules.
        "loss_scale": 1.0 if precision == "float16" else None,
        "params_dtype": precision,
        "use_distributed_optimizer": options.distributed_optimizer,
        "overlap_param_gather": options.overlap_param_gather,
        **options.optimizer,
    }
