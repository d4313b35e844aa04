"""The architecture of a scenario's model, as far as this machine can know it: from ``config.json`` of the checkpoint,
from the copy of it that ``model.config`` names, or from the table of the models that ``model.make`` makes.

Nothing here imports torch, so that the rules can ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, DecoderConfig, find_config
from penstock.backends.checkpoint.options import SEEING_MODEL
from penstock.backends.learners.megatron.bridge.architecture import architecture_of, decode_architecture
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.runtime.scenario.source import KeyPath
    from penstock.runtime.scenario.structure import Scenario

MODEL_PATH: KeyPath = ("model", "path")
MODEL_CONFIG: KeyPath = ("model", "config")
MODEL_MAKE: KeyPath = ("model", "make")
_MADE: Final[dict[str, Any]] = {
    "model_type": "qwen3", "vocab_size": 79, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
_MADE_SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                      "intermediate_size")  # fmt: skip
MADE_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "xs": _MADE | dict(zip(_MADE_SIZES, (64, 2, 2, 1, 32, 192), strict=True)),
    "s": _MADE | dict(zip(_MADE_SIZES, (96, 3, 3, 1, 32, 256), strict=True)),
    "m": _MADE | dict(zip(_MADE_SIZES, (128, 4, 4, 2, 32, 384), strict=True)),
    "moe_xs": _MADE | dict(zip(_MADE_SIZES, (64, 2, 2, 2, 32, 192), strict=True)) | {
        "model_type": "qwen3_moe", "tie_word_embeddings": False, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "norm_topk_prob": True,
    },
}  # fmt: skip
"""Of the models of ``model.make``."""


class Found(NamedTuple):
    """An architecture, and where it was found."""

    architecture: Architecture
    key: KeyPath
    """Key of the scenario that led to it."""


class UnreadableModelError(UserFault):
    """A model whose architecture cannot be told, with the key of the scenario that names it."""

    def __init__(self, key: KeyPath, text: str) -> None:
        super().__init__(key, text)
        self.key: KeyPath = key
        self.text = text

    def __str__(self) -> str:
        return self.text


def find_architecture(scenario: Scenario) -> Found | None:
    """What the Megatron learner would build; None where neither the checkpoint nor a copy of its config is here.

    Raises:
        UnreadableModelError: what is here cannot be read, is of no known family, or is not what the copy says.
    """
    model = scenario.model
    if model.make == SEEING_MODEL:
        raise UnreadableModelError(MODEL_MAKE, "a model that sees is of no family that the Megatron learner builds")
    if model.make is not None:
        text = msgspec.json.encode(MADE_CONFIGS[model.make])
        return Found(decode_architecture(text, f"model.make: {model.make}"), MODEL_MAKE)
    own = Path(model.path) / CONFIG_FILE if model.path is not None else None
    checkpoint = _read(own, MODEL_PATH) if own is not None and own.is_file() else None
    copy = None
    # A run that is gone on with has its checkpoint, and may well have outlived the copy.
    if model.config is not None and (checkpoint is None or Path(model.config).is_file()):
        copy = _read(Path(model.config), MODEL_CONFIG)
    if checkpoint is not None and copy is not None and checkpoint != copy:
        raise UnreadableModelError(
            MODEL_CONFIG,
            f"{model.config} says something else than {own}, which is what is trained; copy that one, or remove the "
            "key",
        )
    if checkpoint is not None:
        return Found(checkpoint, MODEL_PATH)
    return None if copy is None else Found(copy, MODEL_CONFIG)


def _read(file: Path, key: KeyPath) -> Architecture:
    try:
        config = find_config(file, DecoderConfig)
        if config is None:
            raise UserFault(
                f"{file} cannot be read (no such file or directory); expected a copy of the model's {CONFIG_FILE}"
            )
        return architecture_of(config, str(file))
    except UserFault as error:
        raise UnreadableModelError(key, str(error)) from None
