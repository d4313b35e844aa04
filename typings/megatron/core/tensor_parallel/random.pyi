from collections.abc import Callable

from torch import Tensor

def checkpoint(function: Callable[..., Tensor], distribute_saved_activations: bool, *args: Tensor) -> Tensor: ...
