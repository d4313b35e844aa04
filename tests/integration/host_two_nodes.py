"""Two Ray nodes on this machine; prints their address, and ends them at the end of its standard input.

A process of its own: a process has one Ray, and the tests have theirs.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 80 << 20


def main() -> None:
    arguments: dict[str, Any] = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=arguments)
    cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    print(cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
