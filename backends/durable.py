"""What it takes to know that something is on disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def publish(partial: Path, target: Path) -> None:
    """Give a folder that was filled beside its name this name, when every byte below it is on disk; the name is there
    for good when it returns.

    Raises:
        OSError: the disk refuses.
    """
    for path in sorted(partial.rglob("*")):
        sync(path)
    sync(partial)
    partial.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until this file, or the entries of this folder, are on disk.

    Raises:
        OSError: it is not there, or the disk refuses.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
