"""Nodes of a worker group that are this machine: each command is a process of its own, as on another node."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.processes.guardian import (
    Exited,
    GuardianJob,
    Handed,
    LogLine,
    Started,
    decode_word,
    start_guardian,
)
from penstock.backends.processes.remote_ranks import RankEnded, RemoteRankError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_LOG_BYTES = 1 << 20
LOOPBACK = "127.0.0.1"


class LocalNodes:
    """A :class:`~penstock.backends.processes.remote_ranks.RemoteRanks` with a guardian for each command."""

    host = LOOPBACK

    def __init__(self, num_nodes: int = 2, *, before: Callable[[], None] | None = None) -> None:
        """``before`` is called before anything is started."""
        self.num_nodes = num_nodes
        self.pids: dict[int, int] = {}
        self._before = before
        self._guardians: dict[int, subprocess.Popen[bytes]] = {}
        self._ends: asyncio.Queue[RankEnded] = asyncio.Queue()
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log_path: str) -> int:
        if self._before is not None:
            self._before()
        Path(log_path).parent.mkdir(parents=True, exist_ok=True)
        job = GuardianJob(tuple(command), os.getpid(), log_path, MAX_LOG_BYTES)
        guardian = self._guardians[rank] = start_guardian(job, {**os.environ, **environment})
        assert guardian.stdout is not None
        word = decode_word(await asyncio.to_thread(guardian.stdout.readline))
        if not isinstance(word, Started):
            raise RemoteRankError(f"node {rank} could not start its process")
        self.pids[rank] = word.pid
        self._watches.append(asyncio.create_task(self._watch(rank, guardian)))
        return word.pid

    async def ended(self) -> RankEnded:
        return await self._ends.get()

    async def stop(self) -> None:
        for guardian in self._guardians.values():
            assert guardian.stdin is not None
            guardian.stdin.close()
        if self._watches:
            await asyncio.wait(self._watches)

    async def _watch(self, rank: int, guardian: subprocess.Popen[bytes]) -> None:
        exit_code, lines = await asyncio.to_thread(_read, guardian)
        self._ends.put_nowait(RankEnded(rank, f"exit code {exit_code}", lines))


class LooseNodes(LocalNodes):
    """Without a guardian: nothing but its line ends a node's launcher."""

    async def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log_path: str) -> int:
        process = await asyncio.to_thread(_start, command, {**os.environ, **environment}, Path(log_path))
        self.pids[rank] = process.pid
        return process.pid

    async def stop(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)


def _start(command: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def _read(guardian: subprocess.Popen[bytes]) -> tuple[int, tuple[str, ...]]:
    """Until it ends: exit code of the command, and what it wrote."""
    assert guardian.stdout is not None
    exit_code, lines = -signal.SIGKILL, list[str]()
    for line in guardian.stdout:
        match decode_word(line):
            case LogLine(text):
                lines.append(text)
            case Exited(code):
                exit_code = code
            case Started() | Handed():
                pass
    guardian.wait()
    guardian.stdout.close()
    return exit_code, tuple(lines)
