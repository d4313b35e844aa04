"""The temporary folders of runs and of their parts, and the removal of those whose makers were killed.

Invariants:

* Whoever uses such a folder holds a shared lock on a file in it, which the kernel lets go when the process ends,
  however that is. So it counts across containers that share the folder above, too, where process ids say nothing.
* A folder is swept only by who gets that lock alone, so never while a process that made or joined it lives. The file
  has its name only once it is locked; a folder without it, or of another user, is left alone.
* What cannot be removed yet keeps the file, for the next sweep to find it.

Nothing waits: a lock that is not to be had at once is somebody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

TEMP_PREFIX: Final = "ps-"
"""How their names begin; short, as the paths of Ray's sockets are limited."""
OWNER_LOCK: Final = "owner.lock"

_held: Final[dict[Path, int]] = {}
"""Descriptors of the locks of this process, by folder."""
_log: Final = logging.getLogger(__name__)


def make_folder(base: Path | None = None) -> Path:
    """A new one in ``base`` (None: where temporary files belong), that only this user may enter and that this process
    holds. What processes that were killed have left beside it is removed."""
    base = base or Path(tempfile.gettempdir())
    sweep_folders(base)
    folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=base))
    early = folder / f".{OWNER_LOCK}"
    descriptor = os.open(early, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        early.rename(folder / OWNER_LOCK)
    except OSError:  # a file system without locks: nobody can tell whether it is used, so nobody sweeps it
        os.close(descriptor)
        early.unlink(missing_ok=True)
    else:
        _held[folder] = descriptor
    return folder


def join_folder(folder: Path) -> None:
    """Hold one that another process has made as well, until this one ends; nothing for a folder without a lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder / OWNER_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        _held[folder] = descriptor


def remove_folder(folder: Path) -> None:
    """Remove one that is needed no more, as far as that goes, and let go of it."""
    _clear(folder)
    if (descriptor := _held.pop(folder, None)) is not None:
        os.close(descriptor)


def sweep_folders(base: Path) -> list[Path]:
    """Remove those in ``base`` whose processes are all gone; which ones."""
    swept: list[Path] = []
    try:
        with os.scandir(base) as entries:
            found = [Path(entry.path) for entry in entries if entry.name.startswith(TEMP_PREFIX) and _is_own(entry)]
    except OSError:
        return swept
    for folder in found:
        try:
            descriptor = os.open(folder / OWNER_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass
        else:
            _clear(folder)
            swept.append(folder)
            _log.info("%s: removed, as who made it was killed", folder)
        finally:
            os.close(descriptor)
    return swept


def _is_own(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False


def _clear(folder: Path) -> None:
    """All but the lock, and that with the folder when nothing else is left."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name == OWNER_LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if [path.name for path in folder.iterdir()] in ([], [OWNER_LOCK]):
            shutil.rmtree(folder, ignore_errors=True)
