"""Two Ray nodes on this machine; prints their address, and ends them at the end of its standard input.

A process of its own: a process has one Ray, and the tests have theirs. ``python host_two_nodes.py NUM_GPUS`` declares
so many GPUs on each node, which the machine need not have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.runtime.hosts.ray.cluster import make_temp_folder

if TYPE_CHECKING:
    from collections.abc import Generator

OBJECT_STORE_BYTES = 80 << 20


@contextmanager
def two_nodes(*, num_gpus: int = 0) -> Generator[str]:
    """Started by somebody else than the run; their address."""
    temp_folder = make_temp_folder()
    (temp_folder / "ray").mkdir()
    here = Path(__file__)
    path = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")]))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    cluster = subprocess.Popen(
        [sys.executable, str(here), str(num_gpus)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONPATH": path, "RAY_TMPDIR": str(temp_folder)},
    )
    assert cluster.stdout is not None
    assert cluster.stdin is not None
    yield cluster.stdout.readline().strip()
    cluster.stdin.close()
    cluster.wait(60.0)
    cluster.stdout.close()
    shutil.rmtree(temp_folder, ignore_errors=True)


def main() -> None:
    from ray.cluster_utils import Cluster

    arguments: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(sys.argv[1]), "object_store_memory": OBJECT_STORE_BYTES}
    cluster: Any = Cluster(initialize_head=True, head_node_args=arguments | {"include_dashboard": False})
    cluster.add_node(**arguments)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
