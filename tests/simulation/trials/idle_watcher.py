"""The watcher that looks at nothing: what the watchers of tests are made of, each with the methods that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.runtime.hosts.virtual.host import Watcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand
    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.wire import Header
    from penstock.runtime.hosts.virtual.process import Process


class IdleWatcher(Watcher):
    """Implements :class:`penstock.runtime.hosts.virtual.host.Watcher`."""

    def handled(self, process: Process, event: Event, header: Header | None, commands: list[AnyCommand]) -> None:
        return

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        return

    def heard(self, process: Process, event: Event) -> None:
        return

    def turned(self, process: Process) -> None:
        return

    def lost(self, name: str, cause: str) -> None:
        return
