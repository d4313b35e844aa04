"""The configuration of a model for transformers, which runs no code that comes with a checkpoint.

Invariants:

* A checkpoint whose ``model_type`` transformers does not have, and that is built as one that it has, is opened as that
  one: see :data:`BUILT_AS`.
"""

# transformers is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transformers import AutoConfig, PreTrainedConfig

from penstock.backends.checkpoint.hf_config import BUILT_AS, CONFIG_FILE, HfConfig, find_config

if TYPE_CHECKING:
    from pathlib import Path

CUSTOM_CODE: Final = ("auto_map", "model_type")
"""What such a config says that holds for the model's own code alone."""


def open_config(folder: Path) -> PreTrainedConfig:
    """The config of a model folder.

    Raises:
        OSError: there is none.
        ValueError: transformers does not have the model.
        UserFault: it cannot be read.
    """
    said = find_config(folder / CONFIG_FILE, HfConfig)
    built_as = BUILT_AS.get(said.model_type) if said is not None else None
    config: PreTrainedConfig
    if built_as is None:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return config
    whole, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    config = AutoConfig.for_model(built_as, **{key: whole[key] for key in whole if key not in CUSTOM_CODE})
    return config
