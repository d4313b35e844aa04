"""What is mended inside megatron-core, and in gloo's habits, where there is no CUDA: see :mod:`.no_cuda`.

| where | without it |
|---|---|
| random tracker | writes the GPU's generator by a private call |
| router | names a function that only Transformer Engine brings |
| latent attention | takes no layer that every rank has whole but Transformer Engine's |
| all-to-all dispatcher | sizes become numbers only if they lie on a GPU, and torch takes no tensors |
| distributed optimizer over torch's AdamW | no state before the first step; the step's number is lost or shared |
| optimizer over host and device | knows what is to be moved by its lying on a GPU |
| gloo: ``all_gather``, ``reduce_scatter`` | pieces of unequal length are refused |
| gloo: ``scatter``, ``broadcast`` | a tensor that is not contiguous arrives as other numbers, without a word |
"""

# Parts of megatron-core and torch.distributed are replaced here, whatever they take:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.backends.learners.megatron.cpu import no_cuda

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup


def mend() -> None:
    """After the first import of megatron-core, and before a model is built. Does nothing where CUDA is."""
    if not no_cuda.is_installed() or getattr(dist, "_penstock_mended", False):
        return
    _mend_random_tracker()
    _mend_experts()
    _mend_latent_attention()
    _mend_distributed_optimizer()
    _mend_hybrid_optimizer()
    _mend_unequal_pieces()
    _mend_contiguity()
    no_cuda.replace(dist, _penstock_mended=True)


def _mend_random_tracker() -> None:
    from megatron.core.tensor_parallel import random

    def set_state(state: Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.random.set_rng_state(state)

    def get_state(device: str = "cuda", clone: bool = False, graph_safe: bool = False) -> Tensor:
        return torch.random.get_rng_state()

    no_cuda.replace(random, _set_cuda_rng_state=set_state, _get_cuda_rng_state=get_state)


def _mend_experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        no_cuda.replace(moe_utils, te_general_gemm=None)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ANN401
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    no_cuda.replace(token_dispatcher, maybe_move_tensor_to_cpu=to_host)


def _mend_latent_attention() -> None:
    """It compares the classes that it is given with four names of its own, of which one is of a whole layer; and some
    versions believe that Transformer Engine is there, since a module of megatron-core's by that name is."""
    from megatron.core.transformer import multi_latent_attention

    from penstock.backends.learners.megatron.cpu.layers import WholeLinear

    no_cuda.replace(multi_latent_attention, Linear=WholeLinear, HAVE_TE=False)


def _mend_distributed_optimizer() -> None:
    """Let its state be written and read with torch's AdamW inside, which keeps the step's number per parameter and not
    per group, as the Adams of Transformer Engine and Apex do."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    kind: Any = DistributedOptimizer
    state_dict, load_state_dict = kind.state_dict, kind.load_state_dict
    set_states = kind._set_main_param_and_optimizer_states

    def is_torch_adam(self: Any) -> bool:  # noqa: ANN401
        return isinstance(getattr(self, "optimizer", None), torch.optim.Adam)

    def new_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if is_torch_adam(self):
            _prime(self.optimizer)
        return state_dict(self, *args, **kwargs)

    def new_load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        if is_torch_adam(self):
            _prime(self.optimizer)
        load_state_dict(self, *args, **kwargs)
        if is_torch_adam(self):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def new_set_states(self: Any, parameter: Any, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401
        if is_torch_adam(self):  # the step came with the parameter groups
            group, order = self.model_param_group_index_map[parameter]
            main = self.optimizer.param_groups[group]["params"][order]
            tensors = {**tensors, "step": self.optimizer.state[main]["step"].clone()}
        return set_states(self, parameter, tensors)

    no_cuda.replace(
        kind,
        state_dict=new_state_dict,
        load_state_dict=new_load_state_dict,
        _set_main_param_and_optimizer_states=new_set_states,
    )


def _prime(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _mend_hybrid_optimizer() -> None:
    """Let it take every weight for one on a GPU, and the first of them, up to its fraction, to a copy on the host: that
    way it steps, copies back and keeps its state as it does there."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    def divided(self: Any, fraction: float) -> Any:  # noqa: ANN401
        left = fraction * sum(weight.numel() for group in self.param_groups for weight in group["params"])
        on_host: list[Any] = []
        on_device: list[Any] = []
        copies: dict[Any, Any] = {}
        precise: dict[Any, Any] = {}
        for group in self.param_groups:
            parts: tuple[list[Any], list[Any]] = ([], [])
            for weight in group["params"]:
                inner, is_moved = weight, left > 0
                if is_moved:
                    left -= weight.numel()
                    inner = weight.detach().clone()
                if self.param_update_in_fp32 and weight.dtype != torch.float32:
                    inner = weight.detach().float()
                    precise[weight] = inner
                if is_moved:
                    copies[weight] = inner
                parts[is_moved].append(inner)
            for groups, part in ((on_device, parts[False]), (on_host, parts[True])):
                if part:
                    groups.append({**group, "params": part})
        return on_host, on_device, copies, {copy: weight for weight, copy in copies.items()}, precise

    no_cuda.replace(HybridDeviceOptimizer, _get_sub_optimizer_param_groups=divided)


def _mend_unequal_pieces() -> None:
    """Pieces of unequal length go by all-to-all, which gloo does take."""
    gather: Callable[..., Any] = dist.all_gather
    scatter: Callable[..., Any] = dist.reduce_scatter

    def all_gather(
        parts: list[Tensor], own: Tensor, group: ProcessGroup | None = None, async_op: bool = False
    ) -> object:
        if async_op or all(part.shape == own.shape for part in parts):
            return gather(parts, own, group=group, async_op=async_op)
        sizes = [len(part) for part in parts]
        out = own.new_empty((sum(sizes), *own.shape[1:]))
        dist.all_to_all_single(
            out, torch.cat([own] * len(parts)), output_split_sizes=sizes, input_split_sizes=[len(own)] * len(parts),
            group=group,
        )  # fmt: skip
        for part, piece in zip(parts, torch.split(out, sizes), strict=True):
            part.copy_(piece)
        return None

    def reduce_scatter(
        own: Tensor,
        parts: list[Tensor],
        op: object = dist.ReduceOp.SUM,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> object:
        if async_op or all(part.shape == own.shape for part in parts):
            return scatter(own, parts, op=op, group=group, async_op=async_op)
        count = len(parts)
        out = own.new_empty((count * len(own), *own.shape[1:]))
        dist.all_to_all_single(
            out, torch.cat(parts), output_split_sizes=[len(own)] * count,
            input_split_sizes=[len(part) for part in parts], group=group,
        )  # fmt: skip
        own.copy_(out.view(count, *own.shape).sum(0))
        return None

    no_cuda.replace(dist, all_gather=all_gather, reduce_scatter=reduce_scatter)


def _mend_contiguity() -> None:
    scatter: Callable[..., Any] = dist.scatter
    broadcast: Callable[..., Any] = dist.broadcast

    def contiguous_scatter(own: Tensor, parts: list[Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return scatter(own, [part.contiguous() for part in parts] if parts else parts, *args, **kwargs)

    def contiguous_broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if tensor.is_contiguous():
            return broadcast(tensor, *args, **kwargs)
        assert not kwargs.get("async_op"), "the copy would be read before it has arrived"
        copy = tensor.contiguous()
        broadcast(copy, *args, **kwargs)
        return tensor.copy_(copy)

    no_cuda.replace(dist, scatter=contiguous_scatter, broadcast=contiguous_broadcast)
