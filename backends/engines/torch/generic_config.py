"""What the embedded engine has to know of a model that it computes by transformers' own layers; see :mod:`.generic`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, HfConfig, need, read_config
from penstock.backends.checkpoint.model_config import (
    DEFAULT_MAX_POSITIONS,
    ExpertsConfig,
    ModelConfig,
    OtherArchitectureFault,
    read_model_config,
)


class ModelLimits(Protocol):
    """What a request is held to, whatever computes it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def experts(self) -> ExpertsConfig | None: ...


class GenericConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model of any architecture that transformers knows."""

    folder: Path
    vocab_size: int
    max_positions: int
    """Longest context that the model was made for, in tokens."""
    reason: str
    """Why it is not computed by the engine's own forward pass."""
    experts: ExpertsConfig | None = None
    """Always None: which expert a token went to is not recorded."""

    @property
    def notice(self) -> str:
        """What people should know of it."""
        return (
            f"the embedded engine computes this model by transformers' own layers and cache, several times slower than "
            f"by its own ({self.reason}); engines.backend: sglang is the fast way where it serves the model"
        )


def read_engine_config(folder: Path) -> ModelConfig | GenericConfig:
    """The model in ``folder``, for the engine's own forward pass if that computes it, else for transformers'.

    Raises:
        UserFault: no such folder, no ``config.json``, one that is malformed, or of a model that transformers does not
            have as a causal one.
    """
    try:
        return read_model_config(folder)
    except OtherArchitectureFault as fault:
        raw = read_config(folder, HfConfig)
        need(raw, str(folder / CONFIG_FILE), "vocab_size")
        if not _is_causal(raw):
            raise
        return GenericConfig(
            folder=folder,
            vocab_size=raw.vocab_size,
            max_positions=raw.max_position_embeddings or DEFAULT_MAX_POSITIONS,
            reason=str(fault).removeprefix(f"{folder / CONFIG_FILE}: "),
        )


def _is_causal(raw: HfConfig) -> bool:
    """Whether transformers has this model as a causal one, under the name of its architecture."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    built = NAMES.get(raw.model_type)
    return built is not None and (not raw.architectures or built in raw.architectures)
