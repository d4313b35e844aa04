"""What the processes of one learner are to each other.

Invariants:

* Every rank calls the same methods in the same order; that is what makes a collective of them.
* What a method returns is the same on every rank, except where it says otherwise.
* A worker group of one has no process group, and each of its methods is the obvious one without any.
* The control group is gloo on every device: it carries flags and small figures, and notices a dead peer at once.
  Tensors travel in the default group, which takes gloo for a CPU and NCCL for a GPU.

| wait | who ends it |
|---|---|
| every collective | the other ranks; a peer that died, by an error at once (gloo); at the latest the group's timeout |
| ``barrier`` | the other ranks; at the latest its own timeout |

Whoever started the ranks has a deadline for each command besides, which also ends what hangs outside of a collective.
"""

# Tensor.tolist and torch.distributed are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """One rank's view of all ranks."""

    rank: int
    num_ranks: int
    device: torch.device
    """Device that this rank computes on."""
    timeout_s: float
    """How long a collective may wait."""
    control: ProcessGroup | None = None
    """None in a worker group of one."""
    tensors: ProcessGroup | None = None
    """What tensors travel in; None: torch's default group."""
    first_rank: int = 0
    """Number of its first rank in torch's default group, where the ranks after that follow."""

    @property
    def is_first(self) -> bool:
        """Whether this rank exports weights, writes what is written once, and answers."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there are no others, and no process group."""
        return self.num_ranks == 1

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks, in place; every rank has the same bits then. Where all others have 0 it is exact, so a
        vector of which each rank fills its own places is exchanged by this."""
        if not self.is_alone:
            dist.all_reduce(tensor, group=self.tensors)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """The largest over the ranks, in place."""
        if not self.is_alone:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.tensors)
        return tensor

    def agree(self, flag: bool) -> bool:
        """Whether any rank says so."""
        if self.is_alone:
            return flag
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.control)
        return bool(found.item())

    def totals(self, figures: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Scalars by name, added up over the micro-batches of this rank and over the ranks, of which each may have
        other names, or none."""
        own: dict[str, Tensor] = {}
        for found in figures:
            for name, value in found.items():
                own[name] = own[name] + value if name in own else value
        named: list[list[str]] = [list(own)] * self.num_ranks
        if not self.is_alone:
            dist.all_gather_object(named, list(own), group=self.control)
        names = sorted({name for part in named for name in part})
        if not names:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        # One transfer for all of them: each would wait for the device on its own.
        sums = self.sum_(torch.stack([own[name].double() if name in own else zero for name in names]))
        return dict(zip(names, cast("list[float]", sums.tolist()), strict=True))

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until every rank is here.

        Raises:
            RuntimeError: not all came in time, or one has died; on the first rank it says which.
        """
        if not self.is_alone:
            limit = timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
            dist.monitored_barrier(self.control, timeout=limit)


def alone_on(device: torch.device) -> WorkerGroup:
    """A worker group of one."""
    return WorkerGroup(rank=0, num_ranks=1, device=device, timeout_s=float("inf"))


def join_workers(*, store: Store, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> WorkerGroup:
    """Meet the other ranks; once in a process.

    Raises:
        RuntimeError: they did not all come in time.
    """
    limit = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=limit,
        device_id=device if device.type == "cuda" else None,
    )
    control = cast("ProcessGroup", dist.new_group(backend="gloo", timeout=limit))
    return WorkerGroup(rank=rank, num_ranks=num_ranks, device=device, timeout_s=timeout_s, control=control)


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective ended because of another rank, which then has the reason."""
    # gloo raises plain RuntimeErrors, so their text has to be read.
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "monitoredBarrier", "pair closure"))
    )


SOLO: Final = alone_on(torch.device("cpu"))
"""The worker group of one process on the CPU."""
