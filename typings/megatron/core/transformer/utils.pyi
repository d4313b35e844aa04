from collections.abc import Mapping
from typing import Any

from torch import Tensor

def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Tensor],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int],
    sharded_offsets: tuple[Any, ...],
    **groups: object,
) -> dict[str, Any]: ...
