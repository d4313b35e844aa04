"""What the models of transformers export, kept as Python keeps bytecode.

To know it, transformers reads the source of all its models whenever it is imported, 46 MB, and reads it twice where a
model is imported too.

Invariants:

* What is kept is used only while each of these files has the size and the time of change that it had.
* It lies where the bytecode of this module lies, and is written under the same conditions; where it cannot be, it is
  found anew each time.
* A transformers that finds its exports by other means is imported as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    Exports = dict[frozenset[str], dict[str, set[str]]]
    """Names by their modules, by the packages that these need."""

FINDS_THEM: Final = "transformers.utils.import_utils"
FUNCTION: Final = "define_import_structure"


class _Kept(msgspec.Struct, frozen=True):
    of: str
    """Digest of the files."""
    exports: list[tuple[list[str], dict[str, list[str]]]]


def keep_exports() -> None:
    """Have transformers take what is kept, when it is imported. To be called before that."""
    if "transformers" not in sys.modules and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds one module. It stays when it has: what another thread imports meanwhile would miss a finder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != FINDS_THEM:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        find = getattr(module, FUNCTION, None)
        if find is not None:
            setattr(module, FUNCTION, _with_kept(find, Path(self.path).parents[1] / "models"))


def _with_kept(find: Callable[[str, str | None], Exports], models: Path) -> Callable[[str, str | None], Exports]:
    """The function, which looks into no file of ``models`` where what it would find is kept."""
    file = Path(cache_from_source(__file__)).with_suffix(".exports")

    @cache
    def of_models() -> Exports:
        digest = _digest_of(models)
        kept = _read(file, digest)
        if kept is None:
            kept = find(str(models), None)
            _keep(file, _Kept(digest, [(sorted(needs), _sorted(modules)) for needs, modules in kept.items()]))
        return kept

    def define(module_path: str, prefix: str | None = None) -> Exports:
        path = Path(module_path)
        if path != models and path != models / "__init__.py":
            return find(module_path, prefix)
        before = f"{prefix}." if prefix else ""
        return {
            needs: {before + name: set(exported) for name, exported in modules.items()}
            for needs, modules in of_models().items()
        }  # a copy, to which transformers adds

    return define


def _sorted(modules: dict[str, set[str]]) -> dict[str, list[str]]:
    return {name: sorted(exported) for name, exported in modules.items()}


def _digest_of(models: Path) -> str:
    """Of name, size and time of change of each source file."""
    digest = hashlib.blake2b(digest_size=16)
    folders = [str(models)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda each: each.path):
                if entry.name.endswith(".py"):
                    facts = entry.stat()
                    digest.update(f"{entry.path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders.append(entry.path)
    return digest.hexdigest()


def _read(file: Path, digest: str) -> Exports | None:
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        return None
    if kept.of != digest:
        return None
    return {
        frozenset(needs): {name: set(exported) for name, exported in modules.items()}
        for needs, modules in kept.exports
    }  # fmt: skip


def _keep(file: Path, kept: _Kept) -> None:
    if sys.dont_write_bytecode:
        return
    partial = ""
    try:
        handle, partial = tempfile.mkstemp(prefix=".", dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            os.fchmod(handle, 0o644)  # as bytecode, which other users read
            out.write(msgspec.json.encode(kept))
        os.replace(partial, file)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
