"""Norms and linear layers in plain torch with the parameter names of Transformer Engine's.

megatron-core's own layers without Transformer Engine refuse sequence parallelism, and name their parameters otherwise,
so that checkpoints would not fit between machines with CUDA and without. These take both.

Invariants:

* A weight that every tensor-parallel rank has whole is marked ``sequence_parallel`` where ranks see different tokens:
  megatron-core adds up its gradients over those ranks.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor
    from torch.distributed import ProcessGroup

Sharded = dict[str, Any]


def norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    """The weight of a norm, ones."""
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=torch.cuda.current_device()))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core asks for it
    return weight


def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return functional.rms_norm(values, (values.shape[-1],), weight, epsilon)


class WholeWeight(torch.nn.Module):
    """A layer whose only parameter every tensor-parallel rank has whole."""

    weight: torch.nn.Parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Sharded:
        """For megatron-core's distributed checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {}, sharded_offsets,
            **_groups(metadata, parallel_state.get_tensor_model_parallel_group()),
        )  # fmt: skip


class RMSNorm(WholeWeight):
    """Divides by the root of the mean square."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, values: Tensor) -> Tensor:
        return rms_norm(values, self.weight, self.eps)


class NormedColumnParallelLinear(ColumnParallelLinear):
    """A norm and what follows it."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:  # noqa: ANN401 - megatron-core's own
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = norm_weight(config, input_size)

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:  # noqa: ANN401 - as above
        return super().forward(rms_norm(input_, self.layer_norm_weight, self.eps), *args, **options)


class WholeLinear(WholeWeight):
    """A linear layer that every tensor-parallel rank has whole, and applies to the tokens that it has.

    Its parameter is Transformer Engine's of a layer that is not divided. megatron-core's own, by outputs, would not do:
    under sequence parallelism it loses gradients of what all heads share.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        **_: Any,  # noqa: ANN401 - how it would be divided
    ) -> None:
        super().__init__()
        assert not bias, "no family here has one"
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        if config.perform_initialization:
            init_method(weight)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # as of a norm

    def forward(self, values: Tensor) -> tuple[Tensor, None]:
        return functional.linear(values, self.weight), None

    def backward_dw(self) -> None:
        """Gradients of weights are never put off here."""


class RowParallelLinearNormed(RowParallelLinear):
    """A linear layer whose result is normed before it is added to what it began with."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:  # noqa: ANN401 - as above
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = config.layernorm_epsilon
        self.post_norm_weight = norm_weight(config, output_size)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        assert bias is None, "what is normed would have to have it"
        return rms_norm(output, self.post_norm_weight, self.eps), None


class GroupedLinear(torch.nn.Module):
    """One matrix for each expert of this rank: ``weight0``, ``weight1``, …"""

    axis = 0
    """That is divided over expert-tensor-parallel ranks."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        pg_collection: ProcessGroupCollection,
        **_: Any,  # noqa: ANN401 - what only Transformer Engine needs
    ) -> None:
        super().__init__()
        assert is_expert, "megatron-core has it for experts only"
        assert not bias, "no family here has one"
        self.num_gemms = num_gemms
        self.groups = pg_collection
        size = [output_size, input_size]
        size[self.axis] //= pg_collection.expt_tp.size()
        for number in range(num_gemms):
            weight = torch.empty(*size, dtype=config.params_dtype, device=torch.cuda.current_device())
            if config.perform_initialization:
                init_method(weight)
            self.register_parameter(f"weight{number}", self._marked(weight, config))

    def _marked(self, weight: Tensor, config: TransformerConfig) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(weight)
        marks = {
            "tensor_model_parallel": True, "partition_dim": self.axis, "partition_stride": 1,
        }  # fmt: skip
        for name, value in marks.items():
            setattr(parameter, name, value)
        return parameter

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor | list[int]) -> tuple[Tensor, None]:
        counts = tokens_per_expert.tolist() if isinstance(tokens_per_expert, torch.Tensor) else tokens_per_expert
        parts = torch.split(tokens, counts)
        products = [functional.linear(part, self.get_parameter(f"weight{i}")) for i, part in enumerate(parts)]
        return torch.cat(products), None

    def backward_dw(self) -> None:
        """Gradients of weights are never put off here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Sharded:
        """Each expert is a slice of one tensor with an axis over all experts in front, as Transformer Engine has it."""
        ranks, replicas = self.groups.ep, self.groups.expt_dp
        total, first = ranks.size() * self.num_gemms, ranks.rank() * self.num_gemms
        out: Sharded = {}
        for number in range(self.num_gemms):
            offsets = (*sharded_offsets, (len(sharded_offsets), first + number, total))
            own = make_sharded_tensors_for_checkpoint(
                {f"{number}.weight": self.get_parameter(f"weight{number}")}, "", {f"{number}.weight": self.axis},
                offsets, **_groups(metadata, self.groups.expt_tp),
            )  # fmt: skip
            replace_prefix_for_sharding(own, f"{number}.", prefix)
            shard = own[f"{number}.weight"]
            shard.replica_id = (*shard.replica_id[:2], replicas.rank())
            out[f"{prefix}weight{number}"] = shard
        return out


class ColumnGroupedLinear(GroupedLinear):
    """Divided by outputs."""

    axis = 0


class RowGroupedLinear(GroupedLinear):
    """Divided by inputs."""

    axis = 1


def _groups(metadata: dict[str, Any] | None, tensor: ProcessGroup) -> dict[str, Any]:
    data = (metadata or {}).get("dp_cp_group") or parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"tp_group": tensor, "dp_cp_group": data}
