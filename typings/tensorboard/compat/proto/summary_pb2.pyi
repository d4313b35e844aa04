from collections.abc import Sequence

from tensorboard.compat.proto.tensor_pb2 import TensorProto

class SummaryMetadata: ...

class Summary:
    class Value:
        def __init__(
            self,
            *,
            tag: str,
            simple_value: float = 0.0,
            metadata: SummaryMetadata | None = None,
            tensor: TensorProto | None = None,
        ) -> None: ...

    def __init__(self, *, value: Sequence[Summary.Value]) -> None: ...
