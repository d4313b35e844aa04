"""The driver's end of the zygote: the local host, and the launcher that starts and kills its processes.

Invariants:

* A process is killed by its pid where it has announced itself, and by the zygote as well: one of them always knows it.
* Whatever GPUs this machine has belong to the run alone; ``CUDA_VISIBLE_DEVICES`` of the driver says which it may use.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from itertools import count
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.processes import process_facts as processes
from penstock.backends.processes.process_facts import how_it_ended
from penstock.messages.names import role_of
from penstock.runtime.hosts.local.wire import (
    MAX_PACKET_BYTES,
    ChildKind,
    Fork,
    Gone,
    Kill,
    Warm,
    content_of,
    memory_file,
    send,
)
from penstock.runtime.hosts.local.zygote import HOST, NODE_ID
from penstock.runtime.hosts.processes.boot import VISIBLE_DEVICES, ProcessEnd
from penstock.runtime.hosts.processes.ports import EndedProcess
from penstock.runtime.hosts.processes.prepare_process import PreparationProcess
from penstock.runtime.run.gpu_needs import NodeGpus

if TYPE_CHECKING:
    from concurrent.futures import Future

    from penstock.runtime.hosts.local.warm import Modules
    from penstock.runtime.hosts.processes.boot import Boot
    from penstock.runtime.hosts.processes.control import ProcessStarted
    from penstock.runtime.hosts.processes.job import DriverJob
    from penstock.runtime.run.placement import Placement

STOP_TIMEOUT_S: Final = 10.0
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""As Ray sets it for actors that ask for no CPU; and pools that start threads when they are imported do not."""


class LocalHost:
    """This machine. Implements ``penstock.runtime.hosts.processes.ports.ProcessHost``."""

    phase = "importing what the actors need"
    node_host = HOST
    is_embedded = True

    def __init__(self, modules: Modules) -> None:
        """Starts the zygote, which imports these modules while the caller goes on. For the main thread."""
        self.modules = modules
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.runtime.hosts.local.zygote", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=ONE_THREAD | os.environ,
        )
        theirs.close()
        self._numbers = count(1)
        send(self._end, Warm(modules.first, modules.later))

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._end.fileno()

    def prepare(self, job: DriverJob) -> PreparationProcess:
        """Prepare a run, in a process of its own."""
        reader, writer = os.pipe()
        self.fork(ChildKind.PREPARATION, "prepare", job, writer, is_early=self.modules.prepares_early)
        os.close(writer)
        return PreparationProcess(os.fdopen(reader, "rb"), lambda: "its process is gone")

    def start(self) -> None:
        """Nothing else has to be started."""

    def nodes(self) -> list[NodeGpus]:
        """This machine and its GPUs."""
        return [NodeGpus(NODE_ID, len(visible_gpus()))]

    def launcher(self, placement: Placement) -> LocalLauncher:
        """Who starts the actors."""
        return LocalLauncher(self, placement)

    def fork(
        self,
        kind: ChildKind,
        title: str,
        given: msgspec.Struct,
        answer: int,
        devices: str | None = None,
        *,
        is_early: bool = False,
    ) -> int:
        """Start a process, as :class:`.Fork` says; its number."""
        number = next(self._numbers)
        file = memory_file(msgspec.msgpack.encode(given))
        with contextlib.suppress(ConnectionError):  # the zygote is gone, which ``broken`` tells
            order = Fork(number=number, kind=kind, title=title, devices=devices, is_early=is_early)
            send(self._end, order, (file, answer))
        os.close(file)
        return number

    def kill(self, number: int) -> None:
        """SIGKILL, if the process is still there."""
        with contextlib.suppress(ConnectionError):  # with the zygote its processes are gone
            send(self._end, Kill(number))

    def gone(self) -> list[int]:
        """The numbers of the processes that have ended since the last call."""
        found: list[int] = []
        while True:
            try:
                data = self._end.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionResetError):
                return found
            if not data:
                return found
            found.append(msgspec.json.decode(data, type=Gone).number)

    def broken(self) -> str:
        """Why nothing can be started any more; empty while all is well."""
        code = self._process.poll()
        return "" if code is None else f"the process that actors are forked from {how_it_ended(code)}"

    def stop(self) -> None:
        """End the zygote, and with it every process that it has started."""
        left = [
            (pid, facts) for pid in processes.descendants_of(self._process.pid) if (facts := processes.facts_of(pid))
        ]
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        self._end.close()
        for pid, facts in left:
            processes.kill(pid, facts.start_ticks)


