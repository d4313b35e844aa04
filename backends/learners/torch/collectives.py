"""What sharded models ask of the other ranks while they run, written down, so that a rank that fell out can keep up.

Invariants:

* The same work issues the same collectives in the same order, whatever the micro-batch is: weights are gathered before
  each block and let go of after it, forward and backward, and never kept from one run to the next.
* After ``finish`` a rank has issued exactly what work of that kind issues, with zeros for what it had not computed, and
  its models are as before that work, without gradients of it.
* Where no model is sharded nothing is recorded, and there is nothing to finish.

| wait | who ends it |
|---|---|
| ``finish``, in the collectives that are left | the other ranks, which are in them; at the latest the gang's timeout |
"""

# torch's comms are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# and what a broken backward pass leaves behind has no public name:
# pyright: reportPrivateUsage=false

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

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
        gather, scatter = _RecordedGather(self), _RecordedScatter(self)
        for root in self._roots:
            module = cast("nn.Module", root)
            module.register_forward_pre_hook(lambda module, _inputs: self._run.add(id(module)))
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_custom_all_gather(gather)
                    part.set_custom_reduce_scatter(scatter)

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
                _forget_whole_gradients(cast("nn.Module", root))

    def note(self, asked: _Asked) -> None:
        """It is being issued."""
        self._issued.append(asked)


class _RecordedGather(DefaultAllGather):
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        def comm(output: Tensor, given: Tensor) -> Work | None:
            return DefaultAllGather.__call__(self, output, given, group)

        self._collectives.note(_asked(comm, output_tensor, input_tensor))
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _RecordedScatter(DefaultReduceScatter):
    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work:
        def comm(output: Tensor, given: Tensor) -> Work | None:
            return cast("Work | None", DefaultReduceScatter.__call__(self, output, given, group, op))

        self._collectives.note(_asked(comm, output_tensor, input_tensor))
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _asked(comm: Callable[[Tensor, Tensor], Work | None], output: Tensor, given: Tensor) -> _Asked:
    return _Asked(comm, output.shape, given.shape, output.dtype, output.device)


def _forget_whole_gradients(root: nn.Module) -> None:
    """Of a block whose backward pass broke off, before they were added up over the ranks."""
    for part in root.modules():
        if not isinstance(part, FSDPModule):
            continue
        for group in part._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
