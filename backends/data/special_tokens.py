"""The special tokens of a checkpoint folder, from ``tokenizer_config.json``, ``generation_config.json`` and
``config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.checkpoint.hf_config import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    AddedToken,
    HfConfig,
    find_config,
    find_tokenizer_config,
)
from penstock.backends.data.problems import DataError
from penstock.backends.data.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from pathlib import Path


class SpecialTokens(NamedTuple):
    """What ends a response, and what fills a row."""

    eos_id: int
    """Ends a demonstration: the tokenizer's end-of-sequence token."""
    stop_ids: tuple[int, ...]
    """Each of these ends a generation; ``eos_id`` is the first."""
    pad_id: int
    """The tokenizer's padding token; ``eos_id`` where it has none. It is always masked."""


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Read the folder's configs; the tokenizer's word comes before the generation's, and that before the model's.

    Raises:
        DataError: none of them names an end-of-sequence token.
        UserFault: a file cannot be read.
    """
    tokenizer = TextTokenizer(folder)
    named = find_tokenizer_config(folder)
    found = (find_config(folder / name, HfConfig) for name in (GENERATION_FILE, CONFIG_FILE))
    configs = [config for config in found if config is not None]
    eos_id = _id_of(tokenizer, named.eos_token)
    if eos_id is None and named.eos_token is not None:
        name = named.eos_token if isinstance(named.eos_token, str) else named.eos_token.content
        raise DataError(
            f"{folder}: tokenizer.json has no token {name!r}, which {TOKENIZER_CONFIG_FILE} names as eos_token; name "
            "one that it has, or copy both files from the same model"
        )
    own = () if eos_id is None else (eos_id,)
    stop_ids = tuple(dict.fromkeys((*own, *(token for config in configs for token in config.eos_token_id))))
    if not stop_ids:
        raise DataError(
            f"{folder} names no end-of-sequence token, so no response could ever end: set eos_token in "
            f"{TOKENIZER_CONFIG_FILE} or eos_token_id in {GENERATION_FILE}"
        )
    pad_ids = [_id_of(tokenizer, named.pad_token), *(config.pad_token_id for config in configs)]
    pad_id = next((i for i in pad_ids if i is not None), stop_ids[0])
    return SpecialTokens(stop_ids[0], stop_ids, pad_id)


def _id_of(tokenizer: TextTokenizer, token: str | AddedToken | None) -> int | None:
    if token is None:
        return None
    return tokenizer.token_id(token if isinstance(token, str) else token.content)
