"""What sharded models ask of the other ranks while they run, written down, so that a rank that fell out can keep up.

Invariants:

* The same work issues the same collectives in the same order, whatever the micro-batch is: weights are gathered before
  each block and let go of after it, forward and backward, and never kept from one run to the next.
* After ``finish`` a rank has issued exactly what work of that kind issues, with zeros for what it had not computed, and
  its models are as before that work, without gradients of it.
* Where no model is sharded nothing is recorded, and there is nothing to finish.

| wait | who ends it |
|---|---|
| ``finish``, in the collectives that are left | the other ranks, which are in them; at the latest the group's timeout |
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup, ReduceOp, Work


@dataclass(frozen=True, slots=True)
class _Asked:
    """One collective; enough of it to take part."""

    comm: Callable[[Tensor, Tensor], Work | None]
    output: torch.Size
    input: torch.Size
    dtype: torch.dtype
    device: torch.device


class Collectives:
    """Of all sharded models of this rank."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        """
        Args:
            roots: each is called as a whole; those that are not sharded are left alone.
        """
        self._roots = [root for root in roots if isinstance(root, FSDPModule)]
        self._kinds: dict[str, list[_Asked]] = {}
        self._kind = ""
        self._issued: list[_Asked] = []
        self._run: set[int] = set()
        self._gathered: set[nn.Parameter] = set()
        # They do what torch asks of such an object; the name that torch has for its type is private.
        gather, scatter = cast("Any", _RecordedGather(self)), cast("Any", _RecordedScatter(self))
        for root in self._roots:
            for part in cast("nn.Module", root).modules():
                if isinstance(part, FSDPModule):
                    part.set_custom_all_gather(gather)
                    part.set_custom_reduce_scatter(scatter)
                    cast("nn.Module", part).register_forward_pre_hook(self._begin)

    def rehearse(self, kind: str, work: Callable[[], object]) -> None:
        """See what work of this kind asks for, where that is not known yet."""
        if self._roots and kind not in self._kinds:
            with self.following(kind):
                work()
            self._kinds[kind] = self._issued

    @contextmanager
    def following(self, kind: str) -> Generator[None]:
        """Note what is issued while the block runs, which is work of this kind."""
        self._kind, self._issued = kind, []
        yield

    def finish(self) -> None:
        """After work that broke off: take part in what is left of it, and have the models ready for the next."""
        if not self._roots:
            return
        for asked in self._kinds[self._kind][len(self._issued) :]:
            result = torch.zeros(asked.output, dtype=asked.dtype, device=asked.device)
            given = torch.zeros(asked.input, dtype=asked.dtype, device=asked.device)
            work = asked.comm(result, given)
            if work is not None:
                work.wait()
        for root in self._roots:
            if id(root) in self._run:
                root.reset_iter_state()
        for weight in self._gathered:
            weight.grad = None

    def note(self, asked: _Asked) -> None:
        """It is being issued."""
        self._issued.append(asked)

    def _begin(self, module: nn.Module, _inputs: object) -> None:
        """A module is called, so its own weights are whole. FSDP has the same tensors for them each time: a gradient
        that a broken backward pass leaves there would be added to the next."""
        self._run.add(id(module))
        self._gathered.update(weight for weight in module.parameters() if not isinstance(weight, DTensor))


class _Recorded:
    """A kind of collective as FSDP issues it."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _RecordedGather(_Recorded):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        def comm(output: Tensor, given: Tensor) -> Work | None:
            return cast("Work | None", dist.all_gather_single(output, given, group, async_op))

        self._collectives.note(_asked(comm, output_tensor, input_tensor))
        return comm(output_tensor, input_tensor)


class _RecordedScatter(_Recorded):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work | None:
        def comm(output: Tensor, given: Tensor) -> Work | None:
            return cast("Work | None", dist.reduce_scatter_single(output, given, cast("Any", op), group, async_op))

        self._collectives.note(_asked(comm, output_tensor, input_tensor))
        return comm(output_tensor, input_tensor)


def _asked(comm: Callable[[Tensor, Tensor], Work | None], output: Tensor, given: Tensor) -> _Asked:
    return _Asked(comm, output.shape, given.shape, output.dtype, output.device)
