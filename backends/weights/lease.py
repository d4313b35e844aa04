"""Whether a file can have been written to since a moment, told by the kernel and not by reading it again.

A read lease (``fcntl(2)``, ``F_SETLEASE``) is given only while no process has the file open for writing, through a
mapping or otherwise. Whoever opens it for writing later, or truncates it, breaks the lease first and waits: until it is
given back, or for ``/proc/sys/fs/lease-break-time``. So as long as a lease is whole the bytes are those that were there
when it was taken. Other readers, and the removal of the name, do not break it.

Invariant: nothing rests on having one. Where the kernel or the file system gives none, or somebody writes, there is
none, and bytes are hashed instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import weakref


class ReadLease:
    """On one open file; given back by ``release``, or with the object."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: open for reading alone; becomes this object's.

        Raises:
            OSError: there is none to be had: it is open for writing somewhere, or belongs to another user.
        """
        try:
            # What breaks the lease sends a signal, by default one that ends the process; nobody is hurt by this one.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._end = weakref.finalize(self, _give_back, descriptor)

    def is_whole(self) -> bool:
        """Whether nobody can have written since it was taken."""
        return self._end.alive and fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK

    def release(self) -> None:
        """Let writers in. May be called more than once."""
        self._end()


def read_lease(descriptor: int) -> ReadLease | None:
    """One on the file that is open there; None: none is to be had. The descriptor stays the caller's."""
    try:
        # Not a duplicate: a lease belongs to one opening of the file, and ends when that is given back.
        return ReadLease(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return None


def _give_back(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    os.close(descriptor)
