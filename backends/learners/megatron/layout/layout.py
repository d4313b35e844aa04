"""How ranks are divided over the axes of a model: which rank has what, and which layouts there can be.

Ranks are numbered as megatron-core numbers them: those of one tensor-parallel group are neighbours, then context, data,
and pipeline stages last. Experts have a numbering of their own within a stage: expert-tensor, expert, and data.

Invariants:

* A layout that :func:`check_layout` lets pass divides ranks, layers, heads and experts evenly, unless the scenario
  itself says how many layers the stages have.
* Nothing here imports torch or megatron-core.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from penstock.backends.learners.megatron.layout.stages import UNEVEN_STAGES, WRITTEN_OUT, layers_of_pieces
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron_options import ConfigValue, MegatronOptions

Axis = Literal["tensor", "context", "data", "pipeline", "expert tensor", "expert", "expert data"]
NO_FIELDS: Final[Mapping[str, ConfigValue]] = MappingProxyType({})


class LayoutError(UserFault):
    """A layout that the model or the number of ranks does not allow."""


class Place(NamedTuple):
    """Where a rank is."""

    tensor: int
    context: int
    data: int
    stage: int
    expert_tensor: int
    expert: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The number of ranks along each axis."""

    num_ranks: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False

    @property
    def data(self) -> int:
        """Data-parallel ranks of what is no expert."""
        return self.num_ranks // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Data-parallel ranks of experts."""
        return self.num_ranks // (self.expert_tensor * self.expert * self.pipeline)

    @property
    def reduces_experts_apart(self) -> bool:
        """Whether other ranks have the same experts than have the same of all else, so that gradients of experts, and
        what the optimizer keeps of them, are shared among others."""
        return self.expert > 1 or self.expert_tensor != self.tensor

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches of one call must be a multiple of."""
        return self.pipeline if self.virtual_pipeline > 1 else 1

    @property
    def ranks_per_stage(self) -> int:
        return self.num_ranks // self.pipeline

    def place(self, rank: int) -> Place:
        """Where a rank is."""
        stage, inside = divmod(rank, self.ranks_per_stage)
        rest, tensor = divmod(inside, self.tensor)
        data, context = divmod(rest, self.context)
        rest, expert_tensor = divmod(inside, self.expert_tensor)
        return Place(tensor, context, data, stage, expert_tensor, rest % self.expert)

    def group(self, axis: Axis) -> range:
        """The ranks of the first one's group: they differ in their place on this axis only."""
        size, step = {
            "tensor": (self.tensor, 1),
            "context": (self.context, self.tensor),
            "data": (self.data, self.tensor * self.context),
            "pipeline": (self.pipeline, self.ranks_per_stage),
            "expert tensor": (self.expert_tensor, 1),
            "expert": (self.expert, self.expert_tensor),
            "expert data": (self.expert_data, self.expert_tensor * self.expert),
        }[axis]
        return range(0, size * step, step)

    def holder(self, stage: int, shard: int, expert_rank: int | None) -> int:
        """The rank that speaks for one part of a parameter: the first of those that have the same.

        Args:
            stage: where the parameter is.
            shard: which part, in the order of the (expert-)tensor-parallel ranks.
            expert_rank: which share of the experts; None for what is no expert's.
        """
        first = stage * self.ranks_per_stage
        return first + shard + (0 if expert_rank is None else self.expert_tensor * expert_rank)

    def __str__(self) -> str:
        sizes = (
            ("tensor", self.tensor), ("pipeline", self.pipeline), ("virtual_pipeline", self.virtual_pipeline),
            ("context", self.context), ("expert", self.expert), ("expert_tensor", self.expert_tensor),
        )  # fmt: skip
        axes = " × ".join([f"{name} {size}" for name, size in sizes if size > 1] + [f"data {self.data}"])
        return f"{axes}, with sequence_parallel" if self.sequence_parallel else axes


def layout_of(options: MegatronOptions, num_ranks: int) -> Layout:
    """The layout that a scenario asks for, not checked."""
    return Layout(
        num_ranks=num_ranks,
        tensor=options.tensor_parallel,
        pipeline=options.pipeline_parallel,
        virtual_pipeline=options.virtual_pipeline,
        context=options.context_parallel,
        expert=options.expert_parallel,
        expert_tensor=options.expert_tensor_parallel,
        sequence_parallel=options.sequence_parallel and options.tensor_parallel > 1,
    )


def check_layout(layout: Layout, architecture: Architecture, fields: Mapping[str, ConfigValue] = NO_FIELDS) -> None:
    """
    Args:
        layout: that is wanted.
        architecture: of the model.
        fields: of megatron-core's ``TransformerConfig`` that the scenario sets, which may divide the layers unevenly.

    Raises:
        LayoutError: with the reason, and the possible layout that is nearest.
    """
    problem = next(_problems(layout, architecture, fields), None)
    if problem is None:
        return
    near = nearest_layout(layout, architecture, fields)
    without = ""
    if near is None:
        near = nearest_layout(layout, architecture)
        without = ", without " + " and ".join(f"transformer.{name}" for name in UNEVEN_STAGES if fields.get(name))
    raise LayoutError(f"{problem}; the nearest possible layout of {layout.num_ranks} ranks is {near}{without}")


