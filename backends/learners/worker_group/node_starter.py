"""Starts the launchers of a worker group's further nodes, and hears of their ends, for a thread that has no event loop.

Invariants:

* ``start`` does not wait. Whatever ends a launcher, or lets it not start, is told once, by ``on_end``, on the thread of
  this object; ``stop`` ends what is not told.

| wait | who ends it |
|---|---|
| ``stop`` | the hosts of the nodes; at the latest its timeout |
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final

from penstock.backends.processes.remote_ranks import RankEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from penstock.backends.processes.remote_ranks import RemoteRanks

JOIN_S: Final = 5.0


class NodeStarter:
    """The event loop that the hosts of the nodes want, on a thread of its own."""

    def __init__(self, nodes: RemoteRanks, on_end: Callable[[RankEnded], None]) -> None:
        """
        Args:
            nodes: where the launchers are started; the ranks of this protocol are our nodes.
            on_end: what is told of an end.
        """
        self._nodes = nodes
        self._on_end = on_end
        self._loop = asyncio.new_event_loop()
        self._futures: list[Future[Any]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="worker group-nodes", daemon=True)
        self._thread.start()
        self._futures.append(asyncio.run_coroutine_threadsafe(self._watch(), self._loop))

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str], log_path: str) -> None:
        """Start the launcher of this node."""

        def told(future: Future[int]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                self._on_end(RankEnded(node, str(error) or type(error).__name__, ()))

        started = asyncio.run_coroutine_threadsafe(self._nodes.start(node, command, environment, log_path), self._loop)
        started.add_done_callback(told)
        self._futures.append(started)

    def stop(self, timeout_s: float) -> None:
        """End all of them, for good."""
        for future in self._futures:
            future.cancel()
        stopped = asyncio.run_coroutine_threadsafe(self._nodes.stop(), self._loop)
        try:
            stopped.result(timeout_s)
        except TimeoutError:
            stopped.cancel()  # their hosts end them when this process ends
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_S)

    async def _watch(self) -> None:
        while True:
            self._on_end(await self._nodes.ended())
