"""What megatron-core says a model and its optimizer consist of: which part of which tensor a rank holds, whatever the
layout is; and the way back.

Invariants:

* A parameter has one name over all layouts, and so has what the optimizer keeps of it: another layout asks for other
  boxes of the same tensors.
* What the optimizer keeps besides tensors is the number of its steps; everything else follows from the options. So an
  optimizer that megatron-core divides otherwise, as with and without expert parallelism, can still be gone on with.
* States of Transformer Engine's 8-bit formats are left out; nothing here trains in these.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

from penstock.backends.learners.megatron.checkpoint.dist_format import DistReader
from penstock.backends.learners.megatron.checkpoint.dist_writer import WrittenPart
from penstock.backends.learners.megatron.optimizer.trainable import members_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel

State = dict[str, Any]

CONTENT: Final[State] = {
    # Whatever the layout, tensors as the model has them; gathered on the first data-parallel rank alone, so that there
    # is one copy in the memory of all hosts and not one for each rank.
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
    # Layers by their number, not stacked: stages may then have any number of them.
    "non_homogeneous_layers": True,
}
OPTIMIZER: Final = "optimizer"

_STEP_KEYS: Final = ("step", "common_step")


def model_state(model: ParallelModel) -> State:
    """The parameters of this rank, by chunk."""
    states = [chunk.sharded_state_dict(metadata=_metadata()) for chunk in model.chunks]
    # Transformer Engine's modules have an object each, which holds something in 8-bit formats only.
    kept = [{name: value for name, value in state.items() if not isinstance(value, ShardedObject)} for state in states]
    return {_chunk_name(model, number): state for number, state in enumerate(kept)}


def optimizer_state(trainable: TrainableModel, *, is_loading: bool) -> State:
    """What the optimizer keeps, of the parameters of this rank. A collective."""
    members = [] if is_loading else members_of(trainable.optimizer)
    # Before the first step that is applied there are no moments, and only one that is divided saves zeros for them.
    bare = [each for each in members if not (each.optimizer.state or each.config.use_distributed_optimizer)]
    for member in bare:
        member.init_state_fn(member.optimizer, member.config)
    state = trainable.optimizer.sharded_state_dict(
        model_state(trainable.model), is_loading=is_loading, metadata=_metadata()
    )
    for member in bare:
        member.optimizer.state.clear()
    return state


def parts_of(
    state: State, *, is_copied: bool, on_host: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[WrittenPart], State]:
    """The tensors that this rank writes, on the host; and what is no tensor.

    Args:
        state: is used up.
        is_copied: whether they get memory of their own; else only what is not on the host yet does.
        on_host: where the values of a tensor are whose memory is given up.
    """
    if on_host is not None:  # before megatron-core cuts them
        for part in nested_values(state):
            if isinstance(part, (ShardedTensor, ShardedTensorFactory)) and isinstance(part.data, torch.Tensor):
                part.data = on_host(part.data.detach())
    sharded, common = save_preprocess(state, False)
    tensors = [
        tensor
        for tensor in nested_values(sharded)
        if isinstance(tensor, ShardedTensor) and is_main_replica(tensor.replica_id)
    ]
    return [_part(tensor, is_copied=is_copied) for tensor in tensors], common


@torch.no_grad()
def load_model(model: ParallelModel, folder: Path) -> None:
    """Fill the parameters of this rank. A collective.

    Raises:
        CheckpointError: they are not there.
    """
    loaded = _loaded(model_state(model), folder)
    for number, chunk in enumerate(model.chunks):
        result = chunk.load_state_dict(loaded[_chunk_name(model, number)], strict=False)
        wrong = [name for name in (*result.missing_keys, *result.unexpected_keys) if not name.endswith("_extra_state")]
        assert not wrong, f"megatron-core's own names do not fit: {wrong}"


def load_optimizer(trainable: TrainableModel, folder: Path, *, num_steps: int) -> None:
    """Fill what the optimizer keeps, its own copy of the weights included. A collective.

    Raises:
        CheckpointError: it is not there.
    """
    state = {OPTIMIZER: _local_but_tensors(optimizer_state(trainable, is_loading=True))}
    loaded = _loaded(state, folder)[OPTIMIZER]
    _set_steps(loaded, num_steps)
    trainable.optimizer.load_state_dict(loaded)


def num_steps(common: State) -> int:
    """How many steps the optimizer has made whose state was taken apart."""
    found = [int(value) for key, value in _leaves(common) if key in _STEP_KEYS and value is not None]
    return max(found, default=0)


def _metadata() -> State:
    return CONTENT | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _chunk_name(model: ParallelModel, number: int) -> str:
    return "model" if len(model.chunks) == 1 else f"model{number}"


@torch.no_grad()
def _part(tensor: ShardedTensor, *, is_copied: bool) -> WrittenPart:
    own = cast("Tensor", tensor.data).detach()
    own = own.to("cpu", copy=True) if is_copied else own.to("cpu")
    values = own.contiguous().view((1,) * tensor.prepend_axis_num + tuple(own.shape))
    return WrittenPart(
        name=tensor.key,
        shape=tuple(tensor.global_shape),
        offset=tuple(tensor.global_offset),
        sizes=tuple(values.shape),
        dtype=values.dtype,
        read=lambda: values,
    )


def _loaded(state: State, folder: Path) -> State:
    """What ``dist_checkpointing.load`` does around its strategies, which differ between versions of megatron-core.
    Tensors come through :class:`.DistReader`; what is no tensor is in the record, and not read from a pickle."""
    reader = DistReader(folder)

    def read(tensor: ShardedTensor) -> Tensor:
        tensor.init_data(torch.device("cpu"))
        own = cast("Tensor", tensor.data).detach()
        target = own.view((1,) * tensor.prepend_axis_num + tuple(own.shape))
        reader.read_into(tensor.key, target, tuple(tensor.global_offset), pads=tensor.allow_shape_mismatch)
        return own

    force_all_tensors_to_non_fp8(state)
    sharded, result, factories = load_preprocess(state)
    sharded, _ = extract_sharded_base(sharded)
    validate_sharding_integrity(determine_global_metadata(sharded)[1])
    merge(result, dict_list_map_outplace(read, sharded))
    return apply_factory_merges(result, factories)


def _local_but_tensors(state: State) -> State:
    """What is no tensor comes back as it is now, not from the checkpoint."""

    def local(value: object) -> object:
        is_marked = isinstance(value, (ShardedBase, LocalNonpersistentObject))
        return value if is_marked else LocalNonpersistentObject(value)

    return dict_list_map_outplace(local, state)


def _set_steps(state: Any, steps: int) -> None:  # noqa: ANN401 - dicts and lists of megatron-core's
    """Wherever megatron-core keeps the number: in a group of parameters, or beside the state of an optimizer that is
    not divided."""
    if isinstance(state, dict):
        if "param_groups" in state and isinstance(state.get("state"), dict):
            state["state"]["common_step"] = torch.tensor(float(steps))
        if "step" in state and "lr" in state:
            state["step"] = steps
        for value in state.values():
            _set_steps(value, steps)
    elif isinstance(state, list):
        for value in state:
            _set_steps(value, steps)


def _leaves(state: Any) -> list[tuple[str, Any]]:  # noqa: ANN401 - likewise
    if isinstance(state, dict):
        found = [(str(key), value) for key, value in state.items() if not isinstance(value, (dict, list))]
        return found + [leaf for value in state.values() for leaf in _leaves(value)]
    return [leaf for value in state for leaf in _leaves(value)] if isinstance(state, list) else []
