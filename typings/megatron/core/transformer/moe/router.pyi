from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

class TopKRouter(nn.Module):
    config: TransformerConfig
    topk: int
    score_function: str
    enable_expert_bias: bool
    local_tokens_per_expert: Tensor
    router_replay: Any
    tp_cp_group: ProcessGroup
    cp_group: ProcessGroup
    def __init__(self, config: TransformerConfig, *args: object, **options: object) -> None: ...
    def routing(self, logits: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor]: ...
