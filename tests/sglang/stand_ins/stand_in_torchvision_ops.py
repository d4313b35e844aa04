"""Lets a torchvision that was built for CUDA be imported beside a torch for the CPU.

When torchvision is imported it registers fake kernels for its operators ``nms`` and ``qnms``. The library that declares
them needs CUDA's libraries, which torch for the CPU does not bring, so the registration fails. This declares the two
(without an implementation) just before torchvision is imported, unless it is a build for the CPU, which declares them
itself. Nothing else is changed. SGLang imports torchvision
for its multimodal configurations even when it serves a text model.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from before_import import before_import

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


_kept_alive: list[Any] = []
"""The declarations, which end with their library."""


def _declare() -> None:
    torch: Any = importlib.import_module("torch")  # partly typed
    if not torch.backends.cuda.is_built() and not importlib.metadata.version("torchvision").endswith("+cpu"):
        library = torch.library.Library("torchvision", "DEF")
        _kept_alive.append(library)
        for operator in _OPERATORS:
            library.define(operator)


before_import("torchvision", _declare)
