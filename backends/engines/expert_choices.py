"""Which experts an engine chose, as they travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.backends.checkpoint.hf_config import CONFIG_FILE, DecoderConfig, read_config
from penstock.messages.errors import UserFault
from penstock.messages.samples import ExpertChoices

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


class ExpertShape(NamedTuple):
    """Of a model with experts."""

    num_layers: int
    """All, those without experts too."""
    per_token: int
    num_experts: int


def read_expert_shape(model_folder: Path) -> ExpertShape:
    """As ``config.json`` says it.

    Raises:
        UserFault: the model has no experts.
    """
    config = read_config(model_folder, DecoderConfig)
    if not (config.expert_count and config.num_experts_per_tok and config.num_hidden_layers):
        raise UserFault(
            f"engines.record_experts is true, and the model of {model_folder / CONFIG_FILE} has no experts; set it to "
            "false"
        )
    return ExpertShape(config.num_hidden_layers, config.num_experts_per_tok, config.expert_count)


def pack_experts(chosen: NDArray[np.integer], *, num_experts: int) -> ExpertChoices:
    """From ids ``[N, layers, k]``; one that is no expert of ``num_experts`` stands for one that is not known."""
    _, num_layers, per_token = chosen.shape
    id_bytes = 1 if num_experts <= np.iinfo(np.uint8).max else 2
    unknown = np.iinfo(np.uint8 if id_bytes == 1 else np.uint16).max
    ids = np.where((chosen >= 0) & (chosen < num_experts), chosen, unknown).astype(f"<u{id_bytes}")
    return ExpertChoices(num_layers=num_layers, per_token=per_token, id_bytes=id_bytes, ids=ids.tobytes())
