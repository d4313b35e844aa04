import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

class ColumnParallelLinear(torch.nn.Module):
    weight: Tensor
    bias: Tensor | None
    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: object) -> None: ...
    def forward(self, input_: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor | None]: ...

class RowParallelLinear(torch.nn.Module):
    weight: Tensor
    bias: Tensor | None
    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: object) -> None: ...
    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]: ...
