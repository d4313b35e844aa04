from contextlib import AbstractContextManager

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

class DistributedDataParallelConfig:
    overlap_param_gather: bool
    def __init__(self, **fields: object) -> None: ...

class DistributedDataParallel(nn.Module):
    config: TransformerConfig
    ddp_config: DistributedDataParallelConfig
    grad_accs: list[object]
    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
    ) -> None: ...
    def zero_grad_buffer(self) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def start_param_sync(self, *unused: object, force_sync: bool = False) -> None: ...

def finalize_model_grads(model: list[nn.Module], num_tokens: Tensor | None = None, **groups: object) -> None: ...
