"""The configuration of a model, which goes with it from folder to folder."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, cast

import msgspec

from penstock.backends.checkpoint.hf_config import BUILT_AS, CONFIG_FILE, GENERATION_FILE

if TYPE_CHECKING:
    from pathlib import Path


def write_config(source: Path, target: Path, dtype: str | None, quantization: dict[str, Any] | None = None) -> None:
    """Copy ``config.json``, and the generation config where there is one, from one folder to another.

    Args:
        source: the one.
        target: the other.
        dtype: that the model has there; None leaves what is said.
        quantization: how its weights are quantized there, if they are; what is said of that already stays.

    Raises:
        OSError: the disk refuses.
    """
    config = cast("dict[str, Any]", msgspec.json.decode((source / CONFIG_FILE).read_bytes()))
    # No code goes with it, and none is needed: what transformers does not have was refused.
    config.pop("auto_map", None)
    if (model_type := config.get("model_type")) in BUILT_AS:
        config["model_type"] = BUILT_AS[model_type]
    if quantization is not None:
        config.setdefault("quantization_config", quantization)
    elif dtype is not None:
        config.pop("quantization_config", None)
        _set_dtype(config, dtype)
    (target / CONFIG_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(config)) + b"\n")
    generation = source / GENERATION_FILE
    if generation.is_file():
        shutil.copyfile(generation, target / generation.name)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Of the whole and of its parts, which some architectures have; under the name that was used until transformers 5
    as well, where it is there."""
    config["dtype"] = dtype
    if "torch_dtype" in config:
        config["torch_dtype"] = dtype
    for part in config.values():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            _set_dtype(cast("dict[str, Any]", part), dtype)
