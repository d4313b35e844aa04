"""The further processes of an engine, or of the learner, over several nodes, as Ray actors in the other bundles of its
placement group.

```
EngineWorker (bundle 0) ── Ray ──► NodeRank (bundle 1, …) ── pipe ──► guardian ──► the command, and all that it starts
```

Invariants:

* A NodeRank holds the GPUs of its bundle, and its command sees exactly these.
* When the NodeRank's process ends, in any way, its guardian kills every process of the command. Ray ends a NodeRank
  when the process that started it has ended, so the same holds for the EngineWorker.
* Each NodeRank runs one command, once. A rank that is started again gets a NodeRank of its own, which Ray starts when
  its predecessor has given the GPUs back.

The module must stay importable by name: Ray starts it in another process.
"""

# Ray's own types are mostly unknown to a type checker; everything that leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from penstock.backends.processes.guardian import (
    Exited,
    GuardianJob,
    Handed,
    LogLine,
    Started,
    decode_word,
    start_guardian,
)
from penstock.backends.processes.remote_ranks import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    RankEnded,
    RemoteRankError,
)
from penstock.runtime.hosts.processes.job import ACTOR_VARIABLE, RUN_FOLDER_VARIABLE, RUN_ID_VARIABLE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

MAX_LOG_BYTES: Final = 64 << 20
NUM_LAST_LINES: Final = 40
SPARE_CHILDREN: Final = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Ray would kill the guardian, and only it, before it can end the rest. Ray reads this when the process starts, and a
cluster may have been started by somebody else, so it goes the slow way, which takes a second or two."""


class NodeRank:
    """Runs one command on its node; a Ray actor with the GPUs of its bundle. ``stop`` may come while ``wait`` waits."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._guardian: subprocess.Popen[bytes] | None = None
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)

    def start(self, command: tuple[str, ...], environment: dict[str, str], log_path: str) -> int:
        """The pid of the command's process.

        Raises:
            RemoteRankError: it could not be started.
        """
        # Ray blocks SIGINT in its workers, and children would inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.makedirs(os.path.dirname(log_path), exist_ok=True)
        job = GuardianJob(tuple(command), os.getpid(), log_path, MAX_LOG_BYTES)
        self._guardian = start_guardian(job, {**os.environ, **environment})
        assert self._guardian.stdout is not None
        line = self._guardian.stdout.readline()
        word = decode_word(line) if line else None
        if not isinstance(word, Started):
            raise RemoteRankError(f"{command[0]} could not be started on this node; see {log_path} there")
        return word.pid

    def stop(self) -> None:
        """End it; ``wait`` returns when everything is gone."""
        if self._guardian is not None and self._guardian.stdin is not None:
            self._guardian.stdin.close()

    def wait(self) -> tuple[int, tuple[str, ...]]:
        """Exit code of the command, minus the signal's number if one ended it; and the end of what it wrote."""
        assert self._guardian is not None
        assert self._guardian.stdout is not None
        exit_code = -signal.SIGKILL  # what a guardian does to it when it has to end itself
        for line in self._guardian.stdout:
            match decode_word(line):
                case LogLine(text):
                    self._last_lines.append(text)
                case Exited(code):
                    exit_code = code
                case Started() | Handed():
                    pass
        self._guardian.wait(STOP_TIMEOUT_S)
        return exit_code, tuple(self._last_lines)


def _own_marks() -> dict[str, str]:
    """By which it is known who has started what runs on another node."""
    return {
        name: os.environ[name] for name in (RUN_ID_VARIABLE, RUN_FOLDER_VARIABLE, ACTOR_VARIABLE) if name in os.environ
    }


class RayRemoteRanks:
    """The other nodes of this EngineWorker, or of the Learner: their ``RemoteRanks``."""

    def __init__(self) -> None:
        """For the Ray actor that this process is. Without a placement group it has no other nodes."""
        import ray
        from ray.util.placement_group import get_current_placement_group

        self._ray: Any = ray
        self._group: Any = get_current_placement_group()
        self._bundles: list[dict[str, float]] = [] if self._group is None else self._group.bundle_specs
        self._ranks: dict[int, Any] = {}
        self._ends: asyncio.Queue[RankEnded] = asyncio.Queue()
        self._waits: set[asyncio.Task[None]] = set()

    @property
    def num_nodes(self) -> int:
        """See :class:`~penstock.backends.processes.remote_ranks.RemoteRanks`, as for the other methods."""
        return max(1, len(self._bundles))

    @property
    def host(self) -> str:
        return str(self._ray.util.get_node_ip_address())

    async def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log_path: str) -> int:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert 0 < rank < self.num_nodes, f"there is no node {rank}"
        node_rank = self._ray.remote(NodeRank)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        actor = node_rank.options(
            num_cpus=0,
            num_gpus=self._bundles[rank]["GPU"],
            max_restarts=0,
            max_concurrency=2,
            runtime_env={"env_vars": SPARE_CHILDREN},
            scheduling_strategy=strategy,
        ).remote()
        self._ranks[rank] = actor
        try:
            pid = await asyncio.wait_for(
                _result(actor.start.remote(tuple(command), {**_own_marks(), **environment}, log_path)), START_TIMEOUT_S
            )
        except TimeoutError:
            self._give_up(rank)
            raise RemoteRankError(f"node {rank} did not start its process in time") from None
        except (self._ray.exceptions.RayError, RemoteRankError) as error:
            self._give_up(rank)
            raise RemoteRankError(f"node {rank} could not start its process: {error}") from error
        task = asyncio.get_running_loop().create_task(self._watch(rank, actor))
        self._waits.add(task)
        task.add_done_callback(self._waits.discard)
        return int(pid)

    def _give_up(self, rank: int) -> None:
        self._ray.kill(self._ranks.pop(rank), no_restart=True)

    async def ended(self) -> RankEnded:
        return await self._ends.get()

    async def stop(self) -> None:
        asked, self._ranks = self._ranks, {}
        for actor in asked.values():
            actor.stop.remote()
        if self._waits:
            await asyncio.wait(self._waits, timeout=STOP_TIMEOUT_S)
        for actor in asked.values():
            self._ray.kill(actor, no_restart=True)  # its guardian ends what may be left
        while not self._ends.empty():
            self._ends.get_nowait()  # of one that ended by itself just before

    async def _watch(self, rank: int, actor: Any) -> None:  # noqa: ANN401 - an actor's handle
        try:
            exit_code, lines = await _result(actor.wait.remote())
        except self._ray.exceptions.RayError as error:
            reason, lines = f"its process was lost: {str(error).strip().partition(chr(10))[0]}", ()
        else:
            reason = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        if self._ranks.get(rank) is actor:  # otherwise it was asked to end
            del self._ranks[rank]
            self._ray.kill(actor, no_restart=True)
            self._ends.put_nowait(RankEnded(rank, reason, tuple(lines)))


async def _result(reference: Any) -> Any:  # noqa: ANN401 - of Ray's
    """What a call of an actor returns. Ray's own awaiting works on the thread of its driver only."""
    return await asyncio.wrap_future(reference.future())
