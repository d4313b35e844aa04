"""A Ray on this machine that gets further nodes while it is used: ``python host_growing.py NUM_GPUS`` starts its first.

A process of its own: a process has one Ray, and the tests have theirs. It reads requests from standard input, answers
each with a line of JSON, and ends with it. Nodes come when they are asked for, or with a second argument, the GPUs of a
node, by Ray's own autoscaler, whose cloud is this machine: it brings them for what is pending, and takes those back
that are idle.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.runtime.hosts.ray.cluster import make_temp_folder

if TYPE_CHECKING:
    from collections.abc import Generator

OBJECT_STORE_BYTES = 80 << 20
IDLE_MINUTES = 0.1
MAX_NODES = 2


class Growing:
    """The cluster, for a test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = str(self._ask("address"))

    def add(self, num_gpus: int) -> str:
        """Another node with so many GPUs that are declared, not there; its id."""
        return str(self._ask(f"add {num_gpus}"))

    def free(self) -> dict[str, int]:
        """GPUs that nobody has taken, by node."""
        return {str(node): int(num) for node, num in self._ask("free").items()}

    def num_actors(self, node_id: str) -> int:
        """That live on this node: as long as there is one, no autoscaler takes the node back."""
        return int(self._ask(f"actors {node_id}"))

    def _ask(self, request: str) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def growing(*, num_gpus: int, gpus_of_a_node: int = 0) -> Generator[Growing]:
    """A cluster of one node with so many GPUs.

    Args:
        num_gpus: of the first node.
        gpus_of_a_node: that an autoscaler may bring; 0: there is no autoscaler.
    """
    temp_folder = make_temp_folder()
    (temp_folder / "ray").mkdir()
    here = Path(__file__)
    path = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")]))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    process = subprocess.Popen(
        [sys.executable, str(here), str(num_gpus), *([str(gpus_of_a_node)] if gpus_of_a_node else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONPATH": path, "RAY_TMPDIR": str(temp_folder)},
    )
    try:
        yield Growing(process)
    finally:
        process.communicate(timeout=60.0)
        shutil.rmtree(temp_folder, ignore_errors=True)


def main() -> None:
    import ray as untyped_ray
    from ray._private import state
    from ray.cluster_utils import Cluster

    ray: Any = untyped_ray
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints
    arguments: dict[str, Any] = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    head = arguments | {"num_gpus": int(sys.argv[1]), "include_dashboard": False}
    if len(sys.argv) > 2:
        head |= autoscaled(int(sys.argv[1]), int(sys.argv[2]))
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    os.environ.pop("RAY_OVERRIDE_NODE_ID_FOR_TESTING", None)  # of the first node alone
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    untyped_state: Any = state
    for line in sys.stdin:
        answer: Any = None
        match line.split():
            case ["address"]:
                answer = cluster.address
            case ["add", num_gpus]:
                answer = cluster.add_node(**arguments, num_gpus=int(num_gpus)).node_id
            case ["free"]:
                found = untyped_state.available_resources_per_node()
                answer = {node: found[node].get("GPU", 0) for node in found}
            case ["actors", node_id]:
                actors = untyped_state.actors().values()
                answer = sum(each["State"] == "ALIVE" and each["Address"]["NodeID"] == node_id for each in actors)
            case _:
                raise AssertionError(line)
        print(json.dumps(answer), file=out, flush=True)
    ray.shutdown()
    cluster.shutdown()


def autoscaled(num_gpus: int, gpus_of_a_node: int) -> dict[str, Any]:
    """What the first node is started with, beside the autoscaler."""
    import ray
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE

    untyped: Any = ray
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    worker = {"CPU": 1, "GPU": gpus_of_a_node, "object_store_memory": OBJECT_STORE_BYTES}
    lists = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    more = (
        "head_start_ray_commands",
        "worker_start_ray_commands",
        "cluster_synced_files",
        "rsync_exclude",
        "rsync_filter",
    )
    config: dict[str, Any] = {
        "cluster_name": "growing",
        "provider": {
            "type": "fake_multinode",
            "gcs_address": f"{untyped.util.get_node_ip_address()}:{port}",
            "use_node_id_as_ip": True,  # all have one
            "disable_node_updaters": True,  # which would log in by SSH
        },
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 1, "GPU": num_gpus}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": MAX_NODES},
        },
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "max_workers": MAX_NODES,
        "idle_timeout_minutes": IDLE_MINUTES,
        "upscaling_speed": 10,
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in (*lists, *more, "rsync_exclude", "rsync_filter")},
    }
    path = Path(os.environ["RAY_TMPDIR"]) / "autoscaler.json"
    path.write_text(json.dumps(config))
    os.environ.update(
        RAY_FAKE_CLUSTER="1", AUTOSCALER_UPDATE_INTERVAL_S="1", RAY_OVERRIDE_NODE_ID_FOR_TESTING=FAKE_HEAD_NODE_ID
    )
    return {"autoscaling_config": str(path), "gcs_server_port": port}


if __name__ == "__main__":
    main()
