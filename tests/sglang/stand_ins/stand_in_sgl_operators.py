"""Lets SGLang look at images of Qwen2.5-VL on a CPU without AMX instructions.

The module that prepares images for the Qwen family imports the models of all its members, and that of Qwen3.5 names
four compiled operators of ``sgl_kernel`` when it is loaded. Just before that, this declares them (without an
implementation, so that who calls one is told). Nothing else is changed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MODEL = "sglang.srt.models.qwen3_5"
_OPERATORS = (
    "fused_sigmoid_mul_cpu(Tensor a, Tensor b) -> Tensor",
    "fused_qk_gemma_rmsnorm_cpu(Tensor a, Tensor b) -> Tensor",
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor a, Tensor b) -> Tensor",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor a, Tensor b) -> Tensor",
)


class _DeclaresOperators(importlib.abc.MetaPathFinder):
    """Finds no module; sees the first import of the model coming."""

    def __init__(self) -> None:
        self._library: Any = None  # keeps the declarations alive

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _MODEL and self._library is None:
            torch: Any = importlib.import_module("torch")  # partly typed
            self._library = torch.library.Library("sgl_kernel", "FRAGMENT")
            for operator in _OPERATORS:
                if not hasattr(torch.ops.sgl_kernel, operator.partition("(")[0]):
                    self._library.define(operator)
        return None


sys.meta_path.insert(0, _DeclaresOperators())
