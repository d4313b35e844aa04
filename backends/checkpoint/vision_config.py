"""What ``config.json`` says about the part of a model that sees: that of Qwen2.5-VL.

Invariants:

* A model without such a part has none here, and one of another family is refused by name; nothing is guessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.checkpoint.hf_config import CONFIG_FILE
from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

SEEING_FAMILY: Final = "qwen2_5_vl"
VISION_PREFIX: Final = "visual."
"""How names of its weights begin in a checkpoint."""


class _Rope(msgspec.Struct, frozen=True):
    mrope_section: tuple[int, int, int]


class _Text(msgspec.Struct, frozen=True):
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None


class _Vision(msgspec.Struct, frozen=True):
    spatial_merge_size: int = 2


class _Whole(msgspec.Struct, frozen=True):
    model_type: str
    image_token_id: int
    vision_config: _Vision
    text_config: _Text = _Text()
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None


class VisionPart(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that seeing depends on besides the weights."""

    folder: str
    """Of the model, with the configuration of its image processor."""
    config: bytes
    """JSON of its ``vision_config``."""
    image_token_id: int
    """Stands once for each square of patches of an image."""
    merge_size: int
    """Patches along a side of such a square."""
    sections: tuple[int, int, int]
    """How many frequencies of the rotary embedding turn by time, row and column."""


def find_vision_part(folder: Path) -> VisionPart | None:
    """As :func:`read_vision_part`; None also where it sees in another way, whose language model alone may be of use."""
    try:
        return read_vision_part(folder)
    except UserFault:
        return None


def read_vision_part(folder: Path) -> VisionPart | None:
    """The part of the model in ``folder`` that sees; None: it takes text only.

    Raises:
        UserFault: ``config.json`` cannot be read, or its model sees in another way than Qwen2.5-VL.
    """
    file = folder / CONFIG_FILE
    try:
        text = file.read_bytes()
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        if "vision_config" not in parts:
            return None
        family = msgspec.json.decode(parts.get("model_type", msgspec.Raw(b"null")))
        if family != SEEING_FAMILY:
            raise UserFault(
                f"{file}: images are computed as {SEEING_FAMILY} does it, found model_type {family!r}; name a model of "
                "that family (model.path)"
            )
        whole = msgspec.json.decode(text, type=_Whole)
    except (OSError, *UNREADABLE) as error:
        raise UserFault(f"{file}: expected the config of a model that sees: {error}") from error
    inner = whole.text_config
    ropes = (inner.rope_parameters, inner.rope_scaling, whole.rope_parameters, whole.rope_scaling)
    rope = next((each for each in ropes if each is not None), None)
    if rope is None:
        raise UserFault(f"{file}: lacks rope_parameters.mrope_section; copy the config anew from its model")
    return VisionPart(
        folder=str(folder),
        config=bytes(parts["vision_config"]),
        image_token_id=whole.image_token_id,
        merge_size=whole.vision_config.spatial_merge_size,
        sections=rope.mrope_section,
    )
