"""Weights through shared memory: one file in ``/dev/shm`` per publish, mapped by each engine of the same host.

Invariants:

* A segment's name carries the run's id, so whoever knows the run can remove what a killed learner left
  (:mod:`~penstock.backends.weights.segments`). Nothing else tracks it; in particular no resource tracker, which
  would remove the segment when an engine that merely looked at it ends.
* The pages of a tensor are there before it is written: a full ``/dev/shm`` is an error here, and not a SIGBUS in
  whoever touches the page.
* A mapping outlives the removal of its name, so a release takes nothing from an engine that has fetched.
* Engines map privately: what an engine writes by mistake stays its own. What somebody else writes into the segment does
  reach a mapping that has not written there itself, so engines have it watched from before they hash it
  (:mod:`~penstock.backends.weights.lease`), and hash it again when they have loaded where that could not be, or
  somebody came.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.weights.digest import PlacedDigest
from penstock.backends.weights.fetched import MappedWeights, check_size, checked_digest
from penstock.backends.weights.keeping import released, superseded
from penstock.backends.weights.lease import read_lease
from penstock.backends.weights.pages import WORTH_BYTES, PagesAhead, address_of, can_populate
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.backends.weights.segments import (
    SHARED_FOLDER,
    Segment,
    check_run_id,
    is_segment_name,
    segment_name,
    segments_of,
)
from penstock.backends.weights.segments import sweep as sweep
from penstock.backends.weights.spec import SHARED_MEMORY
from penstock.backends.weights.stream import placed_tensors, planned
from penstock.backends.weights.tensor_file import parse_layout, placed_view, tensor_views
from penstock.messages.weights import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.backends.weights.stream import AnyWeights
    from penstock.backends.weights.tensor_file import Layout
    from penstock.messages.weights import Canary


class SharedMemoryExporter:
    """The learner's end. What earlier incarnations left stays as :mod:`~penstock.backends.weights.keeping` says, so
    engines that start in between still find weights."""

    def __init__(self, run_id: str, learner_epoch: int, folder: Path = SHARED_FOLDER) -> None:
        check_run_id(run_id)
        self._run_id = run_id
        self._epoch = learner_epoch
        self._folder = folder
        self._own: list[Segment] = []
        self._remove([segment for segment in self._inherited(with_partial=True) if segment.is_partial])

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        manifest = self._export(tensors, Segment(self._epoch, version, publish, self._folder))
        self._remove(superseded(self._inherited(), version))
        return msgspec.structs.replace(manifest, canary=canary)

    def export_base(self, tensors: AnyWeights, *, version: int, publish: int) -> WeightManifest:
        """See :class:`~penstock.backends.weights.protocol.BaseExporter`."""
        return self._export(tensors, Segment(self._epoch, version, publish, self._folder, is_base=True))

    def _export(self, tensors: AnyWeights, segment: Segment) -> WeightManifest:
        layout, (epoch, version, publish, *_) = planned(tensors), segment
        path = self._folder / segment_name(self._run_id, epoch, version, publish, is_base=segment.is_base)
        with _created(path, layout.size_bytes) as (mapping, pages):
            digest = _filled(path, mapping, pages, layout, tensors)
        new = segment._replace(path=path)
        # Whoever maps it keeps it.
        self._remove([old for old in self._own if (old[:3], old.is_base) == (new[:3], new.is_base)])
        self._own.append(new)
        return WeightManifest(
            version=version,
            publish=publish,
            learner_epoch=epoch,
            transport=SHARED_MEMORY,
            location=str(path),
            size_bytes=layout.size_bytes,
            digest=digest,
        )

    def release(self, below_version: int) -> None:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        self._remove(released(self._own, self._inherited(), below_version))

    def close(self) -> None:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        self._remove([*self._inherited(with_partial=True), *self._own])

    def _inherited(self, *, with_partial: bool = False) -> list[Segment]:
        # Looked up each time: a predecessor that was only asleep may have added to it.
        return [
            segment
            for segment in segments_of(self._run_id, self._folder)
            if segment.epoch < self._epoch and (with_partial or not segment.is_partial)
        ]

    def _remove(self, segments: list[Segment]) -> None:
        for segment in segments:
            segment.path.unlink(missing_ok=True)
        self._own = [segment for segment in self._own if segment not in segments]


def _filled(path: Path, mapping: mmap.mmap, pages: PagesAhead | None, layout: Layout, tensors: AnyWeights) -> str:
    """Write everything to its place; the digest."""
    data = memoryview(mapping)

    def await_pages(start: int, size_bytes: int) -> None:
        if pages is not None:
            with _refused_for_room(path, layout.size_bytes):
                pages.wait(start, size_bytes)

    with PlacedDigest(layout.size_bytes, lambda start, size_bytes: data[start : start + size_bytes]) as digest:
        await_pages(0, len(layout.header))
        mapping[: len(layout.header)] = layout.header
        digest.wrote(0, len(layout.header))
        for place, tensor in placed_tensors(tensors, layout):
            await_pages(place.start, place.size_bytes)
            placed_view(place, mapping).copy_(tensor.detach())
            digest.wrote(place.start, place.size_bytes)
        return digest.hexdigest()


def fetch_shared_memory(manifest: WeightManifest) -> MappedWeights:
    """Map the segment of the manifest and check it; nothing is copied.

    Raises:
        WeightFetchError: it is gone, not readable, or not what the manifest describes.
    """
    path = Path(manifest.location)
    if not is_segment_name(path.name):
        raise WeightFetchError(f"{manifest.location!r} is no shared-memory segment of penstock")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise WeightFetchError(
            f"{path} is gone: version {manifest.version} was released or its run has ended, or this process does not "
            "share /dev/shm with the learner (another host or container; use weights.transport: disk there)"
        ) from None
    except OSError as error:
        raise WeightFetchError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        check_size(manifest, os.fstat(descriptor).st_size)
        lease = read_lease(descriptor)
        mapping = mmap.mmap(descriptor, manifest.size_bytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightFetchError(f"{path} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)
    data = memoryview(mapping)
    try:
        digest = checked_digest(manifest, data)
    except WeightFetchError:
        if lease is not None:
            lease.release()
        raise
    return MappedWeights(tensor_views(parse_layout(data), mapping), digest, shared=data, lease=lease)


@contextlib.contextmanager
def _created(path: Path, size_bytes: int) -> Generator[tuple[mmap.mmap, PagesAhead | None]]:
    """A new segment, mapped, and its pages, None if all are there; there under its name when the block is done, and
    gone when it raises. The mapping ends with its last view."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise WeightExportError(f"{path} cannot be made: {error.strerror}") from error
    try:
        with _refused_for_room(path, size_bytes):
            mapping, makes_pages = _mapped(descriptor, size_bytes)
        if makes_pages:
            with PagesAhead(address_of(mapping), size_bytes) as pages:
                yield mapping, pages
        else:
            yield mapping, None
        try:
            partial.rename(path)
        except OSError as error:
            raise WeightExportError(f"{path} cannot be made: {error.strerror}") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size_bytes: int) -> tuple[mmap.mmap, bool]:
    """The segment, and whether its pages are still to be made; otherwise they are reserved."""
    makes_pages = size_bytes >= WORTH_BYTES and can_populate()
    if makes_pages:
        os.truncate(descriptor, size_bytes)
    else:
        os.posix_fallocate(descriptor, 0, size_bytes)
    return mmap.mmap(descriptor, size_bytes), makes_pages


@contextlib.contextmanager
def _refused_for_room(path: Path, size_bytes: int) -> Generator[None]:
    try:
        yield
    except OSError as error:
        free = os.statvfs(path.parent)
        raise WeightExportError(
            f"{path.parent} has no room for {size_bytes:,} bytes of weights ({error.strerror}; "
            f"{free.f_bavail * free.f_frsize:,} bytes are free). Give it more (docker run --shm-size=…), "
            "or set weights.transport: disk"
        ) from error
