"""Processes that are the ranks of a worker group, for tests: started once, given one job after the other.

A job is a module-level function of a worker group and of what is pickled to it; each of the first ``n`` processes runs
it and sends back what it returned. They come from a fork server that has imported torch and transformers already.
"""

# multiprocessing's connections and torch.distributed are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from penstock.backends.learners.worker_group.workers import WorkerGroup, alone_on, join_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

CPU = torch.device("cpu")
JOB_TIMEOUT_S = 240.0
COLLECTIVE_TIMEOUT_S = 60.0
PRELOADED = ["penstock.backends.learners.torch.trainer", "transformers.models.qwen3.modeling_qwen3"]

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class Ranks:
    """Processes that wait for jobs. They are started for the first job that is not for one rank alone."""

    def __init__(self, size: int, folder: Path) -> None:
        self._size = size
        self._folder = folder
        self._num_jobs = 0
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self._size):
            mine, its = context.Pipe()
            process = context.Process(target=_serve, args=(rank, its), daemon=True)
            process.start()
            its.close()
            self._processes.append(process)
            self._connections.append(mine)

    def run(
        self, num_ranks: int, job: Callable[Concatenate[WorkerGroup, P], ResultT], *args: P.args, **keys: P.kwargs
    ) -> list[ResultT]:
        """What each rank returned; one rank runs it here, as a worker group of one."""
        if num_ranks == 1:
            return [job(alone_on(CPU), *args, **keys)]
        if not self._processes:
            self._start()
        self._num_jobs += 1
        store = str(self._folder / f"store-{self._num_jobs}")
        for connection in self._connections[:num_ranks]:
            connection.send((num_ranks, store, job, args, keys))
        answers: list[Any] = []
        for rank, connection in enumerate(self._connections[:num_ranks]):
            assert connection.poll(JOB_TIMEOUT_S), f"rank {rank} did not answer"
            answers.append(connection.recv())
        stories = [f"rank {rank}:\n{story}" for rank, (story, _) in enumerate(answers) if story]
        assert not stories, "\n".join(stories)
        return [cast("ResultT", result) for _, result in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(JOB_TIMEOUT_S)


@contextmanager
def open_ranks(size: int) -> Generator[Ranks]:
    """Ended with the block."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(size, Path(folder))
        try:
            yield ranks
        finally:
            ranks.close()


def _serve(rank: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            num_ranks, store, job, args, keys = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("", _run(rank, num_ranks, store, job, args, keys)))
        except Exception:
            connection.send((traceback.format_exc(), None))


def _run(
    rank: int, num_ranks: int, store: str, job: Callable[..., object], args: tuple[object, ...], keys: dict[str, object]
) -> object:
    workers = join_workers(
        store=dist.FileStore(store, num_ranks),  # type: ignore[attr-defined]  # it is exported
        rank=rank,
        num_ranks=num_ranks,
        device=CPU,
        timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    try:
        return job(workers, *args, **keys)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
