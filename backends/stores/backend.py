"""What the Buffer asks of its ledger: the payloads of batches that are trained again, and an archive of samples.

Invariants:

* A command is carried out on the thread that gives it, and is answered by exactly one event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from penstock.messages.commands import ArchiveSamples, BufferCommand, FetchBatch
from penstock.messages.local import BatchFetched, SamplesArchived

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.protocol import Emit, Fail
    from penstock.backends.stores.protocol import LedgerStore
    from penstock.messages.base import Metric


class LedgerBackend:
    """Carries out the Buffer's commands on a ledger."""

    def __init__(self, store: LedgerStore, archive_folder: Path | None) -> None:
        self._store = store
        self._archive_folder = archive_folder

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit

    def execute(self, command: BufferCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        match command:
            case FetchBatch():
                self._emit(BatchFetched(version=command.version, groups=self._store.payloads(command.group_ids)))
            case ArchiveSamples():
                self._emit(SamplesArchived(last_version=command.last_version))
            case _:
                assert_never(command)

    def gauges(self) -> tuple[Metric, ...]:
        """See :class:`penstock.backends.protocol.Backend`."""
        return ()

    def close(self, timeout_s: float) -> None:
        """The ledger belongs to the host."""
