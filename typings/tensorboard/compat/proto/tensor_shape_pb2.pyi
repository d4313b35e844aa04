from collections.abc import Sequence

class TensorShapeProto:
    class Dim:
        def __init__(self, *, size: int) -> None: ...

    def __init__(self, *, dim: Sequence[TensorShapeProto.Dim]) -> None: ...
