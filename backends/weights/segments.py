"""The names of shared-memory segments, and their removal after a SIGKILL. Imports no torch: a supervisor uses it.

Invariants:

* A segment is named ``penstock-<run id>-<learner epoch>-<version>-<publish>.<nonce>``, with ``base`` behind the last
  number where adapters belong to it. Three numbers and the nonce end the name, so no run's names are taken for those of
  another whose id they begin with. The folder is everybody's: the nonce keeps other users from having a file of this
  name there first.
* What is another user's is no segment of ours, whatever it is called.
* While it is written its name ends in ``.partial``, and when it is kept for its pages alone; so a segment without that
  is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path
from typing import Final

from penstock.backends.weights.keeping import Export

SHARED_FOLDER: Final = Path("/dev/shm")
PARTIAL: Final = ".partial"
"""Ends the name of what is no whole segment."""

_RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SEGMENT: Final = re.compile(
    r"penstock-(?P<run_id>.+)-(?P<epoch>\d+)-(?P<version>\d+)-(?P<publish>\d+)"
    r"(?P<base>base)?(?:\.[0-9a-f]{16})?(?P<partial>\.partial)?"
)


def sweep(run_id: str, folder: Path = SHARED_FOLDER) -> int:
    """Remove every segment of a run, whoever made it; returns how many there were. For after a SIGKILL."""
    segments = segments_of(run_id, folder)
    for segment in segments:
        segment.path.unlink(missing_ok=True)
    return len(segments)


def segments_of(run_id: str, folder: Path = SHARED_FOLDER) -> list[Export]:
    """The segments of this run and of no other, partial ones among them; none where there is no such folder."""
    found: list[Export] = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            match = _SEGMENT.fullmatch(entry.name)
            if match and match["run_id"] == run_id and _is_own(entry):
                found.append(Export.named(match, Path(entry.path)))
    return found


def check_run_id(run_id: str) -> None:
    """Raise ``ValueError`` for an id that cannot be part of a file name."""
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"run id: expected letters, digits, '.', '_' and '-', at most 128, got {run_id!r}")


def segment_name(run_id: str, epoch: int, version: int, publish: int, *, is_base: bool = False) -> str:
    """A name for one export, that nobody can foresee."""
    kind = "base" if is_base else ""
    return f"penstock-{run_id}-{epoch}-{version}-{publish}{kind}.{secrets.token_hex(8)}"


def _is_own(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except FileNotFoundError:  # removed since
        return False


def is_segment_name(name: str) -> bool:
    """Whether a file of this name can be a whole segment of some run."""
    match = _SEGMENT.fullmatch(name)
    return match is not None and not match["partial"]
