"""Two Ray nodes on this machine, in a process of their own; the second of them can be lost.

Run as a program it starts the nodes, prints the address of the cluster, loses the second node at the first line on its
standard input, and ends everything at the end of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from penstock.backends.processes.process_facts import be_subreaper, descendants_of, facts_of, kill
from penstock.backends.processes.temp_folders import remove_folder
from penstock.messages.errors import UserFault
from penstock.runtime.hosts.processes.descendants import kill_descendants
from penstock.runtime.hosts.ray.cluster import make_temp_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

OBJECT_STORE_BYTES: Final = 80 << 20
END_TIMEOUT_S: Final = 30.0
MODULE: Final = "penstock.runtime.chaos.nodes"


class TwoNodes:
    """A Ray cluster of two nodes. A context manager that leaves nothing of it behind."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """
        Args:
            environment: what processes on the nodes are to find beside the environment of this process.
        """
        self._environment = environment

    def __enter__(self) -> TwoNodes:
        self._folder = make_temp_folder()
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, **self._environment, "RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            self.__exit__(None, None, None)
            raise UserFault("node_loss needs two Ray nodes, and they could not be started on this machine")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        remove_folder(self._folder)

    def lose(self) -> None:
        """Kill the second node with everything on it; returns when it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("lose\n")
        self._process.stdin.flush()
        self._process.stdout.readline()


def main() -> None:
    """The process of the nodes."""
    be_subreaper()
    os.environ["RAY_TMPDIR"] = sys.argv[1]
    from ray.cluster_utils import Cluster

    arguments: dict[str, Any] = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=arguments)
    far: Any = cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        [raylet] = far.all_processes["raylet"]
        pid = int(raylet.process.pid)
        for member in (*descendants_of(pid), pid):  # before the raylet, whose children others would adopt
            facts = facts_of(member)
            if facts is not None:
                kill(member, facts.start_ticks)
        print("lost", flush=True)
        break
    sys.stdin.read()
    kill_descendants(timeout_s=5.0)
    os._exit(0)


if __name__ == "__main__":
    main()
