"""The files of a tokenizer and an image processor, which go with a model from folder to folder as they are."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_FILES: Final = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "*processor_config.json",
)  # fmt: skip
TOKENIZER_FILE: Final = "tokenizer.json"
TIKTOKEN_FILE: Final = "tiktoken.model"
CONVERT: Final = (
    f"it has {TIKTOKEN_FILE} and no {TOKENIZER_FILE}, and its own code, which would read that, is not run: penstock "
    "convert MODEL COPY writes a copy with one"
)


def has_tiktoken_only(folder: Path) -> bool:
    """Whether a tokenizer is there in the one form that needs code of the model's own."""
    return (folder / TIKTOKEN_FILE).is_file() and not (folder / TOKENIZER_FILE).is_file()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer from one model folder to another.

    Raises:
        OSError: the disk refuses.
    """
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
