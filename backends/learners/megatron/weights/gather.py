"""Collects the weights of all ranks on the first one, as the tensors of a Hugging Face checkpoint.

Invariants:

* Names, values, their order and their division into buckets are the same whatever the layout: they follow from the
  architecture and ``max_bucket_bytes`` alone. So is a digest of them.
* Each part of a parameter is sent once, by the first of the ranks that have it, straight to the first one.
* At most two buckets are under way: while one is put together the next one arrives.
* A tensor has the dtype that the model holds it in: what is float32 in a model of bfloat16 leaves as float32.
* Weights are read as they are. Where ``overlap_param_gather`` leaves some behind, the caller gathers them first.

| wait | who ends it |
|---|---|
| for parts of a bucket | the ranks that have them; at the latest the timeout of the process group |
| for a bucket to have been sent | the first rank, when its caller asks for the next; at the latest that timeout |
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist

from penstock.backends.learners.megatron.bridge.families import EMBEDDING, Form
from penstock.backends.learners.megatron.weights.load import layers_of, own_parameters, weight_map_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.backends.learners.megatron.bridge.weight_map import Parameter, WeightMap
    from penstock.backends.learners.megatron.model.build import ParallelModel


class NamedTensor(NamedTuple):
    """One tensor of a checkpoint, whole, in memory of its own."""

    name: str
    tensor: Tensor


@dataclass(slots=True)
class GatherFigures:
    """What collecting has cost so far, on the first rank."""

    received_bytes: int = 0
    wait_s: float = 0.0
    """Seconds of waiting for parts to arrive."""
    merge_s: float = 0.0
    """Seconds of putting parts together."""


class _Part(NamedTuple):
    """One rank's part of a parameter."""

    parameter: Parameter
    shard: int
    num_elements: int
    """As they are sent: numbers of the model's dtype, of which one of float32 may be two."""


@dataclass(slots=True)
class _Arrival:
    """A bucket that is under way."""

    parameters: list[Parameter]
    parts: dict[int, list[_Part]]
    """Parts by the rank that has them."""
    buffers: dict[int, Tensor] = field(default_factory=dict[int, "Tensor"])
    works: list[dist.Work] = field(default_factory=list[dist.Work])


