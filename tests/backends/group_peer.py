"""The other end of a process group, joined as SGLang joins one; a process of its own, from a fork server that has
imported torch.

It says ``ready``, hears address and port and joins. Then it receives one broadcast for each size and says its SHA-256,
each after it was told to go on.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

TIMEOUT = timedelta(seconds=60)


def join_and_receive(line: Connection, group: str, rank: int, world_size: int, sizes_bytes: list[int]) -> None:
    """What its process does; ``line`` leads to the test."""
    line.send("ready")
    address, port = line.recv()
    store, rank, world_size = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    made, _ = c10d._new_process_group_helper(
        world_size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(group, store), group_name=c10d.GroupName(group),
        backend_options=None, timeout=TIMEOUT,
    )  # fmt: skip
    c10d._world.pg_group_ranks[made] = {i: i for i in range(world_size)}
    line.send("joined")
    for size_bytes in sizes_bytes:
        line.recv()
        data = torch.empty(size_bytes, dtype=torch.uint8)
        dist.broadcast(data, src=0, group=made)
        line.send(hashlib.sha256(data.numpy().tobytes()).hexdigest())
