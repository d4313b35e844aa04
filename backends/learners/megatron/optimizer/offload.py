"""Gives up the device memory of models, gradients and optimizers while the learner sleeps, and takes it again.

Invariants:

* Nothing that refers to a tensor notices: megatron-core's buffers keep their parts, parameters and optimizers theirs.
  The next step ends with the very bits with which it would have ended without the sleep.
* Weights, main weights and moments are copied to the host once, with what they are filled up with. Gradients are not:
  they lie in megatron-core's buffers, are used up between two steps, and come back as zeros.
* What is on the host already stays there (a part of the optimizer, with ``optimizer_cpu_offload``).
* What megatron-core keeps to save time only (rotary tables, room for gathered activations) is forgotten.
* Asleep, the values can be read from the host: for a checkpoint.

Not every kind of memory can be given up: :func:`.check_sleep` says what stands against it.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from penstock.backends.device_memory import ParkedMemory

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from torch import Tensor, nn

    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel


class SleepingMemory:
    """The device memory of these models, given up from the construction to :meth:`restore`."""

    def __init__(
        self,
        trained: Iterable[TrainableModel] = (),
        frozen: Iterable[ParallelModel] = (),
        *,
        device: torch.device,
    ) -> None:
        """A collective: where updated weights would be gathered during the next forward pass only, they are now.

        Args:
            trained: the policy, and a critic that has weights of its own.
            frozen: such as a reference; a model that is trained as well comes once.
            device: of this rank; what lies elsewhere stays there.
        """
        self._trained = list(trained)
        models = [*(model.model for model in self._trained), *frozen]
        bare = [chunk for model in models for chunk in model.chunks]
        for model in self._trained:
            model.gather_weights()
            model.optimizer.zero_grad()  # main weights have gradients of their own, or views of the buffers'
        optimizers = [model.optimizer for model in self._trained]
        self._states = [tensor for optimizer in optimizers for tensor in optimizer_tensors(optimizer)]
        buffers = [buffer for model in self._trained for chunk in model.chunks for buffer in _buffers(chunk)]
        weights = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        kept = itertools.chain(weights, _module_tensors(bare), self._states)
        _forget_caches(bare)
        self._kept = ParkedMemory(_on(device, kept), keeps_values=True)
        gradients = [buffer.grad_data for buffer in buffers if buffer.grad_data.untyped_storage().nbytes()]
        self._gradients = _on(device, gradients)
        self._released = ParkedMemory(self._gradients, keeps_values=False)

    @property
    def kept_bytes(self) -> int:
        """That were copied to the host."""
        return self._kept.size_bytes

    @property
    def size_bytes(self) -> int:
        """That are given up."""
        return self._kept.size_bytes + self._released.size_bytes

    def on_host(self, tensor: Tensor) -> Tensor:
        """What this tensor holds, whole or a view of what was given up: a view of the copy, or the tensor itself where
        it is here."""
        return self._kept.on_host(tensor)

    @contextlib.contextmanager
    def optimizer_on_host(self) -> Generator[None]:
        """While it lasts, main weights and moments can be read as they are, on the host: where megatron-core gathers
        them for a checkpoint.

        Weights of models cannot: another device would take the hooks off that gradients of a parameter run through.
        Their values are those of :meth:`on_host`.
        """
        parameters = {id(tensor) for model in self._trained for chunk in model.chunks for tensor in chunk.parameters()}
        away = [(tensor, tensor.data) for tensor in self._states if id(tensor) not in parameters]
        try:
            for tensor, data in away:
                tensor.data = self.on_host(data)
            yield
        finally:
            for tensor, data in away:
                tensor.data = data

    def restore(self) -> None:
        """Take the memory again, with all values; gradients are 0."""
        self._kept.restore()
        self._released.restore()
        for gradient in self._gradients:
            gradient.zero_()


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Main weights and what is kept of each: of chained optimizers all, and of one over host and device both parts."""
    chain: Any = optimizer
    for member in getattr(chain, "chained_optimizers", None) or [chain]:
        own: Any = member.optimizer
        if own is None:  # it has no weights on this rank
            continue
        for part in [own, *getattr(own, "sub_optimizers", ())]:
            for group in part.param_groups:
                yield from group["params"]
            for state in part.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _buffers(chunk: DistributedDataParallel) -> list[Any]:
    owner: Any = chunk  # its buffers are not those of a module of torch
    return [*owner.buffers, *owner.expert_parallel_buffers]


def _module_tensors(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()


def _on(device: torch.device, tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.device == device]


def _forget_caches(modules: Sequence[nn.Module]) -> None:
    kinds = {type(part) for module in modules for part in module.modules()}
    for kind in kinds:
        if clear := getattr(kind.forward, "cache_clear", None):
            clear()
    parallel_state.get_global_memory_buffer().buffer.clear()
