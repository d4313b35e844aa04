"""``weights.jsonl``: the digest of every publish, written by the Learner's process.

Invariants:

* A line is handed to the operating system while the publish is handled, so before anybody is told of it: no engine
  makes a token with weights that have no line.
* Lines are only added, by one incarnation of the Learner after the other.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.local import WeightsPublished
from penstock.runtime.observability.jsonl import JsonLinesWriter

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.messages.base import Event

WEIGHTS_FILE: Final = "weights.jsonl"
"""Name in the folder of a run."""


class PublishRow(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that the Learner has put out for engines, as a line of the log."""

    at: float
    """Unix time, seconds."""
    learner_epoch: int
    """Incarnation of the Learner."""
    publish: int
    """Counts the publishes of that incarnation."""
    version: int
    digest: str
    """Of names, shapes, dtypes and bytes of all tensors; engines check it before they serve them. Of adapters that are
    published alone: theirs, ``+``, and that of the model that they belong to."""
    size_bytes: int


class WeightsLog:
    """Writes down what one incarnation of the Learner publishes."""

    def __init__(self, run_folder: Path) -> None:
        self._lines = JsonLinesWriter(run_folder / WEIGHTS_FILE, lines_per_write=1)

    def saw(self, event: Event) -> None:
        """Write the line of a publish; other events are passed over.

        Raises:
            OSError: it could not be written, for example because the disk is full.
        """
        if isinstance(event, WeightsPublished):
            manifest = event.manifest
            self._lines.append(
                PublishRow(
                    at=time.time(),
                    learner_epoch=manifest.learner_epoch,
                    publish=manifest.publish,
                    version=manifest.version,
                    digest=manifest.digest if manifest.base is None else f"{manifest.digest}+{manifest.base_digest}",
                    size_bytes=manifest.size_bytes,
                )
            )

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._lines.close()
