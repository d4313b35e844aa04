"""Lets a torchvision that was built for CUDA be imported beside a torch for the CPU.

When torchvision is imported it registers fake kernels for its operators ``nms`` and ``qnms``. The library that declares
them needs CUDA's libraries, which torch for the CPU does not bring, so the registration fails. This declares the two
(without an implementation) just before torchvision is imported, unless it is a build for the CPU, which declares them
itself. Nothing else is changed. SGLang imports torchvision
for its multimodal configurations even when it serves a text model.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _DeclaresOperators(importlib.abc.MetaPathFinder):
    """Finds no module; sees the first import of torchvision coming."""

    def __init__(self) -> None:
        self._library: Any = None  # keeps the declarations alive

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and self._library is None:
            torch: Any = importlib.import_module("torch")  # partly typed
            if not torch.backends.cuda.is_built() and not importlib.metadata.version("torchvision").endswith("+cpu"):
                self._library = torch.library.Library("torchvision", "DEF")
                for operator in _OPERATORS:
                    self._library.define(operator)
        return None


sys.meta_path.insert(0, _DeclaresOperators())
