import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

class TERowParallelLinear(torch.nn.Module):
    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: object) -> None: ...
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]: ...
