"""A model over the ranks of a worker group: sharded (FSDP2) or one on each.

Invariants:

* ``fsdp``: of every weight each rank has an equal share, a DTensor; whole weights exist one block at a time, gathered
  before the block runs and let go of after it. Gradients are added up over the ranks as each block's backward pass
  ends, in float32 or better, and never lie whole on a rank either.
* ``fsdp`` with ``shard_size`` (HSDP): that many ranks share a copy so, the first of them the first copy, and ranks of
  the same place in each have the same share, the same bits. Gradients are added up within a copy as above, and over the
  copies once a step, by the optimizer.
* ``tensor_parallel``: so many neighbouring ranks compute together (:mod:`.tensor_parallel`), and share out, as above,
  what each of them has of a weight over the ranks of the same place in other such groups, if there are any.
* ``ddp``: every rank has all weights, the same bits; gradients are added up once a step, by the optimizer.
* Either way gradients are sums over ranks, not means: the weights of the loss are those of the whole step.
* The weights that are trained are float32 whatever the model computes in; a sharded one is rounded to that as it is
  gathered. ``model.dtype`` of the outside, of exports and log-probs, is that of the computation.
* Without other ranks nothing is changed, but for activation checkpointing.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from penstock.backends.learners.checkpoints.shards import division_of, local_of, own_place, rows_of
from penstock.backends.learners.torch.tensor_parallel import divide, plan_of
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.worker_group.workers import WorkerGroup

_log: Final = logging.getLogger(__name__)


def parallelize(model: PackedModel, workers: WorkerGroup, options: LearnerOptions) -> None:
    """Divide a model that every rank has loaded whole, in place; called by all ranks. Before its optimizer is made.

    Raises:
        UserFault: ``learner.cpu_offload`` with weights that are not sharded.
    """
    if not shards_weights(workers, options):
        _recompute_blocks(model.model, options)
        return
    model.freeze_facts(model.dtype)
    model.device = workers.device
    shard(model.model, workers, options, compute_dtype=model.dtype)


def shards_weights(workers: WorkerGroup, options: LearnerOptions) -> bool:
    """Whether each rank is to have a share of the weights only.

    Raises:
        UserFault: ``learner.cpu_offload`` with weights that are not sharded.
    """
    if not workers.is_alone and options.parallel == "fsdp":
        return True  # also where tensor parallelism takes all ranks: then each has one share, which is the whole
    if options.cpu_offload:
        raise UserFault(
            "learner.cpu_offload: moves the shards of the weights to the host, and there are none with "
            f"learner.num_ranks: {workers.num_ranks} and learner.parallel: {options.parallel}; set num_ranks above 1 "
            "and parallel: fsdp, or remove it"
        )
    return False


def _recompute_blocks(root: nn.Module, options: LearnerOptions) -> list[nn.Module]:
    """The blocks, which forget what they compute until it is asked for again, if that is wanted."""
    blocks = transformer_blocks(root)
    if options.activation_checkpointing:
        for block in blocks:
            _recompute_in_backward(block)
    return blocks


def shard(root: nn.Module, workers: WorkerGroup, options: LearnerOptions, *, compute_dtype: torch.dtype) -> None:
    """Give each rank its share of a module that all have whole.

    Args:
        root: the module; its blocks are gathered one by one, and what is in none when it is called, until it returns.
        workers: all ranks.
        options: the ``learner:`` block.
        compute_dtype: what it computes in.
    """
    mesh = _meshes_of(workers, options)["shard"]
    reduced = torch.promote_types(compute_dtype, torch.float32)
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == reduced else compute_dtype, reduce_dtype=reduced, cast_forward_inputs=False
    )
    plan = plan_of(root, options.tensor_parallel) if options.tensor_parallel > 1 else {}
    names = {module: name for name, module in root.named_modules()}
    for module in (*_recompute_blocks(root, options), root):
        _make_precise(module)
        if plan:
            divide(root, names[module], plan, _meshes_of(workers, options)["tensor"])
        # Always let go of, the root's too: what a run asks of the other ranks must not depend on the run before it.
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=precision,
            offload_policy=_offload(workers, options),
        )
        sharded = cast("FSDPModule", module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(enable=True)
        # A weight that no token of this rank has reached (an expert) is reached on another.
        sharded.set_reduce_scatter_unused_params(True)


def is_sharded(module: nn.Module) -> bool:
    """Whether each rank has a share of its weights only."""
    return isinstance(module, FSDPModule)


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a Hugging Face model, in order; none where it does not name them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    # Sharding derives a class from theirs.
    return [module for module in model.modules() if names & {base.__name__ for base in type(module).__mro__}]


@torch.no_grad()
def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A weight from its shares, rounded before it is gathered; called by all ranks. One that is not shared: itself."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    detached = tensor.detach()
    rounded = detached if dtype is None or not detached.is_floating_point() else detached.to(dtype)
    mesh = tensor.device_mesh
    if mesh.ndim == 1:
        return cast("DTensor", rounded).full_tensor()
    # One after the other, as they were divided: parts may be uneven.
    division, shape = division_of(tensor), list(tensor.shape)
    if division.tensor_dim is not None:
        size = shape[division.tensor_dim]
        shape[division.tensor_dim] = len(rows_of(size, division.num_tensor_ranks, mesh.get_local_rank(1)))
    part = _together(cast("DTensor", rounded).to_local(), mesh, 0, tuple(shape), Shard(0))
    if division.tensor_dim is None:
        return part
    return _together(part, mesh, 1, tuple(tensor.shape), Shard(division.tensor_dim))


def _together(local: Tensor, mesh: DeviceMesh, dim: int, shape: tuple[int, ...], placement: Shard) -> Tensor:
    """From all ranks of one dimension of the mesh."""
    names = mesh.mesh_dim_names
    assert names is not None, "_meshes"
    stride = torch.empty(shape, device="meta").stride()
    divided = DTensor.from_local(
        local, mesh[names[dim]], [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )
    return divided.full_tensor()


@torch.no_grad()
def load_into(target: Tensor, source: Tensor) -> None:
    """Copy the values of a tensor, which may be whole, into one that may be shared out. No communication."""
    if isinstance(target, DTensor) and not isinstance(source, DTensor):
        target.to_local().copy_(source[own_place(target)])
    else:
        target.copy_(source)


def replica(model: PackedModel, workers: WorkerGroup, options: LearnerOptions) -> PackedModel:
    """A second model with the same weights, divided in the same way; of a sharded one no rank ever has more than its
    share. Called by all ranks."""
    if not is_sharded(model.model):
        made = type(model)(copy.deepcopy(model.model), model.device)
        made.layout = model.layout
        made.eyes = None if model.eyes is None else model.eyes.of(made.model)
        return made
    built = type(model)(without_memory(model.model), model.device)
    built.layout = model.layout
    built.eyes = None if model.eyes is None else model.eyes.of(built.model)
    built.freeze_facts(model.dtype)
    fill_like(built.model, model.model, workers, options, compute_dtype=model.dtype)
    return built


def without_memory(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same architecture, to be filled."""
    with torch.device("meta"):
        built = type(model)(copy.deepcopy(model.config))
    for parameter in built.parameters():
        parameter.data = parameter.data.to(next(model.parameters()).dtype)
    built.train(mode=False)
    return built


