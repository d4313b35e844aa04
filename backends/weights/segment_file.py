"""One shared-memory segment while it is written.

Invariants:

* What lies in ordinary memory goes in by ``pwrite``: no page of the segment is cleared, mapped or unmapped for it, all
  of which take longer than the copy. What comes from a GPU, or is not in order, is copied into a mapping.
* A full ``/dev/shm`` is an error here, and not a SIGBUS in whoever touches a page: ``pwrite`` says so, and the pages of
  a mapping are there before a tensor is written.
* A segment that was let go is written again only when nobody else has it open or mapped, which the kernel knows: it
  gives a write lease to the only opening of a file. Somebody who opens it at that very moment, by a name that it had
  before, finds it open for writing: so he gets no read lease (:mod:`~penstock.backends.weights.lease`), hashes it again
  when he has loaded it, and finds another digest than the manifest's.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
from typing import TYPE_CHECKING

from penstock.backends.weights.pages import WORTH_BYTES, PagesAhead, address_of, can_populate
from penstock.backends.weights.positioned import put
from penstock.backends.weights.tensor_file import placed_view, tensor_bytes

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from penstock.backends.weights.tensor_file import Placed


class SegmentFile:
    """Writes to a segment that is open, and closes it. A context manager."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self._size_bytes = size_bytes
        self._mapping: mmap.mmap | None = None
        self._pages: PagesAhead | None = None
        self._ends = contextlib.ExitStack()

    def write(self, place: Placed, tensor: torch.Tensor) -> None:
        """Put a tensor to its place.

        Raises:
            OSError: there is no room.
        """
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            self.put(tensor_bytes(tensor), place.start)
            return
        mapping = self._mapped()
        if self._pages is not None:
            self._pages.wait(place.start, place.size_bytes)
        placed_view(place, mapping).copy_(tensor.detach())

    def put(self, data: memoryview[int], start: int) -> None:
        """Put bytes there.

        Raises:
            OSError: there is no room.
        """
        put(self._descriptor, data, start)

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()
        self._mapping = None  # ends with its last view
        os.close(self._descriptor)

    def _mapped(self) -> mmap.mmap:
        if self._mapping is None:
            makes_pages = self._size_bytes >= WORTH_BYTES and can_populate()
            if not makes_pages:
                os.posix_fallocate(self._descriptor, 0, self._size_bytes)
            self._mapping = mmap.mmap(self._descriptor, self._size_bytes)
            if makes_pages:
                self._pages = self._ends.enter_context(PagesAhead(address_of(self._mapping), self._size_bytes))
        return self._mapping


def new_segment(path: Path, size_bytes: int) -> int:
    """Its descriptor, for writing.

    Raises:
        OSError: it cannot be made, or there is one already.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def reopened_segment(path: Path, size_bytes: int) -> int | None:
    """The descriptor of one that is there, for writing; None: it has another size, somebody has it open, or the kernel
    cannot tell."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | flags)
        try:
            if os.fstat(descriptor).st_size != size_bytes:
                return None
            # Whoever opens it while the lease lasts breaks it, by a signal that would end this process by default.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        finally:
            os.close(descriptor)
        return os.open(path, os.O_RDWR | flags)
    except OSError:
        return None
