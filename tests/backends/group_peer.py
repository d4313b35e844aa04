"""The other end of a process group, joined as SGLang joins one; a process of its own, run by the tests.

    python group_peer.py GROUP RANK WORLD_SIZE SIZE_BYTES...

It says ``ready``, reads ``ADDRESS PORT`` and joins. Then it receives one broadcast for each size and prints its SHA-256
as a line, each after a line on its standard input.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(seconds=60)


def main() -> None:
    group = sys.argv[1]
    rank, world_size, *sizes = (int(word) for word in sys.argv[2:])
    print("ready", flush=True)
    address, port = sys.stdin.readline().split()
    store, rank, world_size = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    made, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(group, store), group_name=c10d.GroupName(group),
        backend_options=None, timeout=TIMEOUT,
    )  # fmt: skip
    c10d._world.pg_group_ranks[made] = {i: i for i in range(world_size)}
    print("joined", flush=True)
    for size_bytes in sizes:
        if not sys.stdin.readline():
            return
        data = torch.empty(size_bytes, dtype=torch.uint8)
        dist.broadcast(data, src=0, group=made)
        print(hashlib.sha256(data.numpy().tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
