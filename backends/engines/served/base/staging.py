"""Brings weights to where a server of this node can load them, and checks them before it is told to.

A server loads a folder. What the learner wrote is made part of one, next to the configuration and the tokenizer: by a
hard link on the same disk, and by a link to this process's own descriptor elsewhere (shared memory). Either way the
bytes stay readable when the learner lets go of them, and nothing is copied.

Invariants:

* ``stage`` returns only what has the manifest's size and digest, and the names, shapes and dtypes of the model that the
  server runs, with finite values: whatever else it is given ends the server, or is passed over in silence.
* The mapping is private, so nothing here changes what others read.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.versions import label_of
from penstock.backends.engines.served.expectation import check_tensors, table_of
from penstock.backends.weights.digest import digest_of
from penstock.backends.weights.disk import FILE_NAME
from penstock.backends.weights.fetched import check_size, checked_digest, is_finite
from penstock.backends.weights.network import LANDING
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.spec import DISK, NETWORK, SHARED_MEMORY
from penstock.backends.weights.tensor_file import parse_layout, tensor_views

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from penstock.backends.engines.served.base.dialect import Endpoint
    from penstock.backends.engines.served.expectation import Expectation
    from penstock.messages.weights import WeightManifest

WEIGHT_SUFFIXES: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")
FILE_TRANSPORTS: Final = (DISK, SHARED_MEMORY, NETWORK)
LANDED: Final = Path("/proc/self/fd")
"""Where what came over the network has its names; a link to one would be another file system's."""


class StagedFile:
    """A folder that a server can load, with the tensors in it."""

    def __init__(self, manifest: WeightManifest, folder: Path, descriptor: int, mapping: mmap.mmap) -> None:
        self.manifest = manifest
        self.folder = folder
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = mapping
        self._layout = parse_layout(memoryview(mapping))

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name → CPU tensor, a view on the file."""
        assert self._mapping is not None, "these weights were let go of"
        return tensor_views(self._layout, self._mapping)

    def check(self, expected: Expectation) -> None:
        """See the module.

        Raises:
            WeightFetchError: they are not for this model, or not finite.
        """
        check_tensors(table_of(self._layout), expected)
        for name, tensor in self.tensors.items():
            if not is_finite(tensor):
                raise WeightFetchError(f"{name} holds values that are not finite: the learner has diverged")

    def digest_now(self) -> str:
        """Of the file as it is now: the server reads it itself, and it may have been changed since it was checked."""
        assert self._mapping is not None, "these weights were let go of"
        return digest_of(memoryview(self._mapping))

    async def load(self, endpoint: Endpoint, label: str, *, flush: bool, timeout_s: float) -> None:
        """Have a server of this node load the folder.

        Raises:
            CallError: it could not; it may hold part of these weights.
        """
        await endpoint.load_folder(self.folder, label, flush=flush, timeout_s=timeout_s)

    def close(self) -> None:
        """Let go of the bytes and remove the folder. May be called more than once."""
        if self._mapping is None:
            return
        self._mapping = None  # closed with the last view on it
        os.close(self._descriptor)
        shutil.rmtree(self.folder, ignore_errors=True)


def stage(manifest: WeightManifest, *, model_folder: Path, folder: Path, expected: Expectation) -> StagedFile:
    """Make a folder in ``folder`` that a server which was started from ``model_folder`` can load.

    Raises:
        WeightFetchError: the weights are gone, not those of the manifest, or not those of this model.
    """
    path, descriptor = _opened(manifest)
    place = folder / label_of(manifest)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        check_size(manifest, os.fstat(descriptor).st_size)
        mapping = mmap.mmap(descriptor, manifest.size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        if manifest.transport != NETWORK:  # hashed as it landed, in memory of this process
            checked_digest(manifest, memoryview(mapping))
        undo.callback(shutil.rmtree, place, ignore_errors=True)
        try:
            _make_folder(place, path, descriptor, model_folder)
        except OSError as error:
            raise WeightFetchError(f"{place} cannot be made: {error.strerror}") from error
        staged = StagedFile(manifest, place, descriptor, mapping)
        staged.check(expected)
        undo.pop_all()
    return staged


def _opened(manifest: WeightManifest) -> tuple[Path, int]:
    if manifest.transport == NETWORK:
        descriptor = LANDING.land(manifest).opened()
        return LANDED / str(descriptor), descriptor
    path = Path(manifest.location)
    path = path / FILE_NAME if manifest.transport == DISK else path
    try:
        return path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightFetchError(
            f"{path} cannot be read ({error.strerror}): version {manifest.version} was released, its run has ended, or "
            "this node does not see the learner's disk"
        ) from None


def _make_folder(place: Path, path: Path, descriptor: int, model_folder: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for other in model_folder.iterdir():
        if other.is_file() and not other.name.endswith(WEIGHT_SUFFIXES):
            (place / other.name).symlink_to(other.absolute())
    target = place / FILE_NAME
    if path.parent == LANDED or not _is_linked(path, target):
        target.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")


def _is_linked(path: Path, target: Path) -> bool:
    """Make it another name of the file, where both are on one file system that knows that."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP):
            raise
        return False
    return True
