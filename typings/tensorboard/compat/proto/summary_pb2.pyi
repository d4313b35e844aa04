from collections.abc import Sequence

from tensorboard.compat.proto.tensor_pb2 import TensorProto

class SummaryMetadata: ...

class Summary:
    class Image:
        def __init__(self, *, height: int, width: int, colorspace: int, encoded_image_string: bytes) -> None: ...

    class Value:
        def __init__(
            self,
            *,
            tag: str,
            simple_value: float = 0.0,
            metadata: SummaryMetadata | None = None,
            tensor: TensorProto | None = None,
            image: Summary.Image | None = None,
        ) -> None: ...

    def __init__(self, *, value: Sequence[Summary.Value]) -> None: ...