def hollow(model: PackedModel) -> PackedModel:
    """What a model is like, without memory of its weights; it cannot be run."""
    built = type(model)(without_memory(model.model), model.device)
    built.layout, built.notices = model.layout, model.notices
    built.freeze_facts(model.dtype)
    return built


@torch.no_grad()
def fill_like(
    built: nn.Module, source: nn.Module, workers: WorkerGroup, options: LearnerOptions, *, compute_dtype: torch.dtype
) -> None:
    """Shard a module without memory, and copy the shares of another that is sharded in the same way."""
    materialize(
        built, dict(source.named_buffers(remove_duplicate=False)), workers, options, compute_dtype=compute_dtype
    )
    sources = dict(source.named_parameters(remove_duplicate=False))
    for name, parameter in built.named_parameters():
        local_of(parameter).copy_(local_of(sources[name]))


def materialize(
    built: nn.Module,
    buffers: Mapping[str, Tensor],
    workers: WorkerGroup,
    options: LearnerOptions,
    *,
    compute_dtype: torch.dtype,
) -> None:
    """Shard a module without memory, and give it memory for this rank's shares, with any values, and copies of these
    buffers."""
    shard(built, workers, options, compute_dtype=compute_dtype)
    built.to_empty(device=workers.device if not _is_offloaded(workers, options) else torch.device("cpu"))
    for name, module in built.named_modules():
        for key, _ in list(module.named_buffers(recurse=False)):
            setattr(module, key, buffers[f"{name}.{key}" if name else key].to(workers.device, copy=True))


