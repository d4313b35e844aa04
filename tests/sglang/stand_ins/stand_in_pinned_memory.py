"""Lets SGLang's LoRA layers be made beside a torch without an accelerator.

They put a few small tensors into pinned memory of the host, from where a GPU copies while it computes. Torch has such
memory only beside an accelerator, and says so by an error. Just before SGLang imports its LoRA modules, and in no other
process, this makes ``pin_memory`` ask for ordinary memory. Nothing else is changed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_LORA = "sglang.srt.lora"
_FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def _unpinned(factory: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(factory)
    def make(*values: object, pin_memory: bool = False, **options: object) -> object:
        return factory(*values, **options)

    return make


def _itself(tensor: object, *_device: object) -> object:
    return tensor


class _PinsNothing(importlib.abc.MetaPathFinder):
    """Finds no module; sees the first import of SGLang's LoRA coming."""

    def __init__(self) -> None:
        self._is_done = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _LORA and not self._is_done:
            self._is_done = True
            torch: Any = importlib.import_module("torch")  # partly typed
            if not torch.cuda.is_available():
                torch.Tensor.pin_memory = _itself
                for name in _FACTORIES:
                    setattr(torch, name, _unpinned(getattr(torch, name)))
        return None


sys.meta_path.insert(0, _PinsNothing())
