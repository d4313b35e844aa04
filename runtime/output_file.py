"""A file that a command writes for its user: looked at before the work that fills it, which may take hours."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path


def check_output(path: Path, option: str) -> None:
    """See that the file can be written, over one of its name too; ``option`` names it, where one does.

    Raises:
        UserFault: it is a folder, there is no folder for it, or nobody lets us write there.
    """
    named = f"{option} {path}".lstrip()
    folder = path.absolute().parent  # below, what may not be looked into is not there, where pathlib would raise
    if os.path.isdir(path):
        raise UserFault(f"{named}: is a folder; name a file")
    if not os.path.isdir(folder):
        what = "is no folder" if os.path.exists(folder) else "is not there"
        raise UserFault(f"{named}: its folder {what}; make it, or name another file")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserFault(f"{named}: cannot be written: no permission, or a read-only disk; name another file")


def check_new_output(path: Path, option: str) -> None:
    """As :func:`check_output`, for a file that is not there yet.

    Raises:
        UserFault: also where it is.
    """
    check_output(path, option)
    if os.path.exists(path):
        how = f" with {option}" if option else ""
        raise UserFault(f"{path}: is there already; name another file{how}, or remove it")


def write_output(path: Path, content: str | bytes) -> None:
    """Write the file.

    Raises:
        UserFault: the disk refuses.
    """
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise UserFault(f"{path}: cannot be written: {(error.strerror or str(error)).lower()}") from None
