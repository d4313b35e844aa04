"""Calls of one user's function, in a pool of processes.

Invariants:

* Every command that was submitted is answered once: with what the function returned, or with a reason. (Closing is
  the exception: then nobody listens.)
* A call that overruns costs its own process and nothing else. What waited behind it goes to another process, once;
  who is in a dying process for the second time is taken for the cause.

| waits for | who ends it |
|---|---|
| an answer | the process; past the call's deadline the pool kills it and answers itself |
| a free process | the answers and deadlines of the calls before |
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from penstock.backends.processes.function_pool import FunctionPool
from penstock.backends.rewards.process import WorkerProcess
from penstock.backends.rewards.wire import Answer, CallFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.protocol import Fail
    from penstock.backends.rewards.wire import Call

MAX_DEATHS: Final = 2

CommandT = TypeVar("CommandT")
AdaptedT = TypeVar("AdaptedT", contravariant=True)
EventT = TypeVar("EventT", covariant=True)
AnsweredT = TypeVar("AnsweredT")


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


class WorkerPool(FunctionPool[Answer, WorkerProcess], Generic[CommandT, AnsweredT]):
    """See the module."""

    def __init__(self, adapter: CallAdapter[CommandT, AnsweredT], num_workers: int) -> None:
        super().__init__(f"{adapter.kind}-pool", adapter.spec, num_workers)
        self._adapter = adapter
        self._ids = itertools.count()
        self._queue: deque[_Job[CommandT]] = deque()
        self._running: dict[int, _Job[CommandT]] = {}
        self.num_answered = 0
        self.num_failed = 0

    def start(self, emit: Callable[[AnsweredT], None], fail: Fail) -> None:
        """Start the thread, and with it the processes."""
        self._emit = emit
        self._begin(fail)

    def submit(self, command: CommandT) -> None:
        """Have this done. From any thread; returns at once."""
        self._queue.append(_Job(next(self._ids), command))
        self._wake()

    @property
    def num_waiting(self) -> int:
        """Commands that no process works on."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Commands that processes have."""
        return len(self._running)

    # --- the thread -------------------------------------------------------------------------------------------

    def _open_process(self) -> WorkerProcess:
        return WorkerProcess(self._adapter.kind, self._adapter.spec, self._adapter.options_json)

    def _hand_out(self) -> None:
        """Send what waits to the processes with the least work, one frame each."""
        batches: dict[int, list[Call]] = {}
        loads = [[len(worker.sent), worker.room, number] for number, worker in enumerate(self._processes)]
        while self._queue and (free := [load for load in loads if load[1] > 0]):
            load = min(free)
            load[0] += 1
            load[1] -= 1
            worker = self._processes[load[2]]
            assert worker.ready is not None
            job = self._queue.popleft()
            self._running[job.call_id] = job
            call = self._adapter.call(job.command, job.call_id, worker.ready.names)
            batches.setdefault(load[2], []).append(call)
        for number, calls in batches.items():
            self._processes[number].call(calls)

    def _on_said(self, process: WorkerProcess, said: Answer) -> None:
        process.answered(said.id, said.elapsed_s)
        self._answer(self._running.pop(said.id), said)

    def _on_lost(self, process: WorkerProcess, how: str) -> None:
        guilty = set[int]() if process.is_side_by_side else {sent.id for sent in list(process.sent)[:1]}
        self._settle(process, guilty, f"the process of the {self._adapter.kind} function {how}")

    def _deadline_s(self, process: WorkerProcess) -> float | None:
        return process.deadline_s()

    def _on_overdue(self, process: WorkerProcess) -> None:
        guilty = process.overdue()
        limit_s = next(sent.timeout_s for sent in process.sent if sent.id in guilty)
        self._drop(process)
        key = f" ({self._adapter.timeout_key})" if self._adapter.timeout_key else ""
        self._settle(process, guilty, f"the {self._adapter.kind} function took longer than {limit_s:g} s{key}")

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
