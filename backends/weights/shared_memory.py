"""Weights through shared memory: one file in ``/dev/shm`` per publish, mapped by each engine of the same host.

Invariants:

* A segment's name carries the run's id, so whoever knows the run can remove what a killed learner left
  (:mod:`~penstock.backends.weights.segments`). Nothing else tracks it; in particular no resource tracker, which
  would remove the segment when an engine that merely looked at it ends.
* A full ``/dev/shm`` is an error here, and not a SIGBUS in whoever touches a page.
* A mapping outlives the removal of its name, so a release takes nothing from an engine that has fetched. What is let
  go is written again by a later export only if no process has it open or mapped (:mod:`.segment_file`).
* A segment is whole, under its name, when ``begin`` returns; what it is made of may change then. No engine is told of
  it before its digest is there, since the manifest has that.
* Engines map privately: what an engine writes by mistake stays its own. What somebody else writes into the segment does
  reach a mapping that has not written there itself, so engines have it watched from before they hash it
  (:mod:`~penstock.backends.weights.lease`), and hash it again when they have loaded where that could not be, or
  somebody came.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.backends.weights.digest import PlacedDigest
from penstock.backends.weights.fetched import MappedWeights, check_size, checked_digest
from penstock.backends.weights.keeping import Export, released, superseded
from penstock.backends.weights.lease import read_lease
from penstock.backends.weights.pages import WORTH_BYTES
from penstock.backends.weights.positioned import read_back
from penstock.backends.weights.protocol import WeightExportError, WeightFetchError
from penstock.backends.weights.segment_file import SegmentFile, new_segment, reopened_segment
from penstock.backends.weights.segments import (
    PARTIAL,
    SHARED_FOLDER,
    check_run_id,
    is_segment_name,
    segment_name,
    segments_of,
)
from penstock.backends.weights.segments import sweep as sweep
from penstock.backends.weights.spec import SHARED_MEMORY
from penstock.backends.weights.stream import placed_tensors, planned
from penstock.backends.weights.tensor_file import parse_layout, tensor_views
from penstock.messages.weights import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from penstock.backends.weights.stream import AnyWeights
    from penstock.backends.weights.tensor_file import Layout
    from penstock.messages.weights import Canary


class PendingExport:
    """A segment that is whole, whose digest is still made by threads of its own. One thread waits for it.

    | wait | who ends it |
    |---|---|
    | ``manifest`` | the threads: what they read is there |
    """

    def __init__(
        self, manifest: WeightManifest, digest: PlacedDigest, ends: contextlib.ExitStack, done: Callable[[], None]
    ) -> None:
        """
        Args:
            manifest: as it is but for the digest.
            digest: of everything that was written.
            ends: what is given up when the digest is there.
            done: called then.
        """
        self._manifest = manifest
        self._digest = digest
        self._ends = ends
        self._done = done

    @property
    def size_bytes(self) -> int:
        """See :class:`~penstock.backends.weights.protocol.BegunExport`."""
        return self._manifest.size_bytes

    def manifest(self) -> WeightManifest:
        """See :class:`~penstock.backends.weights.protocol.BegunExport`."""
        with self._ends:
            try:
                digest = self._digest.hexdigest()
            except OSError as error:
                raise WeightExportError(f"{self._manifest.location} cannot be read back: {error.strerror}") from error
        self._done()
        return msgspec.structs.replace(self._manifest, digest=digest)


class SharedMemoryExporter:
    """The learner's end. What earlier incarnations left stays as :mod:`~penstock.backends.weights.keeping` says, so
    engines that start in between still find weights."""

    def __init__(self, run_id: str, learner_epoch: int, folder: Path = SHARED_FOLDER) -> None:
        check_run_id(run_id)
        self._run_id = run_id
        self._epoch = learner_epoch
        self._folder = folder
        self._own: list[Export] = []
        self._spare: Path | None = None
        """Let go, and kept for its pages: making them takes longer than anything else."""
        self._remove([segment for segment in self._inherited(with_partial=True) if segment.is_partial])

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        return self.begin(tensors, version=version, publish=publish, canary=canary).manifest()

    def begin(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> PendingExport:
        """See :class:`~penstock.backends.weights.protocol.BackgroundExporter`."""
        segment = Export(self._epoch, version, publish, self._folder)
        return self._begin(tensors, segment, canary, lambda: self._remove(superseded(self._inherited(), version)))

    def export_base(self, tensors: AnyWeights, *, version: int, publish: int) -> WeightManifest:
        """See :class:`~penstock.backends.weights.protocol.BaseExporter`."""
        segment = Export(self._epoch, version, publish, self._folder, is_base=True)
        return self._begin(tensors, segment, None, lambda: None).manifest()

    def _begin(
        self, tensors: AnyWeights, segment: Export, canary: Canary | None, done: Callable[[], None]
    ) -> PendingExport:
        layout, (epoch, version, publish, *_) = planned(tensors), segment
        path = self._folder / segment_name(self._run_id, epoch, version, publish, is_base=segment.is_base)
        digest, ends = self._written(path, layout, tensors)
        new = segment._replace(path=path)
        again = [old for old in self._own if (old[:3], old.is_base) == (new[:3], new.is_base)]
        self._own = [*(old for old in self._own if old not in again), new]
        self._remove(again)  # whoever maps it keeps it
        manifest = WeightManifest(
            version=version,
            publish=publish,
            learner_epoch=epoch,
            transport=SHARED_MEMORY,
            location=str(path),
            size_bytes=layout.size_bytes,
            digest="",
            canary=canary,
        )
        return PendingExport(manifest, digest, ends, done)

    def _written(self, path: Path, layout: Layout, tensors: AnyWeights) -> tuple[PlacedDigest, contextlib.ExitStack]:
        """Write a segment: its digest, in the making, and what that needs. The segment is there under its name when
        this returns, and gone when it raises."""
        partial = path.with_name(f"{path.name}{PARTIAL}")
        with contextlib.ExitStack() as ends, _removed_if_it_fails(partial):
            try:
                descriptor = self._opened(partial, layout.size_bytes)
            except OSError as error:
                raise WeightExportError(f"{path} cannot be made: {error.strerror}") from error
            with SegmentFile(descriptor, layout.size_bytes) as file:
                reading = os.open(partial, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                ends.callback(os.close, reading)
                digest = ends.enter_context(PlacedDigest(layout.size_bytes, functools.partial(read_back, reading)))
                _fill(path, file, digest, layout, tensors)
            try:
                partial.rename(path)
            except OSError as error:
                raise WeightExportError(f"{path} cannot be made: {error.strerror}") from error
            return digest, ends.pop_all()

    def _opened(self, partial: Path, size_bytes: int) -> int:
        """For writing under this name: the spare, if nobody has it any more."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(FileNotFoundError):  # somebody has swept the folder
                spare.rename(partial)
            descriptor = reopened_segment(partial, size_bytes)
            if descriptor is not None:
                return descriptor
            partial.unlink(missing_ok=True)
        return new_segment(partial, size_bytes)

    def release(self, below_version: int) -> None:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        going = released(self._own, self._inherited(), below_version)
        own = [segment for segment in self._own if segment in going and not segment.is_base]
        if own:
            self._keep_spare(own[-1].path)
        self._own = [segment for segment in self._own if segment not in going]
        self._remove(going)

    def close(self) -> None:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        self._remove([*self._inherited(with_partial=True), *self._own])
        self._own = []
        if self._spare is not None:
            self._spare.unlink(missing_ok=True)

    def _keep_spare(self, path: Path) -> None:
        """Under a name that no engine knows, nor takes for a whole one."""
        if self._spare is not None:
            self._spare.unlink(missing_ok=True)
            self._spare = None
        spare = path.with_name(f"{path.name}{PARTIAL}")
        with contextlib.suppress(OSError):  # somebody has swept the folder: then there is none
            if path.stat().st_size >= WORTH_BYTES:
                self._spare = path.rename(spare)

    def _inherited(self, *, with_partial: bool = False) -> list[Export]:
        # Looked up each time: a predecessor that was only asleep may have added to it.
        return [
            segment
            for segment in segments_of(self._run_id, self._folder)
            if segment.epoch < self._epoch and (with_partial or not segment.is_partial)
        ]

    def _remove(self, segments: list[Export]) -> None:
        """From any thread."""
        for segment in segments:
            segment.path.unlink(missing_ok=True)


def _fill(path: Path, file: SegmentFile, digest: PlacedDigest, layout: Layout, tensors: AnyWeights) -> None:
    """Write everything to its place."""
    with _refused_for_room(path, layout.size_bytes):
        file.put(memoryview(layout.header), 0)
    digest.wrote(0, len(layout.header))
    for place, tensor in placed_tensors(tensors, layout):
        with _refused_for_room(path, layout.size_bytes):
            file.write(place, tensor)
        digest.wrote(place.start, place.size_bytes)


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
def _removed_if_it_fails(path: Path) -> Generator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


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
