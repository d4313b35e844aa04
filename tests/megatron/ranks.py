"""A few processes with gloo and megatron-core, in which many layouts are tried one after the other.

They are forked from a server that has imported megatron-core once for the whole session: importing it takes a process
eight seconds of a core, and a fork a fraction of one. The server has neither threads nor groups, so that what it forks
is as good as new.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

HERE = Path(__file__).parent
PRELOADED = "preloaded"
"""The module beside this one that the server imports."""
START_S = 240.0
"""With the import, of which the first ranks wait for the end."""
ANSWER_S = 180.0
COLLECTIVE_S = 120.0


def start_server() -> None:
    """Begin to import what ranks need, if that has not begun; this process does not wait for it."""
    os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOADED])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [before])])  # its only way to find the module
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Ranks:
    """Runs functions of the modules beside the tests on every rank."""

    def __init__(self, count: int) -> None:
        start_server()
        self.is_open = True
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._connections: list[Connection[Any, Any]] = []
        self._processes: list[ForkServerProcess] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, store, rank, count), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._receive(START_S)

    def run(self, function: str, *args: object) -> list[Any]:
        """Call ``module:function`` with the rank and these arguments, everywhere.

        Returns:
            What each rank gave.
        """
        for connection in self._connections:
            connection.send((function, args))
        return self._receive(ANSWER_S)

    def await_end(self) -> None:
        """Until the process of every rank has ended by itself."""
        deadline = time.monotonic() + ANSWER_S
        for rank, process in enumerate(self._processes):
            process.join(deadline - time.monotonic())
            assert not process.is_alive(), f"rank {rank} has not ended within {ANSWER_S:.0f} s"

    def close(self) -> None:
        self.is_open = False
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _receive(self, timeout_s: float) -> list[Any]:
        """The answers of all ranks. After a failure all are ended: the others would wait for one that does not come."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(self._connections):
            missing = {c: rank for rank, c in enumerate(self._connections) if rank not in answers}
            ready = wait(list(missing), deadline - time.monotonic())
            for connection in cast("list[Connection[Any, Any]]", ready):
                rank = missing[connection]
                is_fine, answers[rank] = connection.recv()
                if not is_fine:
                    self.close()
                    raise AssertionError(f"rank {rank}:\n{answers[rank]}")
            if not ready:
                self.close()
                raise AssertionError(f"ranks {sorted(missing.values())} gave no answer within {timeout_s:.0f} s")
        return [answers[rank] for rank in sorted(answers)]


def serve(connection: Connection[Any, Any], store: str, rank: int, count: int) -> None:
    """What a process does, until its connection ends."""
    importlib.import_module(PRELOADED)  # done already, unless it failed in the server: then it says here why
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    dist.init_process_group(
        "gloo", store=FileStore(store, count), rank=rank, world_size=count, timeout=timedelta(seconds=COLLECTIVE_S)
    )
    connection.send((True, None))
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        module, name = function.split(":")
        try:
            connection.send((True, getattr(importlib.import_module(module), name)(rank, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
            return
        gc.collect()  # models, and with them their groups, each of which has threads