def num_copies(workers: WorkerGroup, options: LearnerOptions) -> int:
    """Of sharded weights, over all ranks."""
    of_one = options.tensor_parallel * (options.shard_size or workers.num_ranks // options.tensor_parallel)
    return workers.num_ranks // of_one


def copies_group(workers: WorkerGroup, options: LearnerOptions) -> ProcessGroup | None:
    """The ranks that have the same shares of sharded weights as this one; called by all ranks. None: no others have."""
    if num_copies(workers, options) == 1:
        return None
    return _meshes_of(workers, options)["copy"].get_group()


def tensor_group(workers: WorkerGroup, options: LearnerOptions) -> ProcessGroup | None:
    """The ranks that compute together with this one; called by all ranks. None: it computes alone."""
    if options.tensor_parallel == 1:
        return None
    return _meshes_of(workers, options)["tensor"].get_group()


def data_workers(workers: WorkerGroup, options: LearnerOptions) -> WorkerGroup:
    """This rank among those that run other micro-batches than it, which are all without tensor parallelism; called by
    all ranks."""
    return workers if options.tensor_parallel == 1 else _every_nth(workers, options.tensor_parallel)


def make_groups(workers: WorkerGroup, options: LearnerOptions) -> None:
    """Make the process groups of models over these ranks, of which this rank need not be one; called by all ranks of
    the learner alike, since none is made without all of them. Who asks for one later finds these."""
    if shards_weights(workers, options):
        _meshes_of(workers, options)
    data_workers(workers, options)


@functools.lru_cache(maxsize=2)  # of the policy's ranks and of the critic's
def _every_nth(workers: WorkerGroup, step: int) -> WorkerGroup:
    found = dataclasses.replace(workers, rank=workers.rank // step, num_ranks=workers.num_ranks // step)
    if found.is_alone:
        return found
    limit = timedelta(seconds=workers.timeout_s)
    begin = workers.first_rank
    for first in range(begin, begin + step):  # every rank makes every group
        ranks = list(range(first, begin + workers.num_ranks, step))
        tensors, control = dist.new_group(ranks, timeout=limit), dist.new_group(ranks, timeout=limit, backend="gloo")
        if begin + workers.rank in ranks:
            found = dataclasses.replace(
                found, tensors=cast("ProcessGroup", tensors), control=cast("ProcessGroup", control)
            )
    return found


def _meshes_of(workers: WorkerGroup, options: LearnerOptions) -> DeviceMesh:
    copies = num_copies(workers, options)
    ranks = range(workers.first_rank, workers.first_rank + workers.num_ranks)
    return _meshes(dist.group.WORLD, workers.device.type, ranks, copies, options.tensor_parallel)


@functools.lru_cache(maxsize=2)  # likewise
def _meshes(
    _world: ProcessGroup | None, device_type: str, members: range, copies: int, tensor_parallel: int
) -> DeviceMesh:
    """Ranks ``[copy, shard]``, or ``[copy, shard, tensor]``; made once, so that weights can be copied from one model of
    a process to another."""
    ranks = torch.tensor(members).view(copies, -1)
    if tensor_parallel == 1:
        return DeviceMesh(device_type, ranks, mesh_dim_names=("copy", "shard"))
    return DeviceMesh(device_type, ranks.view(copies, -1, tensor_parallel), mesh_dim_names=("copy", "shard", "tensor"))


def _is_offloaded(workers: WorkerGroup, options: LearnerOptions) -> bool:
    return options.cpu_offload and workers.device.type == "cuda"


def _offload(workers: WorkerGroup, options: LearnerOptions) -> OffloadPolicy:
    if options.cpu_offload and workers.device.type == "cpu":
        _log.info("learner.cpu_offload: the weights are in the memory of the host anyway on a CPU; it has no effect")
    return CPUOffloadPolicy() if _is_offloaded(workers, options) else OffloadPolicy()


def _make_precise(module: nn.Module) -> None:
    """What is trained is at least float32, and so is everything where nothing is. One module at a time, so that no rank
    ever has all of it in float32."""
    parameters = list(module.parameters())
    is_frozen = not any(parameter.requires_grad for parameter in parameters)
    for parameter in parameters:
        if not isinstance(parameter, DTensor) and (parameter.requires_grad or is_frozen):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _recompute_in_backward(block: nn.Module) -> None:
    """Keep what goes into a block, and compute what happens in it again when its gradient is asked for."""
    block.forward = functools.partial(_checkpointed, block.forward)


def _checkpointed(forward: Callable[..., object], *inputs: object, **keys: object) -> object:
    if not torch.is_grad_enabled():
        return forward(*inputs, **keys)
    # The random numbers need not be the same again: the model has no dropout.
    return checkpoint(functools.partial(forward, **keys), *inputs, use_reentrant=False, preserve_rng_state=False)
