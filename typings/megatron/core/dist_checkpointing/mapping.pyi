from typing import Any

from torch import Tensor, device, dtype

ReplicaId = int | tuple[int, ...]

class ShardedBase:
    key: str
    replica_id: ReplicaId

class ShardedTensor(ShardedBase):
    data: Tensor | None
    dtype: dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int
    allow_shape_mismatch: bool
    def init_data(self, device: device) -> None: ...

class ShardedTensorFactory(ShardedBase):
    data: Tensor

class ShardedObject(ShardedBase): ...

class LocalNonpersistentObject:
    def __init__(self, obj: object) -> None: ...

def is_main_replica(replica_id: ReplicaId) -> bool: ...
def apply_factory_merges(x1: dict[str, Any], x2: dict[str, Any]) -> dict[str, Any]: ...
