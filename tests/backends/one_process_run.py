"""A whole run in the process of a test: the seven actors as the wiring makes them, with the backends of a real run
(engine, episodes, rewards, filters, learner, rows) and a ledger in a file, on the real clock.

What differs from a real run is the host alone: events go from actor to actor in memory, and one thread handles them
all. Whatever a backend says, from whichever of its threads, is handed to that thread.
"""

from __future__ import annotations

import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from penstock.backends.ledger.sqlite import SqliteStore, open_ledger
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.names import BUFFER
from penstock.runtime.hosts.processes.job import DriverJob
from penstock.runtime.hosts.processes.prepare import prepare
from penstock.runtime.hosts.virtual.host import HostSettings, VirtualHost
from penstock.runtime.hosts.virtual.process import Player
from penstock.runtime.run.wiring import actor_names, build_machine, hears, inbox_union, open_backend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.backends.ledger.protocol import LedgerStore
    from penstock.backends.protocol import Backend, Emit, Fail, Timers
    from penstock.messages.base import Metric
    from penstock.messages.commands import BackendCommand
    from penstock.runtime.hosts.virtual.host import Ending
    from penstock.runtime.hosts.virtual.process import Process
    from penstock.runtime.scenario import Scenario

CLOSE_TIMEOUT_S: Final = 20.0
LISTEN_S: Final = 0.001
"""So long at most nobody looks at timers and messages."""


class OneProcessRun:
    """One run of a resolved scenario, in this folder."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.ledger = folder / LEDGER_FILE
        job = DriverJob(run_id=folder.name, run_folder=str(folder), temp_folder=str(folder), scenario=scenario)
        self.plan = prepare(job, lambda text: None)
        self.host = _FileHost(actor_names(scenario), self._cast, HostSettings(validate=True))
        self.host.folder, self.host.stores = folder, []
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._opened: list[Backend[Any]] = []

    def run(self, timeout_s: float) -> Ending:
        """Until it ends, and everything that was opened is closed."""
        began_s = time.monotonic()
        try:
            while (ending := self.host.run(time.monotonic() - began_s)) is None:
                assert time.monotonic() - began_s < timeout_s, self.host.story()
                self._listen()
            return ending
        finally:
            for backend in self._opened:
                backend.close(CLOSE_TIMEOUT_S)
            for store in self.host.stores:
                store.close()

    def _listen(self) -> None:
        """Take in what backends have said, and wait for it when it is nothing."""
        try:
            self._posted.get(timeout=LISTEN_S)()
            while True:
                self._posted.get_nowait()()
        except Empty:
            pass

    def _cast(self, name: str, epoch: int, timers: Timers, store: LedgerStore | None) -> Player:
        backend = open_backend(name, self.plan, epoch=epoch, timers=timers, store=store)
        if backend is not None:
            self._opened.append(backend)
        return Player(
            machine=build_machine(name, self.plan, epoch=epoch, records=() if store is None else store.entries()),
            hears=hears(name),
            inbox=inbox_union(name),
            backend=None if backend is None else _OnOneThread(backend, timers, self._posted.put),
        )


class _OnOneThread:
    """A backend whose words are handed to the thread that plays the actors."""

    def __init__(self, backend: Backend[Any], timers: Timers, post: Callable[[Callable[[], None]], None]) -> None:
        self._backend = backend
        self._timers = timers
        self._post = post

    def start(self, emit: Emit, fail: Fail) -> None:
        def hand_over(say: Callable[[Any], None], what: object) -> None:
            self._post(partial(self._timers.call_later, 0.0, partial(say, what)))

        self._backend.start(partial(hand_over, emit), partial(hand_over, fail))

    def execute(self, command: BackendCommand, /) -> None:
        self._backend.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        return self._backend.gauges()

    def close(self, timeout_s: float) -> None:
        self._backend.close(timeout_s)


class _FileHost(VirtualHost):
    """The Buffer's ledger is the file of a real run."""

    folder: Path
    stores: list[SqliteStore]

    def open_store(self, process: Process) -> LedgerStore | None:
        if process.name != BUFFER:
            return None
        store = open_ledger(self.folder)
        store.claim(process.epoch)
        self.stores.append(store)
        return store
