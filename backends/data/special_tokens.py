"""The special tokens of a checkpoint folder, from ``tokenizer_config.json``, ``generation_config.json`` and
``config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from penstock.backends.data.problems import DataError
from penstock.backends.data.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
GENERATION_CONFIG: Final = "generation_config.json"
MODEL_CONFIG: Final = "config.json"


FormT = TypeVar("FormT", bound=msgspec.Struct)


class SpecialTokens(NamedTuple):
    """What ends a response, and what fills a row."""

    eos_id: int
    """Ends a demonstration: the tokenizer's end-of-sequence token."""
    stop_ids: tuple[int, ...]
    """Each of these ends a generation; ``eos_id`` is the first."""
    pad_id: int
    """The tokenizer's padding token; ``eos_id`` where it has none. It is always masked."""


class _Named(msgspec.Struct):
    content: str


class _TokenizerConfig(msgspec.Struct):
    eos_token: str | _Named | None = None
    pad_token: str | _Named | None = None


class _TextConfig(msgspec.Struct):
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    vocab_size: int | None = None


class _Config(_TextConfig):
    text_config: _TextConfig | None = None
    """Where multimodal checkpoints keep the language model's."""


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Read the folder's configs; the tokenizer's word comes before the generation's, and that before the model's.

    Raises:
        DataError: none of them names an end-of-sequence token, or a file cannot be read.
    """
    tokenizer = TextTokenizer(folder)
    named = _read(folder / TOKENIZER_CONFIG, _TokenizerConfig) or _TokenizerConfig()
    configs = [_read(folder / name, _Config) for name in (GENERATION_CONFIG, MODEL_CONFIG)]
    texts = [part for config in configs if config for part in (config, config.text_config) if part]
    eos_id = _id_of(tokenizer, named.eos_token)
    if eos_id is None and named.eos_token is not None:
        name = named.eos_token if isinstance(named.eos_token, str) else named.eos_token.content
        raise DataError(
            f"{folder}: tokenizer.json has no token {name!r}, which {TOKENIZER_CONFIG} names as eos_token; name one "
            "that it has, or copy both files from the same model"
        )
    candidates: list[int] = [] if eos_id is None else [eos_id]
    for part in texts:
        candidates.extend(_as_ids(part.eos_token_id))
    stop_ids = tuple(dict.fromkeys(candidates))
    if not stop_ids:
        raise DataError(
            f"{folder} names no end-of-sequence token, so no response could ever end: set eos_token in "
            f"{TOKENIZER_CONFIG} or eos_token_id in {GENERATION_CONFIG}"
        )
    pad_ids = [_id_of(tokenizer, named.pad_token), *(part.pad_token_id for part in texts)]
    pad_id = next((i for i in pad_ids if i is not None), stop_ids[0])
    return SpecialTokens(stop_ids[0], stop_ids, pad_id)


def vocabulary_size(folder: Path) -> int | None:
    """Of the model, as its config says; None where it does not.

    Raises:
        DataError: the config cannot be read.
    """
    config = _read(folder / MODEL_CONFIG, _Config)
    return next((part.vocab_size for part in (config, config and config.text_config) if part and part.vocab_size), None)


def _id_of(tokenizer: TextTokenizer, token: str | _Named | None) -> int | None:
    if token is None:
        return None
    return tokenizer.token_id(token if isinstance(token, str) else token.content)


def _as_ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


def _read(path: Path, form: type[FormT]) -> FormT | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: not the JSON that belongs there: {error}; copy it anew from its model") from error
