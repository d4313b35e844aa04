from collections.abc import Sequence

from torch import Tensor

def clip_grad_by_total_norm_fp32(
    parameters: Sequence[Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool = False
) -> None: ...
