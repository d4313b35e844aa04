"""Loads a model over the ranks of a learner; of one that is sharded each rank reads its shares from disk, and no more.

Invariants:

* Weights and buffers have the bits that they have after the whole model was loaded and then divided.
* While it reads, a rank has memory for its shares and one of them as it lies on disk, and no more. Pages of the files
  that are mapped meanwhile are the system's. The check of the packing, which comes last, gathers a block at a time.
* What cannot be read in shares is read whole by every rank, and the log says why.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import logging
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM

from penstock.backends.checkpoint.checkpoint_names import bare_name
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.learners.checkpoints.shards import shard_of
from penstock.backends.learners.torch.fused import fuse
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.parallel import load_into, materialize, parallelize, shards_weights
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.backends.learners.options import LearnerOptions, LoraOptions
    from penstock.backends.learners.worker_group.workers import WorkerGroup

_log: Final = logging.getLogger(__name__)


class _WholeReadError(Exception):
    """Why the folder has to be read whole; never leaves this module."""


class _Piece(NamedTuple):
    """A tensor of the checkpoint, and where it lies in the weight that it belongs to."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First element within the weight."""
    dtype: torch.dtype
    """That the model asks for; what trains the weight may keep it in a more exact one."""


def load_divided(
    folder: Path, workers: WorkerGroup, options: LearnerOptions, *, dtype: str, lora: LoraOptions | None = None
) -> PackedModel:
    """A model in Hugging Face format, divided over the ranks as ``options`` say. Called by all ranks.

    Args:
        folder: that ``save_pretrained`` wrote.
        workers: all ranks.
        options: the ``learner:`` block, whose ``lora`` is not looked at.
        dtype: what it computes in.
        lora: gives it adapters, from torch's random numbers as they are.

    Raises:
        CheckpointError: it is no such folder, weights are missing in it, or the architecture cannot be packed.
        UserFault: the model has no weights of the names in ``learner.freeze``, it cannot have such adapters, it cannot
            be compiled, or ``learner.cpu_offload`` with weights that are not sharded.
    """
    model = _divided(folder, workers, options, dtype=dtype, lora=lora)
    fuse(model, workers, options)
    return model


def _divided(
    folder: Path, workers: WorkerGroup, options: LearnerOptions, *, dtype: str, lora: LoraOptions | None
) -> PackedModel:
    is_sharded = shards_weights(workers, options)
    if is_sharded:
        try:
            return _load_shares(folder, workers, options, dtype=dtype, lora=lora)
        except _WholeReadError as error:
            _log.warning("every rank reads the whole model and keeps its shares of it: %s", error)
    # One that is to be sharded need not fit on a device whole.
    model = PackedModel.load(folder, dtype=dtype, device=torch.device("cpu") if is_sharded else workers.device)
    model.freeze(options)
    if lora is not None:
        model.adapt(lora)
    parallelize(model, workers, options)
    return model


def _opened(folder: Path) -> CheckpointTensors:
    """transformers reads more than safetensors; what neither can read it says with its own words."""
    try:
        return CheckpointTensors(folder)
    except UserFault as error:
        raise _WholeReadError(str(error)) from None


def _load_shares(
    folder: Path, workers: WorkerGroup, options: LearnerOptions, *, dtype: str, lora: LoraOptions | None
) -> PackedModel:
    model = PackedModel.without_memory(folder, dtype=dtype, device=workers.device)
    with _opened(folder) as tensors:
        sources = _sources(folder, model, tensors)
        buffers = _computed_buffers(model)
        model.freeze(options)
        adapters = {} if lora is None else _adapted(model, lora)
        model.freeze_facts(model.dtype)
        materialize(model.model, buffers, workers, options, compute_dtype=model.dtype)
        for name, parameter in model.model.named_parameters():
            if name in adapters:
                load_into(parameter, adapters[name])
            else:
                _read(parameter, sources[bare_name(name)], tensors)
        for name, buffer in model.model.named_buffers():
            _read(buffer, sources.get(bare_name(name), ()), tensors)
    model.check_isolation()
    return model


def _sources(folder: Path, model: PackedModel, tensors: CheckpointTensors) -> dict[str, list[_Piece]]:
    """By the names of the weights in memory; what is computed has none.

    Raises:
        _WholeReadError: they are not there one by one.
    """
    names, kind = model.checkpoint_names, type(model.model).__name__
    if not names.can_rename_one_by_one:
        raise _WholeReadError(f"{folder}: transformers makes several weights of {kind} from one, or the reverse")
    ties = cast("Mapping[str, str]", model.model.get_expanded_tied_weights_keys())
    for name, first in ties.items():
        if model.model.get_parameter(name) is not model.model.get_parameter(first):
            raise _WholeReadError(f"{folder}: {name} and {first} are tied, and it has both")
    stored = {first: name for name, first in ties.items() if name in tensors}
    sources: dict[str, list[_Piece]] = {}
    for name, weight in model.weights():
        sources[name] = []
        for saved, part in names.rename({name: weight}).items():
            found = saved if saved in tensors else stored.get(saved)
            if found is None:
                raise _WholeReadError(f"{folder}: {saved} of {kind} goes by another name there")
            sources[name].append(_Piece(found, tuple(part.shape), int(part.storage_offset()), weight.dtype))
    return sources


@torch.no_grad()
def _read(tensor: Tensor, pieces: Sequence[_Piece], tensors: CheckpointTensors) -> None:
    """Fill this rank's share of a tensor."""
    share = shard_of(tensor)
    rows = share.local.view(-1) if not share.is_cut else share.local
    per_row = math.prod(share.shape[1:])
    begin = share.offset[0] * per_row if share.shape else 0
    end = begin + (len(share.local) * per_row if share.shape else 1)
    for name, shape, start, dtype in pieces:
        first, last = max(begin, start), min(end, start + math.prod(shape))
        if first >= last:
            continue
        if shape:
            # A share is made of rows, of the piece too: where a weight has several, each is in one of its rows.
            row = math.prod(shape[1:])
            values = tensors.slice(name)[(first - start) // row : (last - start) // row]
        else:
            values = tensors[name]
        if share.is_cut:  # by columns as well; its weight has one piece
            values = values.narrow(1, share.offset[1], share.local.shape[1])
            rows[(first - begin) // per_row : (last - begin) // per_row].copy_(values.to(dtype))
        else:
            rows[first - begin : last - begin].copy_(values.to(dtype).reshape(-1))


def _computed_buffers(model: PackedModel) -> dict[str, Tensor]:
    """What the architecture computes from its config, on the host, by name; its parameters get no memory for it."""

    def without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    # torch calls it so and takes what it returns, but types it as returning nothing.
    handle = register_module_parameter_registration_hook(cast("Callable[..., None]", without_memory))
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            config = copy.deepcopy(model.model.config)
            built: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_config(config, dtype=model.dtype)
    finally:
        handle.remove()
    return dict(built.named_buffers(remove_duplicate=False))


def _adapted(model: PackedModel, options: LoraOptions) -> dict[str, Tensor]:
    """Give a model without memory adapters, which have none either; their first values by name."""
    # peft puts them where the matrices are and takes their type, so these stand in the host's memory: with one element.
    _replace_weights(model.model, lambda weight: torch.zeros((), dtype=weight.dtype).expand(weight.shape))
    model.adapt(options)
    values = {name: weight.detach() for name, weight in model.model.named_parameters() if weight.requires_grad}
    _replace_weights(model.model, lambda weight: torch.empty_like(weight, device="meta"))
    return values


def _replace_weights(model: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """By others of the same shapes; what is shared stays so."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(make(parameter.detach()), parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
