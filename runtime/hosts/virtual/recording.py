"""Records a whole virtual run, as the processes of a real one record themselves, for ``penstock replay``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.observability.recording import LedgerRead, Recording

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process
    from penstock.runtime.run.plan import RunPlan


class RunRecording(IdleWatcher):
    """Watches a run."""

    def __init__(self, run_folder: Path, plan_of: Callable[[int], RunPlan], *, segment_bytes: int = 0) -> None:
        """
        Args:
            run_folder: where the recordings go.
            plan_of: what the actors of an epoch are built from.
            segment_bytes: from what size on a file is closed and the next one begun; 0: never.
        """
        self._folder = run_folder
        self._plan_of = plan_of
        self._segment_bytes = segment_bytes
        self._open: dict[Process, Recording] = {}

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        """See :class:`penstock.runtime.hosts.virtual.host.Watcher`."""
        recording = self._open.get(process)
        if recording is None:  # nothing is in the ledger yet that this process did not read
            name, epoch = process.name, process.epoch
            recording = Recording(self._folder, name, epoch, now_s=process.now_s, segment_bytes=self._segment_bytes)
            plan = msgspec.msgpack.encode(self._plan_of(epoch))
            recording.begin(plan, None if process.store is None else _read(process.store))
            self._open[process] = recording
        recording.add(event, header, commands)

    def close(self) -> None:
        """Close all files."""
        for recording in self._open.values():
            recording.close()


def _read(store: LedgerStore) -> LedgerRead:
    kept = store.kept_books()
    if kept.snapshot is None:
        return LedgerRead(records=tuple(store.entries()), problem=kept.problem)
    return LedgerRead(snapshot=kept.snapshot, later=tuple(kept.later))
