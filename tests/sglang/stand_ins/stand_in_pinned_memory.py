"""Lets SGLang's LoRA layers be made beside a torch without an accelerator.

They put a few small tensors into pinned memory of the host, from where a GPU copies while it computes. Torch has such
memory only beside an accelerator, and says so by an error. Just before SGLang imports its LoRA modules, and in no other
process, this makes ``pin_memory`` ask for ordinary memory. Nothing else is changed.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from before_import import before_import

if TYPE_CHECKING:
    from collections.abc import Callable

_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def _unpinned(factory: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(factory)
    def make(*values: object, pin_memory: bool = False, **options: object) -> object:
        return factory(*values, **options)

    return make


def _itself(tensor: object, *_device: object) -> object:
    return tensor


def _pin_nothing() -> None:
    torch: Any = importlib.import_module("torch")  # partly typed
    if not torch.cuda.is_available():
        torch.Tensor.pin_memory = _itself
        for name in _FACTORIES:
            setattr(torch, name, _unpinned(getattr(torch, name)))


before_import("sglang.srt.lora", _pin_nothing)
