from collections.abc import Callable
from typing import Any

def get_forward_backward_func() -> Callable[..., list[Any]]: ...
