"""Lets SGLang look at images of Qwen2.5-VL on a CPU without AMX instructions.

The module that prepares images for the Qwen family imports the models of all its members, and that of Qwen3.5 names
four compiled operators of ``sgl_kernel`` when it is loaded. Just before that, this declares them (without an
implementation, so that who calls one is told). Nothing else is changed.
"""

from __future__ import annotations

import importlib
from typing import Any

from before_import import before_import

_OPERATORS = (
    "fused_sigmoid_mul_cpu(Tensor a, Tensor b) -> Tensor",
    "fused_qk_gemma_rmsnorm_cpu(Tensor a, Tensor b) -> Tensor",
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor a, Tensor b) -> Tensor",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor a, Tensor b) -> Tensor",
)


_kept_alive: list[Any] = []
"""The declarations, which end with their library."""


def _declare() -> None:
    torch: Any = importlib.import_module("torch")  # partly typed
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    _kept_alive.append(library)
    for operator in _OPERATORS:
        if not hasattr(torch.ops.sgl_kernel, operator.partition("(")[0]):
            library.define(operator)


before_import("sglang.srt.models.qwen3_5", _declare)
