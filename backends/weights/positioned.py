"""Bytes of a file by their places: written, and read back from the memory of the system."""

from __future__ import annotations

import errno
import os
from typing import Final

WRITE_BYTES: Final = 1 << 20
"""At once. In one call for all, the kernel copies a quarter slower: the source is no longer near when it is read."""


def put(descriptor: int, data: memoryview[int], start: int) -> None:
    """Write them there.

    Raises:
        OSError: there is no room.
    """
    while len(data):
        num_written = os.pwrite(descriptor, data[:WRITE_BYTES], start)
        data, start = data[num_written:], start + num_written


def read_back(descriptor: int, start: int, size_bytes: int) -> bytes:
    """What was written there.

    Raises:
        OSError: somebody else has cut the file.
    """
    parts: list[bytes] = []
    while size_bytes:
        part = os.pread(descriptor, size_bytes, start)
        if not part:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        parts.append(part)
        start, size_bytes = start + len(part), size_bytes - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
