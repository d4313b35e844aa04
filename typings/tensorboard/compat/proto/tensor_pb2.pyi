from collections.abc import Sequence

from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

class TensorProto:
    string_val: Sequence[bytes]
    def __init__(self, *, dtype: int, string_val: Sequence[bytes], tensor_shape: TensorShapeProto) -> None: ...
