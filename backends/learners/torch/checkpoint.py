"""Checkpoints in Hugging Face format, each whole or not there at all.

A folder is written beside its final name and renamed to it when every byte is on disk, so whoever sees the name sees
a whole checkpoint, also after a crash. What a crash left unfinished is removed by the next write.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.learners.torch.model import PackedModel

TOKENIZER_FILES: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)


def checkpoint_name(version: int) -> str:
    """The folder of a version; names sort as versions do."""
    return f"version-{version:07d}"


def write_checkpoint(model: PackedModel, *, source: Path, target: Path) -> None:
    """Write weights, config and the tokenizer of ``source`` to the folder ``target``, replacing it if it is there.

    Raises:
        OSError: the disk refuses. ``target`` is then as it was.
    """
    partial = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f".{target.name}.replaced")
    for leftover in (partial, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    model.save(partial)
    _copy_tokenizer(source, partial)
    for path in sorted(partial.rglob("*")):
        _sync(path)
    _sync(partial)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    _sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
