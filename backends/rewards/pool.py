"""Processes that run a user's function, and the thread that feeds, watches and replaces them.

Invariants:

* Every command that was submitted is answered once: with what the function returned, or with a reason. (Closing is
  the exception: then nobody listens.)
* A call that overruns costs its own process and nothing else. What waited behind it goes to another process, once;
  who is in a dying process for the second time is taken for the cause.
* One thread owns the processes and starts them. It lives as long as they do, because the kernel ties them to it.

| waits for | who ends it |
|---|---|
| an answer | the process; past the call's deadline the pool kills it and answers itself |
| a process to load the function | the process; past ``START_TIMEOUT_S`` the pool gives up and fails |
| a free process | the answers and deadlines of the calls before |
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.rewards.process import WorkerProcess
from penstock.backends.rewards.wire import CallFailed, LoadFailed, Ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.protocol import Fail
    from penstock.backends.rewards.wire import Answer, Call

START_TIMEOUT_S: Final = 120.0
MAX_FAILED_STARTS: Final = 3
MAX_DEATHS: Final = 2

CommandT = TypeVar("CommandT")
AdaptedT = TypeVar("AdaptedT", contravariant=True)
EventT = TypeVar("EventT", covariant=True)
AnsweredT = TypeVar("AnsweredT")


class RewardProcessError(RuntimeError):
    """No process with the function can be had."""


class CallAdapter(Protocol[AdaptedT, EventT]):
    """How commands become calls and answers become events. Its methods run on the pool's thread."""

    kind: str
    spec: str
    options_json: str
    """Of the function, for its process; empty: none."""
    timeout_key: str
    """The scenario's key of the deadline, for messages; empty when there is none."""

    def call(self, command: AdaptedT, call_id: int, names: tuple[str, ...]) -> Call:
        """The call of this command, with what the function asks for."""
        ...

    def event(self, command: AdaptedT, answer: Answer) -> EventT:
        """The event that answers the command."""
        ...


class _Job(Generic[CommandT]):
    def __init__(self, call_id: int, command: CommandT) -> None:
        self.call_id = call_id
        self.command = command
        self.num_deaths = 0