def nearest_layout(
    wanted: Layout, architecture: Architecture, fields: Mapping[str, ConfigValue] = NO_FIELDS
) -> Layout | None:
    """The possible layout of as many ranks whose sizes differ least, in powers of two; of several the one that keeps
    the tensor-parallel size, then the pipeline's, and so on. One rank for every axis is always possible, unless fields
    divide the layers in a way that none allows."""
    divisors = [size for size in range(1, wanted.num_ranks + 1) if wanted.num_ranks % size == 0]
    experts = divisors if architecture.experts else [1]
    is_uneven = any(fields.get(name) for name in UNEVEN_STAGES)
    pieces = [
        size for size in range(1, architecture.num_layers + 1) if is_uneven or architecture.num_layers % size == 0
    ]
    candidates = (
        replace(
            wanted,
            tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual, context=context, expert=expert,
            expert_tensor=expert_tensor,
            sequence_parallel=tensor > 1 and (wanted.sequence_parallel or architecture.experts is not None),
        )
        for tensor, pipeline, context in itertools.product(divisors, repeat=3)
        if wanted.num_ranks % (tensor * pipeline * context) == 0
        for virtual in sorted({1, *(pieces if wanted.virtual_pipeline > 1 else [])})
        for expert, expert_tensor in itertools.product(experts, repeat=2)
        if wanted.num_ranks % (expert * expert_tensor * pipeline) == 0
    )  # fmt: skip
    possible = (candidate for candidate in candidates if next(_problems(candidate, architecture, fields), None) is None)
    return min(possible, key=lambda candidate: _distance(candidate, wanted), default=None)


def _distance(one: Layout, other: Layout) -> tuple[float, ...]:
    steps = tuple(abs(math.log2(a / b)) for a, b in zip(_sizes(one), _sizes(other), strict=True))
    return (round(sum(steps), 9), *steps)


def _sizes(layout: Layout) -> tuple[int, ...]:
    return (
        layout.tensor, layout.pipeline, layout.expert, layout.context, layout.expert_tensor, layout.virtual_pipeline,
    )  # fmt: skip


def _problems(layout: Layout, architecture: Architecture, fields: Mapping[str, ConfigValue]) -> Iterator[str]:
    """What is impossible about a layout, each a clause that names the keys."""
    yield from _rank_problems(layout)
    yield from _tensor_problems(layout, architecture)
    yield from _stage_problems(layout, architecture, fields)
    yield from _expert_problems(layout, architecture)


def _rank_problems(layout: Layout) -> Iterator[str]:
    product = layout.tensor * layout.pipeline * layout.context
    if layout.num_ranks % product:
        yield (
            f"tensor_parallel {layout.tensor} × pipeline_parallel {layout.pipeline} × context_parallel "
            f"{layout.context} is {product}, which does not divide {layout.num_ranks} ranks"
        )
    product = layout.expert * layout.expert_tensor * layout.pipeline
    if layout.num_ranks % product:
        yield (
            f"expert_parallel {layout.expert} × expert_tensor_parallel {layout.expert_tensor} × pipeline_parallel "
            f"{layout.pipeline} is {product}, which does not divide {layout.num_ranks} ranks"
        )


def _tensor_problems(layout: Layout, architecture: Architecture) -> Iterator[str]:
    tensor, key_values = layout.tensor, architecture.num_kv_heads
    if architecture.num_heads % tensor:
        yield f"the model has {architecture.num_heads} attention heads, which tensor_parallel {tensor} does not divide"
    if key_values % tensor and tensor % key_values:
        yield (
            f"the model has {key_values} key-value heads, and tensor_parallel {tensor} is neither a divisor nor a "
            "multiple of that"
        )
    for what, size in (("hidden size", architecture.hidden_size), ("MLP", architecture.ffn_size)):
        if size % tensor:
            yield f"the model's {what} has {size} channels, which tensor_parallel {tensor} does not divide"


def _stage_problems(layout: Layout, architecture: Architecture, fields: Mapping[str, ConfigValue]) -> Iterator[str]:
    stages, pieces = layout.pipeline, layout.virtual_pipeline
    if pieces > 1 and stages == 1:
        yield f"virtual_pipeline {pieces} needs a pipeline_parallel above 1"
    if architecture.num_mtp_layers and fields.get(WRITTEN_OUT):
        yield f"with learner.megatron.mtp the stages cannot be written out (transformer.{WRITTEN_OUT})"
    try:
        layers_of_pieces(architecture.num_layers, num_stages=stages, pieces_per_stage=pieces, fields=fields)
    except UserFault as error:
        yield str(error)


def _expert_problems(layout: Layout, architecture: Architecture) -> Iterator[str]:
    experts = architecture.experts
    if experts is None:
        for key, size in (("expert_parallel", layout.expert), ("expert_tensor_parallel", layout.expert_tensor)):
            if size > 1:
                yield f"{key} is {size}, and the model has no experts"
        return
    if experts.count % layout.expert:
        yield f"the model has {experts.count} experts, which expert_parallel {layout.expert} does not divide"
    if experts.ffn_size % layout.expert_tensor:
        yield (
            f"an expert has {experts.ffn_size} channels, which expert_tensor_parallel {layout.expert_tensor} does "
            "not divide"
        )
    if experts.shared_ffn_size % layout.tensor:
        yield (
            f"the model's shared experts have {experts.shared_ffn_size} channels, which tensor_parallel "
            f"{layout.tensor} does not divide"
        )
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield "a model with experts needs sequence_parallel with tensor_parallel above 1"
