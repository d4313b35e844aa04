"""By which of transformers' automatic classes the model of a folder is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from penstock.backends.checkpoint.vision_config import find_vision_part

if TYPE_CHECKING:
    from pathlib import Path


def auto_class(folder: Path) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """The class for models that see where the model does, and is of a family that we compute."""
    return AutoModelForCausalLM if find_vision_part(folder) is None else AutoModelForImageTextToText