class WorkerPool(Generic[CommandT, AnsweredT]):
    """See the module."""

    def __init__(self, adapter: CallAdapter[CommandT, AnsweredT], num_workers: int) -> None:
        self._adapter = adapter
        self._num_workers = num_workers
        self._submitted: deque[CommandT] = deque()
        self._queue: deque[_Job[CommandT]] = deque()
        self._running: dict[int, _Job[CommandT]] = {}
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{adapter.kind}-pool", daemon=True)
        self._next_id = 0
        self._failed_starts = 0
        self.num_restarts = 0
        self.num_answered = 0
        self.num_failed = 0

    def start(self, emit: Callable[[AnsweredT], None], fail: Fail) -> None:
        """Start the thread, and with it the processes."""
        self._emit, self._fail = emit, fail
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()

    def submit(self, command: CommandT) -> None:
        """Have this done. From any thread; returns at once."""
        self._submitted.append(command)
        os.eventfd_write(self._wake, 1)

    @property
    def num_waiting(self) -> int:
        """Commands that no process works on."""
        return len(self._submitted) + len(self._queue)

    @property
    def num_running(self) -> int:
        """Commands that processes have."""
        return len(self._running)

    def close(self, timeout_s: float) -> None:
        """Kill the processes and end the thread."""
        self._closing.set()
        os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._take_submitted()
                self._start_missing()
                self._hand_out()
                self._hear(self._patience_s())
                self._end_overdue()
        except BaseException as error:  # the thread's end must not go unnoticed, whatever ended it
            self._fail(error)
        finally:
            for worker in self._workers:
                worker.end()
            self._selector.close()

    def _take_submitted(self) -> None:
        while self._submitted:
            self._queue.append(_Job(self._next_id, self._submitted.popleft()))
            self._next_id += 1

    def _start_missing(self) -> None:
        while len(self._workers) < self._num_workers:
            worker = WorkerProcess(self._adapter.kind, self._adapter.spec, self._adapter.options_json, time.monotonic)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
            self._workers.append(worker)

    def _hand_out(self) -> None:
        """Send what waits to the processes with the least work, one frame each."""
        batches: dict[int, list[Call]] = {}
        loads = [[len(worker.sent), worker.room, number] for number, worker in enumerate(self._workers)]
        while self._queue and (free := [load for load in loads if load[1] > 0]):
            load = min(free)
            load[0] += 1
            load[1] -= 1
            worker = self._workers[load[2]]
            assert worker.ready is not None
            job = self._queue.popleft()
            self._running[job.call_id] = job
            call = self._adapter.call(job.command, job.call_id, worker.ready.names)
            batches.setdefault(load[2], []).append(call)
        for number, calls in batches.items():
            self._workers[number].send(calls)
        for worker in self._workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.wants_to_write else 0)
            if self._selector.get_key(worker.socket).events != events:
                self._selector.modify(worker.socket, events, worker)

    def _patience_s(self) -> float | None:
        now_s = time.monotonic()
        deadlines = [
            worker.started_at_s + START_TIMEOUT_S if worker.ready is None else worker.deadline_s()
            for worker in self._workers
        ]
        return min((max(0.0, deadline - now_s) for deadline in deadlines if deadline is not None), default=None)

    def _hear(self, patience_s: float | None) -> None:
        for key, events in self._selector.select(patience_s):
            worker = key.data
            if worker is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                continue
            if events & selectors.EVENT_WRITE:
                worker.flush()
            if events & selectors.EVENT_READ:
                self._hear_worker(worker)

    def _hear_worker(self, worker: WorkerProcess) -> None:
        for said in worker.receive():
            match said:
                case Ready():
                    worker.ready = said
                    self._failed_starts = 0
                case LoadFailed(message):
                    raise UserCodeError(message)
                case answer:
                    worker.answered(answer.id, answer.elapsed_s)
                    self._answer(self._running.pop(answer.id), answer)
        if worker.is_gone:
            self._on_death(worker)

    def _on_death(self, worker: WorkerProcess) -> None:
        how = self._remove(worker)
        if worker.ready is None:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise RewardProcessError(
                    f"the process for {self._adapter.spec} {how} while it loaded, {self._failed_starts} times in a row"
                )
            return
        guilty = set[int]() if worker.is_side_by_side else {sent.id for sent in list(worker.sent)[:1]}
        self._settle(worker, guilty, f"the process of the {self._adapter.kind} function {how}")

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for worker in list(self._workers):
            if worker.ready is None and worker.started_at_s + START_TIMEOUT_S <= now_s:
                self._remove(worker)
                raise RewardProcessError(f"{self._adapter.spec} did not load within {START_TIMEOUT_S:g} s")
            if guilty := worker.overdue():
                limit_s = next(sent.timeout_s for sent in worker.sent if sent.id in guilty)
                self._remove(worker)
                key = f" ({self._adapter.timeout_key})" if self._adapter.timeout_key else ""
                self._settle(worker, guilty, f"the {self._adapter.kind} function took longer than {limit_s:g} s{key}")

    def _remove(self, worker: WorkerProcess) -> str:
        self._selector.unregister(worker.socket)
        self._workers.remove(worker)
        self.num_restarts += 1
        return worker.end()

    def _settle(self, worker: WorkerProcess, guilty: set[int], reason: str) -> None:
        """Answer for the calls that ended the process; the others wait again, before all that came later."""
        again: list[_Job[CommandT]] = []
        for sent in worker.sent:
            job = self._running.pop(sent.id)
            job.num_deaths += 1
            if sent.id in guilty or job.num_deaths >= MAX_DEATHS:
                self._answer(job, CallFailed(sent.id, 0.0, reason))
            else:
                again.append(job)
        self._queue.extendleft(reversed(again))

    def _answer(self, job: _Job[CommandT], answer: Answer) -> None:
        self.num_answered += 1
        self.num_failed += isinstance(answer, CallFailed)
        self._emit(self._adapter.event(job.command, answer))
