from collections.abc import Callable, Sequence
from typing import Any

import torch

class TransformerConfig:
    num_layers: int
    num_moe_experts: int | None
    kv_channels: int
    layernorm_epsilon: float
    qk_layernorm: bool
    moe_router_load_balancing_type: str | list[str]
    moe_aux_loss_coeff: float | list[float]
    moe_z_loss_coeff: float | None
    sequence_parallel: bool
    expert_model_parallel_size: int
    params_dtype: torch.dtype
    perform_initialization: bool
    bf16: bool
    fp8: str | None
    fp8_recipe: str | None
    distribute_saved_activations: bool
    finalize_model_grads_func: Callable[..., None] | None
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None
    no_sync_func: Callable[..., Any] | Sequence[Callable[..., Any]] | None
    param_sync_func: Callable[..., Any] | Sequence[Callable[..., Any]] | None
    def __init__(self, **fields: object) -> None: ...

class MLATransformerConfig(TransformerConfig): ...
