"""Weights through a folder: one safetensors file per publish, on a disk that learner and engines share.

Invariants:

* An export is written beside its place and appears there whole, by one rename.
* A fetch reads into memory of its own: a file that is removed or changed later, also on a network file system,
  harms nobody, where a mapping of it would end in SIGBUS.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from penstock.backends.weights.digest import PlacedDigest
from penstock.backends.weights.fetched import MappedWeights, check_size, checked_digest
from penstock.backends.weights.keeping import Export, released, superseded
from penstock.backends.weights.positioned import put, read_back
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.backends.weights.spec import DISK
from penstock.backends.weights.stream import placed_tensors, planned
from penstock.backends.weights.tensor_file import parse_layout, tensor_bytes, tensor_views
from penstock.messages.weights import WeightManifest

if TYPE_CHECKING:
    from penstock.backends.weights.stream import AnyWeights
    from penstock.backends.weights.tensor_file import Layout
    from penstock.messages.weights import Canary

FILE_NAME: Final = "model.safetensors"
READ_BYTES: Final = 64 << 20

_EXPORT: Final = re.compile(
    r"weights-(?P<epoch>\d+)-(?P<version>\d+)-(?P<publish>\d+)(?P<base>-base)?(?P<partial>\.partial)?"
)


class DiskExporter:
    """The learner's end. What earlier incarnations left stays as :mod:`~penstock.backends.weights.keeping` says."""

    def __init__(self, folder: Path, learner_epoch: int) -> None:
        self._folder = folder.absolute()
        self._epoch = learner_epoch
        self._own: list[Export] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove([export for export in self._inherited(with_partial=True) if export.is_partial])
        except OSError as error:
            raise WeightExportError(f"{self._folder} cannot be used for weights: {error.strerror}") from error

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        place = self._folder / f"weights-{self._epoch}-{version}-{publish}"
        manifest = self._export(tensors, Export(self._epoch, version, publish, place))
        self._remove(superseded(self._inherited(), version))
        return msgspec.structs.replace(manifest, canary=canary)

    def export_base(self, tensors: AnyWeights, *, version: int, publish: int) -> WeightManifest:
        """See :class:`~penstock.backends.weights.protocol.BaseExporter`."""
        place = self._folder / f"weights-{self._epoch}-{version}-{publish}-base"
        return self._export(tensors, Export(self._epoch, version, publish, place, is_base=True))

    def _export(self, tensors: AnyWeights, new: Export) -> WeightManifest:
        layout, place, version = planned(tensors), new.path, new.version
        partial = place.with_name(f"{place.name}.partial")
        try:
            digest = self._write_beside(partial, place, layout, tensors)
        except OSError as error:
            raise WeightExportError(
                f"version {version} ({layout.size_bytes:,} bytes) cannot be written to {place}: {error.strerror}"
            ) from error
        self._own = [export for export in self._own if export.path != place]
        self._own.append(new)
        return WeightManifest(
            version=version,
            publish=new.publish,
            learner_epoch=new.epoch,
            transport=DISK,
            location=str(place),
            size_bytes=layout.size_bytes,
            digest=digest,
        )

    def release(self, below_version: int) -> None:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        self._remove(released(self._own, self._inherited(), below_version))

    def close(self) -> None:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        self._remove([*self._inherited(with_partial=True), *self._own])

    @staticmethod
    def _write_beside(partial: Path, place: Path, layout: Layout, tensors: AnyWeights) -> str:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            digest = _write(partial / FILE_NAME, layout, tensors)
            shutil.rmtree(place, ignore_errors=True)
            partial.rename(place)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return digest

    def _inherited(self, *, with_partial: bool = False) -> list[Export]:
        # Looked up each time: a predecessor that was only asleep may have added to it.
        paths = list(self._folder.iterdir()) if self._folder.is_dir() else []
        found = [Export.named(match, path) for path in paths if (match := _EXPORT.fullmatch(path.name))]
        return [export for export in found if export.epoch < self._epoch and (with_partial or not export.is_partial)]

    def _remove(self, exports: list[Export]) -> None:
        for export in exports:
            shutil.rmtree(export.path, ignore_errors=True)
        self._own = [export for export in self._own if export not in exports]


def fetch_disk(manifest: WeightManifest) -> MappedWeights:
    """Read the export of the manifest into memory and check it.

    Raises:
        WeightFetchError: it is gone, not readable, or not what the manifest describes.
    """
    path = Path(manifest.location) / FILE_NAME
    try:
        with path.open("rb", buffering=0) as file:
            check_size(manifest, os.fstat(file.fileno()).st_size)
            buffer = torch.empty(manifest.size_bytes, dtype=torch.uint8)
            data = buffer.numpy().data
            _read_into(file.fileno(), data, manifest)
    except FileNotFoundError:
        raise WeightFetchError(
            f"{path} is gone: version {manifest.version} was released or its run has ended, or this process does not "
            "see the learner's disk (on several hosts run.folder must be on a shared file system)"
        ) from None
    except OSError as error:
        raise WeightFetchError(f"{path} cannot be read: {error.strerror}") from error
    digest = checked_digest(manifest, data)
    return MappedWeights(tensor_views(parse_layout(data), data), digest)


def _write(path: Path, layout: Layout, tensors: AnyWeights) -> str:
    with path.open("x+b", buffering=0) as file:
        descriptor = file.fileno()
        os.ftruncate(descriptor, layout.size_bytes)
        with PlacedDigest(layout.size_bytes, functools.partial(read_back, descriptor)) as digest:
            put(descriptor, memoryview(layout.header), 0)
            digest.wrote(0, len(layout.header))
            for place, tensor in placed_tensors(tensors, layout):
                put(descriptor, tensor_bytes(tensor), place.start)
                digest.wrote(place.start, place.size_bytes)
            os.fsync(descriptor)
            return digest.hexdigest()


def _read_into(descriptor: int, data: memoryview[int], manifest: WeightManifest) -> None:
    while len(data):
        num_read = os.readv(descriptor, [data[:READ_BYTES]])
        if not num_read:
            raise WeightFetchError(f"{manifest.location}: the file ended {len(data)} bytes early")
        data = data[num_read:]
