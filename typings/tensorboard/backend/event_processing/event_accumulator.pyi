from typing import NamedTuple

from tensorboard.compat.proto.tensor_pb2 import TensorProto

class ScalarEvent(NamedTuple):
    wall_time: float
    step: int
    value: float

class TensorEvent(NamedTuple):
    wall_time: float
    step: int
    tensor_proto: TensorProto

class ImageEvent(NamedTuple):
    wall_time: float
    step: int
    encoded_image_string: bytes
    width: int
    height: int

class EventAccumulator:
    def __init__(self, path: str, size_guidance: dict[str, int] | None = None) -> None: ...
    def Reload(self) -> EventAccumulator: ...  # noqa: N802
    def Scalars(self, tag: str) -> list[ScalarEvent]: ...  # noqa: N802
    def Images(self, tag: str) -> list[ImageEvent]: ...  # noqa: N802
    def Tensors(self, tag: str) -> list[TensorEvent]: ...  # noqa: N802
    def Tags(self) -> dict[str, list[str]]: ...  # noqa: N802
