"""Results that took seconds to compute, kept for later runs in the user's cache folder.

Kept is only what is a function, bit for bit, of what its key is made of; who keeps something answers for that.

Invariants:

* An entry is read only if its digest holds. One that does not is refused, with a sentence for people, and made anew.
* A file appears whole under its name, so runs beside each other share the folder; whoever is later writes the same.
* Beyond ``MAX_TOTAL_BYTES`` of a kind those go that were used longest ago.
* No fault of the cache ends a run: what cannot be kept is computed again next time.

``PENSTOCK_CACHE`` names another folder than ``~/.cache/penstock``, or says ``off``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import penstock.backends
from penstock.backends.user_cache import user_cache
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping

CACHE_VARIABLE: Final = "PENSTOCK_CACHE"
OFF: Final = "off"
MAX_ENTRY_BYTES: Final = 64 << 20
MAX_TOTAL_BYTES: Final = 512 << 20
DIGEST_BYTES: Final = 32
COMPUTING_FOLDERS: Final = ("checkpoint", "learners")
"""Whose code has a part in what is kept."""
COMPUTING_PACKAGES: Final = "torch transformers numpy tokenizers safetensors"
COMPUTING_VARIABLES: Final = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_")
"""How the names of environment variables begin that choose between kernels which round differently."""
THREADS: Final = "_NUM_THREADS"
"""How those end that say how many threads there are before somebody says it to torch, as all of ours do."""

_log: Final = logging.getLogger(__name__)


class Kept(NamedTuple):
    """What a cache has under a key."""

    content: bytes | None = None
    """None: nothing that can be used."""
    file: Path | None = None
    refusal: str = ""
    """Why what lies there is not used, for people; empty where there is nothing wrong."""


class ResultCache:
    """The results of one kind."""

    def __init__(self, folder: Path) -> None:
        """Holds ``*.bin`` files in this folder, which is made when there is something to keep."""
        self._folder = folder

    def has(self, key: str) -> bool:
        """Whether anything is kept under this key, damaged or not."""
        return (self._folder / f"{key}.bin").is_file()

    def read(self, key: str) -> Kept:
        """What is kept under this key."""
        file = self._folder / f"{key}.bin"
        try:
            with file.open("rb") as handle:
                data = handle.read(MAX_ENTRY_BYTES + DIGEST_BYTES + 1)
        except FileNotFoundError:
            return Kept()
        except OSError as error:
            return Kept(refusal=f"{file} cannot be read ({error.strerror}), so what it keeps is computed again")
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if digest != _digest(key.encode() + content):
            return Kept(refusal=f"{file} is damaged (its digest is another), so what it kept is computed again")
        with contextlib.suppress(OSError):  # a folder of somebody else's, or evicted meanwhile
            os.utime(file)
        return Kept(content, file)

    def keep(self, key: str, content: bytes) -> None:
        """Keep this, unless it is too large or the disk refuses, which the log says."""
        if len(content) > MAX_ENTRY_BYTES:
            return
        partial = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, partial = tempfile.mkstemp(prefix=".", dir=self._folder)
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key.encode() + content) + content)
            os.replace(partial, self._folder / f"{key}.bin")
            self._evict()
        except OSError as error:
            _log.warning("not kept in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                os.unlink(partial)

    def _evict(self) -> None:
        found: list[tuple[float, int, Path]] = []
        for file in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another run evicts as well, or gives it its name
                facts = file.stat()
                found.append((facts.st_mtime, facts.st_size, file))
        total = 0
        for _, size_bytes, file in sorted(found, reverse=True):
            total += size_bytes
            if total > MAX_TOTAL_BYTES:
                file.unlink(missing_ok=True)


def open_cache(kind: str) -> ResultCache | None:
    """The user's cache of this kind of results; None where it is switched off, or this user has no home folder."""
    given = os.environ.get(CACHE_VARIABLE, "")
    if given == OFF:
        return None
    if given:
        return ResultCache(Path(given).expanduser().absolute() / kind)
    try:
        return ResultCache(user_cache("the cache of results", CACHE_VARIABLE) / kind)
    except UserFault:
        return None


def key_of(parts: Mapping[str, bytes | str]) -> str:
    """Names what is computed from these parts on this machine, by this code and these libraries."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, part in sorted((computing_facts() | dict(parts)).items()):
        data = part.encode() if isinstance(part, str) else part
        digest.update(f"{len(name)} {name} {len(data)} ".encode())
        digest.update(data)
    return digest.hexdigest()


def computing_facts() -> dict[str, bytes | str]:
    """What a sum of floats depends on beside its terms: versions, processor, environment, and our own code."""
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(COMPUTING_VARIABLES) and not name.endswith(THREADS)
    )
    return {
        "variables": repr(variables),
        "processor": _processor(),
        "python": platform.python_version(),
        "packages": repr([(name, _version(name)) for name in COMPUTING_PACKAGES.split()]),
        "code": _code(),
    }


@cache
def _code() -> bytes:
    home = Path(penstock.backends.__path__[0])
    digest = hashlib.blake2b()
    for folder in COMPUTING_FOLDERS:
        for file in sorted((home / folder).rglob("*.py")):
            data = file.read_bytes()
            digest.update(f"{file.relative_to(home)} {len(data)} ".encode())
            digest.update(data)
    return digest.digest()


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _processor() -> str:
    """Model and instruction sets of the first processor, as the kernel names them."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    telling = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
    return "\n".join(line for line in first.splitlines() if line.startswith(telling))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
