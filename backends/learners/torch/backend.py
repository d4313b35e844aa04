"""The torch learner in one process, as a backend: a worker thread that carries out commands in order.

Invariants:

* Model, optimizer and exporter are touched by the worker thread only; ``execute`` puts a command in its queue.
* An error ends both threads, the worker's and that which writes checkpoints, through ``fail``; nothing is answered
  after it. What was exported stays then, for engines that start before the next learner has published.

| wait | who ends it |
|---|---|
| worker, for a command | ``execute``, or ``close`` with the end mark |
| ``close``, for the worker | the worker, which looks for the end before each micro-batch; at the latest the timeout |
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from penstock.backends.devices import choose_device
from penstock.backends.learners.torch.worker import TorchWorker
from penstock.backends.learners.worker_group.workers import alone_on

if TYPE_CHECKING:
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.words import LearnerAnswer
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.base import Metric
    from penstock.messages.commands import LearnerCommand


def open_torch_learner(plan: LearnerPlan, exporter: WeightExporter) -> Backend[LearnerCommand]:
    """A learner in this process, checked before its thread starts; the model is loaded by its ``OpenLearner``.

    Args:
        plan: of the learner.
        exporter: closed by the learner at its normal end, and left as it is when the learner fails.

    Raises:
        UserFault: the demonstrations of ``learner.warm_start`` are missing, or the device does not exist.
    """
    plan.check()
    return TorchLearnerBackend(plan, alone_on(choose_device(plan.options.device, "learner.device")), exporter)


class _LearnerClosed(Exception):  # noqa: N818  # no error: the way out of a long command
    """Unwinds the worker when ``close`` was called or a checkpoint could not be written; never leaves it."""


class TorchLearnerBackend:
    """Carries out the Learner's commands with torch."""

    def __init__(self, plan: LearnerPlan, workers: WorkerGroup, exporter: WeightExporter) -> None:
        """``workers`` has one rank, which is this process."""
        assert workers.is_alone
        self._num_threads = plan.options.num_threads
        self._worker = TorchWorker(plan, workers, self, exporter)
        self._commands: SimpleQueue[LearnerCommand | None] = SimpleQueue()
        self._closing = threading.Event()
        self._failed = threading.Event()
        self._thread: threading.Thread | None = None
        self._gauges: tuple[Metric, ...] = ()

    def start(self, emit: Emit, fail: Fail) -> None:
        self._emit, self._fail = emit, fail
        self._thread = threading.Thread(target=self._work, name="torch-learner", daemon=True)
        self._thread.start()

    def execute(self, command: LearnerCommand, /) -> None:
        self._commands.put(command)

    def gauges(self) -> tuple[Metric, ...]:
        return self._gauges

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def emit(self, answer: LearnerAnswer, /) -> None:
        """See :class:`.WorkerHost`."""
        if not (self._closing.is_set() or self._failed.is_set()):
            self._emit(answer)

    def fail(self, error: BaseException, /) -> None:
        """See :class:`.WorkerHost`."""
        self._failed.set()
        self._fail(error)

    def check_stop(self) -> None:
        """See :class:`.WorkerHost`."""
        if self._closing.is_set() or self._failed.is_set():
            raise _LearnerClosed

    def show(self, gauges: tuple[Metric, ...], /) -> None:
        """See :class:`.WorkerHost`."""
        # Another thread reads the gauges; it gets this tuple or the one before, never a half of each.
        self._gauges = gauges

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while (command := self._commands.get()) is not None:
                self.check_stop()
                answer = self._worker.carry_out(command)
                if answer is not None:
                    self._emit(answer)
        except _LearnerClosed:
            pass
        except BaseException as error:
            # The thread's only way to tell: an error that ended it silently would look like a step that never ends.
            self.fail(error)
        if self._failed.is_set():
            self._worker.settle()
        else:
            self._worker.finish()
