"""A model made on the spot that an earlier run has made alike is taken from the user's cache.

Invariants:

* Nothing here imports torch or transformers, unless a model has to be made.
* The files are those that :func:`~penstock.backends.checkpoint.make.make_model` writes, byte for byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.result_cache import MAX_ENTRY_BYTES, key_of, open_cache

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.checkpoint.options import ModelSize
    from penstock.backends.result_cache import ResultCache

KIND: Final = "made_models"


def is_kept(size: ModelSize, seed: int) -> bool:
    """Whether a model of this size and seed seems to be there; it is checked when it is taken."""
    cache = open_cache(KIND)
    return cache is not None and cache.has(_key(size, seed))


def make_model_or_kept(size: ModelSize, folder: Path, seed: int) -> str:
    """Make this model in ``folder``, or take it; what people should know of that, in a sentence, or nothing."""
    cache = open_cache(KIND)
    if cache is None:
        _make(size, folder, seed)
        return ""
    key = _key(size, seed)
    kept = cache.read(key)
    if kept.content is None:
        _make(size, folder, seed)
        _keep(cache, key, folder)
        return kept.refusal
    files = msgspec.msgpack.decode(kept.content, type=dict[str, bytes])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        assert "/" not in name, "written here, and its digest holds"
        (folder / name).write_bytes(data)
    return ""


def _key(size: ModelSize, seed: int) -> str:
    return key_of({"size": size, "seed": str(seed)})


def _keep(cache: ResultCache, key: str, folder: Path) -> None:
    files = sorted(folder.iterdir())
    if all(file.is_file() for file in files) and sum(file.stat().st_size for file in files) < MAX_ENTRY_BYTES:
        cache.keep(key, msgspec.msgpack.encode({file.name: file.read_bytes() for file in files}))


def _make(size: ModelSize, folder: Path, seed: int) -> None:
    from penstock.backends.checkpoint.make import make_model
    from penstock.backends.checkpoint.terminal import quiet_transformers

    with quiet_transformers():
        make_model(size, folder, seed)
