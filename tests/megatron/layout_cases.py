"""What ranks do in the tests of layouts. Imported by ranks only."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from weight_cases import opened

from penstock.backends.learners.megatron.layout.layout import Layout
from penstock.backends.learners.megatron.layout.memory import estimate_memory
from penstock.backends.learners.megatron.layout.model_config import ddp_fields, optimizer_fields
from penstock.backends.learners.megatron.model.build import as_objects, close_groups, open_groups
from penstock.backends.learners.megatron_options import MegatronOptions

state: Any = parallel_state


def place(rank: int, sizes: dict[str, Any], num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank is, by our count and by megatron-core's."""
    layout = Layout(num_ranks=num_ranks, **sizes)
    open_groups(layout, seed=1)
    theirs = (
        state.get_tensor_model_parallel_rank(), state.get_context_parallel_rank(), state.get_data_parallel_rank(),
        state.get_pipeline_model_parallel_rank(), state.get_expert_tensor_parallel_rank(),
        state.get_expert_model_parallel_rank(),
    )  # fmt: skip
    close_groups()
    return tuple(layout.place(rank)), theirs


def weight_bytes(rank: int, folder: str, keys: dict[str, Any], num_ranks: int) -> tuple[int, int]:
    """What this rank's weights take, and what was estimated for the fullest rank."""
    model, options = opened(rank, folder, keys, num_ranks)
    taken = sum(parameter.nbytes for chunk in model.chunks for parameter in chunk.parameters())
    estimate = estimate_memory(model.architecture, model.layout, options, precision="float32", max_tokens=64)
    close_groups()
    return taken, estimate.weights


def configured(rank: int, keys: dict[str, Any]) -> tuple[bool, str, float]:
    """Fields that were passed through, as megatron-core's configuration has them."""
    options = MegatronOptions(**keys)
    ddp: Any = DistributedDataParallelConfig(**ddp_fields(options))
    fields = optimizer_fields(options, precision="bfloat16", betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
    optimizer: Any = OptimizerConfig(**as_objects(fields))
    return ddp.check_for_nan_in_grad, str(optimizer.main_grads_dtype), optimizer.adam_eps


def without_cuda(rank: int) -> tuple[bool, str, str, bool]:
    """What this process says about CUDA."""
    weight = torch.zeros(2, device="cuda")
    is_float = weight.type() == "torch.cuda.FloatTensor"
    return torch.cuda.is_available(), str(torch.cuda.current_device()), str(weight.cuda().device), is_float
