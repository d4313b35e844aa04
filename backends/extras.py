"""Packages that only some scenarios need: each comes with an extra of Penstock's."""

from __future__ import annotations

import importlib.util
from typing import Final

EXTRAS: Final = {
    "reasoning_gym": "reasoning-gym",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "PIL": "vision",
    "syllapy": "ifbench",
}
"""By the module that is imported."""


def missing_extra(module: str) -> str:
    """What to do about a package that is not installed here; empty where it is."""
    if importlib.util.find_spec(module) is not None:
        return ""
    extra = EXTRAS[module]
    what = {"PIL": "Pillow, which decodes images,", "syllapy": "syllapy"}.get(module, extra)
    return f'{what} is not installed; it comes with the extra {extra}: pip install -e ".[{extra}]"'
