"""A backend whose work is done on one event loop of one thread: what engines and teachers on servers have in common.

Invariants:

* Everything but ``start``, ``execute`` and ``close`` happens on the loop; commands reach it in order.
* A task that fails gives the whole backend up. The first failure is told and no other, and none after the end was
  asked for.

| waits for | who ends it |
|---|---|
| the loop | ``close`` |
| ``close`` for tasks, for what is to be closed, for the thread | its own deadline |
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from penstock.backends.protocol import Emit, Fail

CommandT = TypeVar("CommandT")


class LoopBackend(ABC, Generic[CommandT]):
    """See :class:`penstock.backends.protocol.Backend`."""

    def __init__(self, thread_name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._close_s = 0.0
        self._has_failed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit, self._tell_failure = emit, fail
        self._thread.start()

    def execute(self, command: CommandT, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this was given up, or the run has ended
            self._loop.call_soon_threadsafe(self._take, command)

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`. A server of ours ends with it."""
        if self._thread.ident is None:
            self._loop.close()
            return
        self._close_s = max(1.0, timeout_s - 1.0)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout_s)

    @abstractmethod
    def _take(self, command: CommandT) -> None:
        """Begin what a command asks for."""

    @abstractmethod
    async def _shut(self, timeout_s: float) -> None:
        """Close what was opened; every task has ended."""

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:  # the contract of Backend: the process ends with this story
            self._fail(error)
        finally:
            self._loop.close()

    async def _main(self) -> None:
        await self._stopping.wait()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=self._close_s / 2)
        await self._shut(self._close_s / 2)

    def _spawn(self, body: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(body, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The first reason ends it; what is told afterwards would only contradict it."""
        if not (self._has_failed or self._stopping.is_set()):
            self._has_failed = True
            self._tell_failure(error)