class WeightGatherer:
    """Every rank has one, and goes through :meth:`buckets` when the others do."""

    def __init__(self, model: ParallelModel, *, rank: int, device: torch.device, max_bucket_bytes: int) -> None:
        """A collective: ranks tell each other which layers they have."""
        self.figures = GatherFigures()
        self._rank = rank
        self._device = device
        self._layout = model.layout
        self._dtype = model.config.params_dtype
        self._weights: WeightMap = weight_map_of(model)
        self._own = dict(own_parameters(model, rank))
        self._stages = _stages_of_layers(model, rank, device)
        experts = model.architecture.experts
        self._experts_per_rank = experts.count // model.layout.expert if experts else 1
        self._buckets = list(_divide(self._weights, self._dtype.itemsize, max_bucket_bytes))

    @property
    def shapes(self) -> dict[str, Tensor]:
        """What will come: shapes and types, on the device ``meta``."""
        return {
            tensor.name: torch.empty(tensor.shape, dtype=self._dtype_of(parameter), device="meta")
            for parameter in self._weights.parameters.values()
            for tensor in parameter.tensors
        }

    @property
    def size_bytes(self) -> int:
        """Of all weights."""
        return sum(p.num_elements * self._dtype_of(p).itemsize for p in self._weights.parameters.values())

    @torch.no_grad()
    def buckets(self) -> Iterator[list[NamedTensor]]:
        """The weights, bucket by bucket; on other ranks than the first empty lists, as many."""
        pending: list[_Arrival] = []
        for parameters in itertools.chain(self._buckets, [None]):
            if parameters is not None:
                pending.append(self._begin(parameters))
            if len(pending) == 2 or parameters is None:
                for arrival in pending if parameters is None else [pending.pop(0)]:
                    yield self._finish(arrival)

    def _begin(self, parameters: list[Parameter]) -> _Arrival:
        parts: defaultdict[int, list[_Part]] = defaultdict(list)
        for parameter in parameters:
            for holder, part in self._holders(parameter):
                parts[holder].append(part)
        arrival = _Arrival(parameters, parts)
        if self._rank == 0:
            for holder in sorted(parts):
                if holder != 0:
                    size = sum(part.num_elements for part in parts[holder])
                    buffer = torch.empty(size, dtype=self._dtype, device=self._device)
                    arrival.buffers[holder] = buffer
                    arrival.works.append(_started(dist.irecv(buffer, src=holder)))
                    self.figures.received_bytes += buffer.nbytes
        elif self._rank in parts:
            buffer = torch.cat(
                [self._own[part.parameter.name].reshape(-1).view(self._dtype) for part in parts[self._rank]]
            )
            arrival.buffers[self._rank] = buffer  # kept until it has been sent
            arrival.works.append(_started(dist.isend(buffer, dst=0)))
        return arrival

    def _holders(self, parameter: Parameter) -> Iterator[tuple[int, _Part]]:
        """Which rank has which part."""
        stage = self._stage(parameter)
        division = self._weights.division(parameter)
        count = 1 if parameter.form is Form.WHOLE else division.num_shards
        expert_rank = None if parameter.expert is None else parameter.expert // self._experts_per_rank
        in_one = self._dtype_of(parameter).itemsize // self._dtype.itemsize
        size = torch.Size(self._weights.part_shape(parameter)).numel() * in_one
        for shard in range(count):
            yield self._layout.holder(stage, shard, expert_rank), _Part(parameter, shard, size)

    def _dtype_of(self, parameter: Parameter) -> torch.dtype:
        return torch.float32 if parameter.is_buffer else self._dtype

    def _stage(self, parameter: Parameter) -> int:
        if parameter.layer is not None:
            return self._stages[parameter.layer]
        return 0 if parameter.name == EMBEDDING.megatron else self._layout.pipeline - 1

    def _finish(self, arrival: _Arrival) -> list[NamedTensor]:
        began = time.monotonic()
        for work in arrival.works:
            work.wait()
        arrived = time.monotonic()
        if self._rank != 0:
            return []
        merged = self._merge(arrival)
        self.figures.wait_s += arrived - began
        self.figures.merge_s += time.monotonic() - arrived
        return merged

    def _merge(self, arrival: _Arrival) -> list[NamedTensor]:
        whole = {
            tensor.name: torch.empty(tensor.shape, dtype=self._dtype_of(parameter), device=self._device)
            for parameter in arrival.parameters
            for tensor in parameter.tensors
        }
        for holder, parts in arrival.parts.items():
            sizes = [part.num_elements for part in parts]
            own_parts = [self._own[part.parameter.name] for part in parts] if holder == 0 else []
            pieces = own_parts or torch.split(arrival.buffers[holder], sizes)
            for part, piece in zip(parts, pieces, strict=True):
                dtype = self._dtype_of(part.parameter)
                # A copy, since where it lies in the buffer may not be a multiple of its size.
                whole_piece = piece if piece.dtype == dtype else piece.clone().view(dtype)
                own = whole_piece.view(self._weights.part_shape(part.parameter))
                for block in self._weights.blocks(part.parameter, part.shard):
                    tensor = whole[part.parameter.tensors[block.tensor].name]
                    values = own.narrow(block.axis, block.place, block.length)
                    tensor.narrow(block.axis, block.start, block.length).copy_(values)
        return [NamedTensor(name, tensor) for name, tensor in whole.items()]


def _divide(weights: WeightMap, element_bytes: int, max_bucket_bytes: int) -> Iterator[list[Parameter]]:
    """Neighbouring parameters whose tensors fit into a bucket, or one that alone does not."""
    bucket: list[Parameter] = []
    room = max_bucket_bytes
    for parameter in weights.parameters.values():
        size = parameter.num_elements * (4 if parameter.is_buffer else element_bytes)
        if bucket and size > room:
            yield bucket
            bucket, room = [], max_bucket_bytes
        bucket.append(parameter)
        room -= size
    if bucket:
        yield bucket


def _stages_of_layers(model: ParallelModel, rank: int, device: torch.device) -> list[int]:
    stages = torch.zeros(model.architecture.num_layers, dtype=torch.int64, device=device)
    own = [layer for chunk in model.chunks for layer in layers_of(chunk).values()]
    stages[own] = model.layout.place(rank).stage
    if dist.is_initialized():
        dist.all_reduce(stages, op=dist.ReduceOp.MAX)
    return cast("list[int]", stages.tolist())


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the default group"
    return work
