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
import time
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.backends.processes.function_pool import FunctionPool
from penstock.backends.rewards.process import WorkerProcess
from penstock.backends.rewards.wire import Answer, CallFailed

if TYPE_CHECKING:
    from penstock.backends.rewards.process import Sent
    from penstock.backends.rewards.wire import Call, Launched

MAX_DEATHS: Final = 2

CommandT = TypeVar("CommandT")


class _Job(Generic[CommandT]):
    def __init__(self, call_id: int, command: CommandT) -> None:
        self.call_id = call_id
        self.command = command
        self.num_deaths = 0


class WorkerPool(FunctionPool[Answer, WorkerProcess], Generic[CommandT]):
    """See the module. A subclass says how commands become calls and what becomes of the answers."""

    def __init__(
        self, kind: str, spec: str, num_workers: int = 1, *, launched: Launched | None = None, timeout_key: str = ""
    ) -> None:
        """
        Args:
            kind: of the function, as :func:`penstock.backends.rewards.functions.load_function` knows it.
            spec: ``file.py:name``, or the name of one that is built in.
            num_workers: processes that run it.
            launched: options of a reward function.
            timeout_key: the scenario's key of the deadline, for messages; empty when there is none.
        """
        super().__init__(f"{kind}-pool", spec, num_workers)
        self._kind = kind
        self._spec = spec
        self._launched = launched
        self._timeout_key = timeout_key
        self._ids = itertools.count()
        self._queue: deque[_Job[CommandT]] = deque()
        self._running: dict[int, _Job[CommandT]] = {}
        self.num_answered = 0
        self.num_failed = 0

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

    # --- what a subclass does, on the thread ------------------------------------------------------------------

    @abstractmethod
    def _call(self, command: CommandT, call_id: int, names: tuple[str, ...]) -> Call:
        """The call of this command, with what the function asks for."""

    @abstractmethod
    def _on_answer(self, command: CommandT, answer: Answer) -> None:
        """The function, or the pool in its place, has answered a command."""

    # --- the thread -------------------------------------------------------------------------------------------

    def _open_process(self) -> WorkerProcess:
        return WorkerProcess(self._kind, self._spec, self._launched)

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
            call = self._call(job.command, job.call_id, worker.ready.names)
            batches.setdefault(load[2], []).append(call)
        for number, calls in batches.items():
            self._processes[number].call(calls)

    def _on_said(self, process: WorkerProcess, said: Answer) -> None:
        process.answered(said.id, said.elapsed_s)
        self._answer(self._running.pop(said.id), said)

    def _on_lost(self, process: WorkerProcess, how: str) -> None:
        guilty = [] if process.is_side_by_side else list(process.sent)[:1]
        self._settle(process, guilty, f"the process of the {self._kind} function {how}")

    def _deadline_s(self, process: WorkerProcess) -> float | None:
        return min((deadline_s for deadline_s, _ in process.deadlines()), default=None)

    def _on_overdue(self, process: WorkerProcess) -> None:
        now_s = time.monotonic()
        guilty = [sent for deadline_s, sent in process.deadlines() if deadline_s <= now_s]
        self._drop(process)
        key = f" ({self._timeout_key})" if self._timeout_key else ""
        self._settle(process, guilty, f"the {self._kind} function took longer than {guilty[0].timeout_s:g} s{key}")

    def _settle(self, worker: WorkerProcess, guilty: list[Sent], reason: str) -> None:
        """Answer for the calls that ended the process; the others wait again, before all that came later."""
        again: list[_Job[CommandT]] = []
        for sent in worker.sent:
            job = self._running.pop(sent.id)
            job.num_deaths += 1
            if sent in guilty or job.num_deaths >= MAX_DEATHS:
                self._answer(job, CallFailed(sent.id, 0.0, reason))
            else:
                again.append(job)
        self._queue.extendleft(reversed(again))

    def _answer(self, job: _Job[CommandT], answer: Answer) -> None:
        self.num_answered += 1
        self.num_failed += isinstance(answer, CallFailed)
        self._on_answer(job.command, answer)
