"""An engine over two Ray nodes: ``python host_node_ranks.py ADDRESS FOLDER``; fails where anything is wrong.

A process of its own: a process has one Ray, and the tests have theirs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from penstock.backends.processes.process_facts import is_running, start_ticks_of
from penstock.backends.processes.remote_ranks import RankEnded, RemoteRankError
from penstock.runtime.hosts.ray.cluster import RayCluster, make_temp_folder, prepare_environment
from penstock.runtime.hosts.ray.groups import PlacementGroups
from penstock.runtime.hosts.ray.node_ranks import RayRemoteRanks
from penstock.runtime.run.placement import Block, Placement

DEADLINE_S = 60.0
RANK = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], "told", os.environ["TOLD"], flush=True)
print("pids", os.getpid(), child.pid, flush=True)
if sys.argv[1] == "ends":
    sys.exit(7)
time.sleep(1000)
"""


class Engine:
    """In the place of an EngineWorker."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.ranks = self.loop.run_until_complete(opened())

    def place(self) -> tuple[int, str, str]:
        return self.ranks.num_nodes, os.environ["CUDA_VISIBLE_DEVICES"], self.ranks.host

    def start(self, command: list[str], log: str) -> int:
        return self.loop.run_until_complete(self.ranks.start(1, command, {"TOLD": "yes"}, log))

    def refused(self, log: str) -> str:
        try:
            self.start(["/no/such/server"], log)
        except RemoteRankError as error:
            return str(error)
        return ""

    def ended(self) -> RankEnded:
        return self.loop.run_until_complete(self.ranks.ended())

    def stop(self) -> None:
        self.loop.run_until_complete(self.ranks.stop())


async def opened() -> RayRemoteRanks:
    """A coroutine among its methods would make Ray run the engine on an event loop of its own."""
    return RayRemoteRanks()


def words(log: Path, first: str) -> list[str]:
    """The rest of the line in the log that begins with this word."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        if log.exists():
            for line in log.read_text().splitlines():
                if line.startswith(first + " "):
                    return line.split()[1:]
        time.sleep(0.02)
    raise AssertionError(f"{log} has no line with {first!r}")


def wait_until_gone(processes: dict[int, int]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while any(is_running(pid, ticks) for pid, ticks in processes.items()):
        assert time.monotonic() < end_s, f"{processes} are still there"
        time.sleep(0.02)


def main() -> None:
    address, folder = sys.argv[1], Path(sys.argv[2])
    prepare_environment(address)
    cluster = RayCluster(address=address, temp_folder=make_temp_folder())
    import ray as untyped_ray

    ray: Any = untyped_ray
    nodes = cluster.nodes()
    assert [node.num_gpus for node in nodes] == [4, 4], nodes
    block = Block(("engine/0",), 2, (nodes[1].node_id, nodes[0].node_id))
    groups = PlacementGroups(ray, Placement((block,)))
    assert [node.num_gpus for node in cluster.nodes()] == [2, 2]
    seat = groups.seat_of("engine/0")
    assert seat is not None
    actor_class: Any = ray.remote(Engine)
    engine = actor_class.options(
        num_cpus=0, num_gpus=seat.num_gpus, max_restarts=0, scheduling_strategy=seat.strategy
    ).remote()

    def get(reference: object) -> Any:  # noqa: ANN401
        return ray.get(reference, timeout=DEADLINE_S)

    num_nodes, devices, host = get(engine.place.remote())
    assert num_nodes == 2
    assert len(set(devices.split(","))) == 2, devices
    assert host

    def start(name: str, how: str) -> dict[int, int]:
        log = folder / f"{name}.log"
        pid = get(engine.start.remote([sys.executable, "-c", RANK, how], str(log)))
        sees, _, told = words(log, "sees")
        assert len(set(sees.split(","))) == 2, sees
        assert told == "yes"
        pids = [int(word) for word in words(log, "pids")]
        assert pids[0] == pid
        return {pid: start_ticks_of(pid) for pid in pids} if how == "stays" else dict.fromkeys(pids, 0)

    start("ends", "ends")
    ended = get(engine.ended.remote())
    assert ended[:2] == (1, "exit code 7"), ended
    assert any(line.startswith("sees") for line in ended.last_lines), ended
    child = int(words(folder / "ends.log", "pids")[1])
    end_s = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < end_s, "what the command had started is still there"
        time.sleep(0.02)

    assert "could not" in get(engine.refused.remote(str(folder / "refused.log")))

    stopped = start("stopped", "stays")
    get(engine.stop.remote())
    wait_until_gone(stopped)

    orphaned = start("orphaned", "stays")
    ray.kill(engine, no_restart=True)
    wait_until_gone(orphaned)
    groups.release()
    cluster.stop(is_orderly=True)
    print("all is well")


if __name__ == "__main__":
    main()
