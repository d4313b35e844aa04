"""The ``learner.megatron:`` block of a scenario."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from penstock.messages.base import Options

Count = Annotated[int, Meta(ge=1)]
ConfigValue = bool | int | float | str | list[bool | int | float | str] | None
"""What a field of megatron-core's configuration may be set to."""


class MtpOptions(Options, frozen=True, kw_only=True):
    """Train the checkpoint's layers that predict further tokens (multi-token prediction, arXiv:2412.19437, §2.2) beside
    the policy, so that an engine which drafts with them keeps up with it. Their loss is the cross-entropy of the
    trained tokens, whatever their rewards."""

    loss_coef: Annotated[float, Meta(gt=0)] = 0.1
    """What the mean of their losses is multiplied by."""
    trains_trunk: bool = False
    """Let the gradient of their loss go on into the model's layers, embedding and output head, which then learn from it
    as well; otherwise it ends at these layers, and the policy is trained by its objective alone."""


class MegatronOptions(Options, frozen=True, kw_only=True):
    """How megatron-core divides the model over the learner's ranks, and every other option that it has. Data-parallel
    ranks are what is left: the number of ranks, divided by tensor × pipeline × context."""

    tensor_parallel: Count = 1
    """Ranks that share each matrix, and the vocabulary."""
    pipeline_parallel: Count = 1
    """Stages that the layers are divided into."""
    virtual_pipeline: Count = 1
    """Pieces of the model that each stage holds; more than one interleaves them, which makes the stages wait less."""
    context_parallel: Count = 1
    """Ranks that share each sequence."""
    expert_parallel: Count = 1
    """Ranks that the experts are divided over."""
    expert_tensor_parallel: Count = 1
    """Ranks that share each matrix of an expert."""
    sequence_parallel: bool = True
    """Divide what lies between the matrices over the tensor-parallel ranks as well, where there are several."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Compute again in the backward pass: nothing, attention (or what `transformer.recompute_modules`
    says), or whole layers (`transformer.recompute_num_layers` at a time)."""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """What the model computes in; null: model.dtype. What the optimizer keeps is float32 in any case."""
    distributed_optimizer: bool = True
    """Divide what the optimizer keeps over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Add up gradients over data-parallel ranks while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward pass has begun; for the distributed optimizer."""
    overlap_p2p: bool = True
    """Send between pipeline stages while these compute, where virtual_pipeline is above 1."""
    vocab_multiple: Count = 128
    """The vocabulary is filled up to a multiple of this, which products of matrices on GPUs like."""
    router_replay: bool = False
    """Send each token to the experts that the engine had sent it to when it generated (`engines.record_experts`);
    where there is no record the learner's own router chooses. Weights are its own probabilities in any case."""
    mtp: MtpOptions | None = None
    """Train the layers that predict further tokens (`num_nextn_predict_layers` of the model's config.json); null leaves
    them as the checkpoint has them."""
    transformer: dict[str, ConfigValue] = field(default_factory=dict[str, ConfigValue])
    """Any other field of megatron-core's TransformerConfig."""
    ddp: dict[str, ConfigValue] = field(default_factory=dict[str, ConfigValue])
    """Any other field of its DistributedDataParallelConfig."""
    optimizer: dict[str, ConfigValue] = field(default_factory=dict[str, ConfigValue])
    """Any other field of its OptimizerConfig."""
