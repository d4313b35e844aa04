"""What of a checkpoint's configuration is needed to drive a server of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path


class ModelShape(NamedTuple):
    """What of the model is needed here."""

    vocab_size: int
    """Rows of the embedding."""
    num_kv_heads: int


class _Config(msgspec.Struct):
    vocab_size: int | None = None
    num_key_value_heads: int | None = None
    num_attention_heads: int | None = None
    text_config: _Config | None = None


def shape_of(model_folder: Path) -> ModelShape:
    """What the checkpoint's configuration says.

    Raises:
        UserFault: it does not say it.
    """
    path = model_folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserFault(f"{path} cannot be read: {error}") from None
    inner = config if config.vocab_size is not None else (config.text_config or config)
    heads = inner.num_key_value_heads or inner.num_attention_heads
    if inner.vocab_size is None or heads is None:
        raise UserFault(f"{path}: vocab_size and num_attention_heads are needed; this is no causal language model")
    return ModelShape(inner.vocab_size, heads)
