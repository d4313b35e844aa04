"""Fresh pages of memory, made by several threads ahead of whoever writes there.

The kernel makes a page when it is touched first: 4 KiB at a time, by the thread that touches it. A copy from a GPU into
fresh memory spends nine tenths of its time so. ``MADV_POPULATE_WRITE`` (Linux 5.14) makes many at once, on any thread,
changes nothing that is there already, and says by an error what a touch would say by SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from penstock.backends.weights.digest import default_threads

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

POPULATE_WRITE: Final = 23
"""Of ``madvise``; Python does not name it."""
PIECE_BYTES: Final = 16 << 20
WORTH_BYTES: Final = 4 << 20
"""Smaller memory is touched faster than it is asked for."""

_libc: Final = ctypes.CDLL(None, use_errno=True)  # lets go of the interpreter lock, which mmap.madvise keeps
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PagesAhead:
    """Of one range of memory, in its order. A context manager; at its end no thread of it runs any more.

    | wait | who ends it |
    |---|---|
    | for pages | the kernel, which makes them or refuses |
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self._threads = ThreadPoolExecutor(default_threads(), thread_name_prefix="pages")
        self._offset = address % mmap.PAGESIZE
        first, end = address - self._offset, address + size_bytes
        self._pieces: list[Future[None]] = [
            self._threads.submit(_populate, start, min(PIECE_BYTES, end - start))
            for start in range(first, end, PIECE_BYTES)
        ]

    def wait(self, start: int, size_bytes: int) -> None:
        """Until so many bytes from a place have pages.

        Raises:
            OSError: there is no memory for them.
        """
        first, end = self._offset + start, self._offset + start + size_bytes
        for piece in self._pieces[first // PIECE_BYTES : -(-end // PIECE_BYTES)]:
            piece.result()

    def __enter__(self) -> PagesAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)


def address_of(mapping: mmap.mmap) -> int:
    """Where it is, for as long as it is open."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def can_populate() -> bool:
    """Whether this kernel makes pages when it is asked to."""
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        try:
            _populate(address_of(probe), mmap.PAGESIZE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


def fresh_copy(source: torch.Tensor) -> torch.Tensor:
    """A copy on the host, in memory of its own."""
    copy = source.new_empty(source.shape, device="cpu")
    if copy.nbytes >= WORTH_BYTES and can_populate():
        with PagesAhead(copy.data_ptr(), copy.nbytes) as pages:
            pages.wait(0, copy.nbytes)
    return copy.copy_(source)


def _populate(address: int, size_bytes: int) -> None:
    if _libc.madvise(address, size_bytes, POPULATE_WRITE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
