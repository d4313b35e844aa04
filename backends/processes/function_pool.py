"""Processes that run users' functions, and the one thread that starts, feeds, watches and replaces them.

A subclass says which processes, what they are to do and by when.

Invariants:

* One thread owns the processes and starts them. It lives as long as they do, because the kernel ties them to it.
* A process that has ended, or that the subclass drops, is replaced. What cannot be loaded, and what ends
  ``MAX_FAILED_STARTS`` processes in a row while they load it, fails the pool.

| waits for | who ends it |
|---|---|
| a process to load its functions | the process; past ``START_TIMEOUT_S`` the pool fails |
| anything that happens | a process; :meth:`FunctionPool._wake`; the earliest deadline |
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from penstock.backends.processes.function_process import FunctionProcess

if TYPE_CHECKING:
    from penstock.backends.protocol import Fail

START_TIMEOUT_S: Final = 120.0
MAX_FAILED_STARTS: Final = 3

SaidT = TypeVar("SaidT")
ProcessT = TypeVar("ProcessT", bound=FunctionProcess[Any])


class FunctionProcessError(RuntimeError):
    """No process with the functions can be had."""


class FunctionPool(ABC, Generic[SaidT, ProcessT]):
    """See the module."""

    def __init__(self, name: str, functions: str, num_processes: int) -> None:
        """
        Args:
            name: of the thread.
            functions: that the processes load, in words.
            num_processes: that there are to be.
        """
        self._functions = functions
        self._num_processes = num_processes
        self._processes: list[ProcessT] = []
        self._num_failed_starts = 0
        self.num_restarts = 0
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def close(self, timeout_s: float) -> None:
        """Kill the processes and end the thread."""
        self._closing.set()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _begin(self, fail: Fail) -> None:
        """Start the thread, and with it the processes."""
        self._fail = fail
        self._thread.start()

    def _wake(self) -> None:
        """Have the thread see what there is to be handed out. From any thread."""
        os.eventfd_write(self._bell, 1)

    # --- what a subclass does, on the thread ------------------------------------------------------------------

    @abstractmethod
    def _open_process(self) -> ProcessT:
        """A new process."""

    @abstractmethod
    def _hand_out(self) -> None:
        """Send what waits to processes that are ready."""

    @abstractmethod
    def _on_said(self, process: ProcessT, said: SaidT) -> None:
        """A process has said this."""

    @abstractmethod
    def _deadline_s(self, process: ProcessT) -> float | None:
        """When a process that is ready has to be seen to; None: it may be silent for ever."""

    @abstractmethod
    def _on_overdue(self, process: ProcessT) -> None:
        """Its deadline is past."""

    @abstractmethod
    def _on_lost(self, process: ProcessT, how: str) -> None:
        """A process that was ready is gone, in words how; it is replaced."""

    def _drop(self, process: ProcessT) -> str:
        """Kill a process, to be replaced; how it ended in words."""
        self._selector.unregister(process.socket)
        self._processes.remove(process)
        self.num_restarts += 1
        return process.end()

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                while len(self._processes) < self._num_processes:
                    process = self._open_process()
                    self._selector.register(process.socket, selectors.EVENT_READ, process)
                    self._processes.append(process)
                self._hand_out()
                until_s = self._earliest_deadline_s()
                self._hear(None if until_s is None else max(0.0, until_s - time.monotonic()))
                if until_s is not None and until_s <= time.monotonic():
                    self._end_overdue()
        except BaseException as error:  # the thread's end must not go unnoticed, whatever ended it
            self._fail(error)
        finally:
            for process in self._processes:
                process.end()
            self._selector.close()

    def _earliest_deadline_s(self) -> float | None:
        deadlines = (self._any_deadline_s(process) for process in self._processes)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _any_deadline_s(self, process: ProcessT) -> float | None:
        return process.started_at_s + START_TIMEOUT_S if process.ready is None else self._deadline_s(process)

    def _hear(self, patience_s: float | None) -> None:
        for process in self._processes:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.wants_to_write else 0)
            if self._selector.get_key(process.socket).events != events:
                self._selector.modify(process.socket, events, process)
        for key, events in self._selector.select(patience_s):
            heard: ProcessT | None = key.data
            if heard is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                continue
            if events & selectors.EVENT_WRITE:
                heard.flush()
            if events & selectors.EVENT_READ:
                self._hear_process(heard)

    def _hear_process(self, process: ProcessT) -> None:
        for said in process.heard():
            self._on_said(process, said)
        if process.ready is not None:
            self._num_failed_starts = 0
        if not process.is_gone:
            return
        how = self._drop(process)
        if process.ready is not None:
            self._on_lost(process, how)
            return
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            times = f"{self._num_failed_starts} times in a row"
            raise FunctionProcessError(f"the process for {self._functions} {how} while it loaded, {times}")

    def _end_overdue(self) -> None:
        for process in list(self._processes):
            deadline_s = self._any_deadline_s(process)
            if deadline_s is None or deadline_s > time.monotonic():
                continue
            if process.ready is None:
                raise FunctionProcessError(f"{self._functions} did not load within {START_TIMEOUT_S:g} s")
            self._on_overdue(process)
