"""What becomes of memory that an actor has freed: glibc keeps it, up to a bound, for what comes next.

By default the C library hands the top of its heap back to the kernel as soon as some of it is free, and gets it anew,
page by page, with the next batch: a fifth of the CPU time of the Learner in ``penstock bench control_plane``.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Names of parameters in ``malloc.h``."""
KEPT_BYTES: Final = 64 << 20
"""Free at the top of the heap until it is handed back."""
OWN_PAGES_BYTES: Final = 32 << 20
"""What is larger gets pages of its own, which go back at once: the most that glibc's own rule comes to as well, which
setting the other switches off."""


def keep_freed_memory() -> None:
    """For this process; nothing where the C library has no such parameters."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, OWN_PAGES_BYTES)
