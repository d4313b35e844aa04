"""The zygote: a process with one thread that has imported what actors need, and forks a process for each of them.

Invariants:

* It never has a second thread when it forks, and never touches CUDA: a copy of a lock that another thread holds, or of
  a CUDA context, is of no use to anybody. With a second thread it ends, and says whose that is.
* A process whose actor was given GPUs is forked and becomes a fresh interpreter at once.
* What needs little is forked between two imports of what others need, so that it starts beside them.
* It imports and forks, and computes nothing, so a wait for it is short. Its end ends every process that it has
  started, and the driver's end ends it.

| waits for | who ends it |
|---|---|
| an order | the driver; the driver's end |
| the end of a process | the process; whoever kills it |

Started as ``python -m penstock.runtime.hosts.local.zygote DESCRIPTOR``.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import select
import signal
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

import msgspec

from penstock.backends.processes.process_facts import end_with_parent
from penstock.runtime.hosts.local.wire import (
    MAX_PACKET_BYTES,
    ChildKind,
    Fork,
    Gone,
    Kill,
    Order,
    Warm,
    content_of,
    send,
)
from penstock.runtime.hosts.processes.boot import VISIBLE_DEVICES, Boot
from penstock.runtime.hosts.processes.job import DriverJob

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

NODE_ID: Final = "local"
HOST: Final = "127.0.0.1"
MAX_DESCRIPTORS: Final = 2
_MODULE: Final = "penstock.runtime.hosts.local.zygote"


class ThreadsBeforeForkError(RuntimeError):
    """Something that was imported has started a thread, so nothing can be forked."""


class _Waiting(NamedTuple):
    """What is forked when all modules are there."""

    order: Fork
    descriptors: list[int]


class Zygote:
    """Carries out the driver's orders until the driver is gone."""

    def __init__(self, driver: socket.socket) -> None:
        self._driver = driver
        self._poll = select.poll()
        self._poll.register(driver, select.POLLIN)
        self._children: dict[int, int] = {}
        """The number of each, by the handle of its process."""
        self._left: deque[str | _Waiting] = deque()
        """Modules that are still to be imported, and behind them what waits for them."""

    def run(self) -> None:
        """Returns when the driver has closed its end."""
        while True:
            news = self._poll.poll(0 if self._left else None)
            for descriptor, _ in news:
                if descriptor in self._children:
                    self._reap(descriptor)
                elif not self._obey():
                    return
            if self._left and not news:
                self._go_on(self._left.popleft())

    def _go_on(self, next_: str | _Waiting) -> None:
        if isinstance(next_, str):
            _warm((next_,))
        else:
            self._fork(next_.order, next_.descriptors)

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._driver, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
        if not data:
            return False
        order: Order = msgspec.json.decode(data, type=Order)
        match order:
            case Warm():
                _warm(order.first)
                self._left.extend(order.later)
            case Fork():
                if self._left and not order.is_early:
                    self._left.append(_Waiting(order, descriptors))
                else:
                    self._fork(order, descriptors)
            case Kill():
                self._kill(order.number)
        return True

    def _kill(self, number: int) -> None:
        for handle, child in self._children.items():
            if child == number:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        for each in [each for each in self._left if isinstance(each, _Waiting) and each.order.number == number]:
            self._left.remove(each)
            _close(each.descriptors)
            send(self._driver, Gone(number))

    def _fork(self, order: Fork, descriptors: list[int]) -> None:
        check_threads()
        zygote, pid = os.getpid(), os.fork()
        if not pid:
            end_with_parent(signal.SIGKILL)
            if os.getppid() != zygote:  # it ended before the kernel knew
                os._exit(1)
            self._driver.close()
            _close(self._children)
            for each in self._left:
                _close(each.descriptors if isinstance(each, _Waiting) else ())
            live(order.kind, order.title, descriptors, order.devices)
        _close(descriptors)
        handle = os.pidfd_open(pid)
        self._children[handle] = order.number
        self._poll.register(handle, select.POLLIN)

    def _reap(self, handle: int) -> None:
        number = self._children.pop(handle)
        self._poll.unregister(handle)
        os.waitid(os.P_PIDFD, handle, os.WEXITED)
        os.close(handle)
        send(self._driver, Gone(number))


def check_threads() -> None:
    """
    Raises:
        ThreadsBeforeForkError: this process has more than one thread.
    """
    tasks = os.listdir("/proc/self/task")
    if len(tasks) > 1:
        names = [_read(f"/proc/self/task/{task}/comm") for task in tasks]
        raise ThreadsBeforeForkError(f"the process that actors are forked from has {len(tasks)} threads: {names}")


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def _warm(modules: tuple[str, ...]) -> None:
    gc.disable()  # modules stay, so collecting between them finds nothing, for a tenth of the time
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # what is here stays, and pages that the collector never touches are never copied


def live(kind: ChildKind, title: str, descriptors: list[int], devices: str | None) -> NoReturn:
    """The life of a process from its fork to its end."""
    signal.signal(signal.SIGTERM, _exit)
    with open("/proc/self/comm", "w", encoding="utf-8") as comm:
        comm.write(title)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if devices is not None:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        arguments = [sys.executable, "-m", _MODULE, kind.value, title, *map(str, descriptors)]
        os.execve(sys.executable, arguments, {**os.environ, VISIBLE_DEVICES: devices})
    exit_code = 1
    try:
        random.seed()  # the same state in every copy otherwise
        _work(kind, *descriptors)
        exit_code = 0
    finally:  # with its traceback in the log where it is an error
        if (error := sys.exception()) is not None and not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # what the zygote would do at its end is not for its children to do


def _work(kind: ChildKind, given: int, answer: int) -> None:
    data = content_of(given)
    match kind:
        case ChildKind.ACTOR:
            from penstock.runtime.hosts.processes.actor_process import run_process

            end = run_process(msgspec.msgpack.decode(data, type=Boot), node_id=NODE_ID, node_host=HOST)
            os.write(answer, msgspec.msgpack.encode(end))
        case ChildKind.PREPARATION:
            from penstock.runtime.hosts.processes.prepare import answer_job

            with os.fdopen(os.dup(answer), "wb", buffering=0) as out:
                answer_job(msgspec.msgpack.decode(data, type=DriverJob), out)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """The zygote, or a fresh interpreter in place of a fork: ``KIND TITLE DESCRIPTOR DESCRIPTOR``."""
    if len(sys.argv) > 2:
        kind, title, *descriptors = sys.argv[1:]
        live(ChildKind(kind), title, [int(descriptor) for descriptor in descriptors], None)
    end_with_parent(signal.SIGKILL)
    Zygote(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    # Under its own name, so that what its children import is this very module.
    from penstock.runtime.hosts.local.zygote import main as main_by_name

    main_by_name()
