"""What is missing in a run's folder since it was too much: ``removed.json``, and the sentence that every reader says.

Whoever reads events or spans asks :func:`removed_text`, so no answer is short without saying so.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.base import UNREADABLE
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from pathlib import Path

REMOVED_FILE: Final = "removed.json"
EVENTS: Final = "events"
SPANS: Final = "spans"


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """What is missing in a run's folder, as it stands in ``removed.json``; Unix times."""

    max_disk_gb: float
    events_until: float = 0.0
    """Events that were written before may be missing; 0: none is. Of later ones, none is."""
    spans_until: float = 0.0


def removed_text(run_folder: Path, what: str, *, since: float | None = None) -> str:
    """That :data:`EVENTS` or :data:`SPANS` were removed, and up to when; empty where nothing is missing.

    Args:
        run_folder: of the run.
        what: is asked for.
        since: only what comes after this Unix time matters.

    Raises:
        UserFault: the file that says so is damaged.
    """
    removed = read_removed(run_folder)
    until = 0.0 if removed is None else removed.events_until if what == EVENTS else removed.spans_until
    if removed is None or not until or (since is not None and since > until):
        return ""
    at = datetime.fromtimestamp(until, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return f"the oldest {what}, up to {at}, were removed: observability.max_disk_gb is {removed.max_disk_gb:g}"


def all_removed(run_folder: Path) -> list[str]:
    """All that :func:`removed_text` has to say of a run."""
    return [text for what in (SPANS, EVENTS) if (text := removed_text(run_folder, what))]


def read_removed(run_folder: Path) -> Removed | None:
    """None where nothing is missing.

    Raises:
        UserFault: the file is damaged.
    """
    path = run_folder / REMOVED_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Removed)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise UserFault(f"{path}: {error}") from error


def write_removed(run_folder: Path, removed: Removed) -> None:
    """Whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path = run_folder / REMOVED_FILE
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(removed) + b"\n")
    os.replace(partial, path)
