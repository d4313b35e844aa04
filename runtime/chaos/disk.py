"""A small disk that can be filled: a tmpfs in a mount namespace of this process and those that it starts.

Nothing outside the namespace sees it, and it goes with the last process in it.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMESPACE_VARIABLE: Final = "PENSTOCK_CHAOS_NAMESPACE"
"""Set for a process that has a mount namespace of its own."""
DISK_MIB: Final = 64
_FILLER: Final = ".filler"
_TIMEOUT_S: Final = 10.0


def enter_namespace(arguments: Sequence[str]) -> None:
    """Become ``python arguments`` in a mount namespace of its own; returns when this process has one already.

    Raises:
        UserFault: the kernel does not let this user have one.
    """
    if NAMESPACE_VARIABLE in os.environ:
        return
    unshare = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    found = shutil.which("unshare")
    if found is None or subprocess.run([*unshare, "true"], capture_output=True, timeout=_TIMEOUT_S).returncode != 0:
        raise UserFault(
            "disk_full needs a mount namespace of its own, and `unshare --mount true` fails here; leave this fault "
            "out, or run as root"
        )
    os.environ[NAMESPACE_VARIABLE] = "1"
    os.execv(found, [*unshare, sys.executable, *arguments])


class SmallDisk:
    """A disk of ``DISK_MIB`` at a folder. For a process in a mount namespace of its own."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            UserFault: it cannot be mounted.
        """
        assert NAMESPACE_VARIABLE in os.environ, "a mount here would be seen by everybody"
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if done.returncode != 0:
            raise UserFault(f"disk_full: {folder}: cannot mount a small disk: {done.stderr.strip()}")
        self._filler = folder / _FILLER

    def fill(self) -> None:
        """Leave no room."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                block = bytes(size)
                try:
                    while True:
                        file.write(block)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def empty(self) -> None:
        """Make room again."""
        self._filler.unlink(missing_ok=True)

    def keep(self, run_folder: Path, parent: Path) -> Path:
        """Copy a run's folder to where it outlives the namespace; returns the copy."""
        return shutil.copytree(run_folder, parent / run_folder.name)