class LocalLauncher:
    """Implements ``penstock.runtime.hosts.processes.ports.Launcher``, whose docstrings say what each method is for."""

    def __init__(self, host: LocalHost, placement: Placement) -> None:
        self._host = host
        self._devices = devices_of(placement, visible_gpus())
        self._boot: Boot | None = None
        """The last; all are of one run."""
        self._numbers: dict[tuple[str, int], int] = {}
        self._answers: dict[int, tuple[str, int, int]] = {}
        """Of each process: name, epoch, and the file that its last word is written to."""

    def fileno(self) -> int:
        return self._host.fileno()

    def launch(self, boot: Boot) -> None:
        self._boot = boot
        answer = memory_file()
        is_early = role_of(boot.name) in self._host.modules.early
        devices = self._devices.get(boot.name)
        number = self._host.fork(ChildKind.ACTOR, boot.name, boot, answer, devices, is_early=is_early)
        self._numbers[boot.name, boot.epoch] = number
        self._answers[number] = boot.name, boot.epoch, answer

    def reserve(self, name: str) -> None:
        """Nothing to do: whatever GPUs this machine has are the run's."""

    def lacks(self, name: str) -> str:
        return ""

    def end_left(self, name: str) -> None:
        from penstock.runtime.hosts.processes.left_behind import end_left_here

        if self._boot is not None:
            end_left_here(name, self._boot)

    def end_whole(self, name: str, process: ProcessStarted) -> list[Future[list[int]]]:
        from penstock.runtime.hosts.processes.whole_end import end_whole_here, marks_of_actor

        assert self._boot is not None, "who is to end was launched"
        return [end_whole_here((process.pid, process.start_ticks), marks_of_actor(name, self._boot))]

    def make_spare(self) -> None:
        """Nothing to do: the zygote is warm."""

    def announced(self, process: ProcessStarted) -> None:
        """Nothing to do: its pid is of this machine."""

    def is_local(self, process: ProcessStarted) -> bool:
        return True

    def kill(self, name: str, epoch: int, process: ProcessStarted | None) -> None:
        if process is not None:
            processes.kill(process.pid, process.start_ticks)
        number = self._numbers.pop((name, epoch), None)
        if number is not None:
            self._host.kill(number)

    def ended(self) -> list[EndedProcess]:
        gone = [self._answers.pop(number) for number in self._host.gone() if number in self._answers]
        return [self._ended(*each) for each in gone]

    def broken(self) -> str:
        return self._host.broken()

    def _ended(self, name: str, epoch: int, answer: int) -> EndedProcess:
        word = content_of(answer)
        os.close(answer)
        return EndedProcess(name, epoch, msgspec.msgpack.decode(word, type=ProcessEnd) if word else None)


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is not None:
        return tuple(filter(None, visible.split(",")))
    from penstock.runtime.observability.nvml import gpu_names

    return tuple(map(str, range(len(gpu_names()))))


def devices_of(placement: Placement, gpus: tuple[str, ...]) -> dict[str, str]:
    """``CUDA_VISIBLE_DEVICES`` of each actor that was given GPUs; blocks take them in order."""
    found: dict[str, str] = {}
    first = 0
    for block in placement.blocks:
        devices = gpus[first : first + block.gpus_per_node]
        first += block.gpus_per_node
        for name in block.members:
            found[name] = ",".join(devices[placement.gpus_of(name)])
    return found
