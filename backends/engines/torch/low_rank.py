"""Low-rank adapters beside the fused weights: ``x W + (x A') B'`` in place of ``x W``, nothing merged.

Invariants:

* It is the function that the learner computes: adapters are float32 and their products are made in float32, added to
  the ``x W`` of the model's dtype and rounded to that again, as the layers of ``peft`` do it.
* A gain that is folded into a matrix is folded into ``A'`` beside it too, the adapters' scale is in ``B'``, and their
  outputs stand in the order of the matrix. Those of matrices that are fused stand side by side, ``A' [in, K·r]`` and
  ``B' [K·r, out]``, which is 0 where an adapter is not of that matrix.
* The next version of the same adapters is written into the same memory.

Legend: r rank, K how many of the matrices that are fused are adapted; else as in
:mod:`penstock.backends.engines.torch.weights`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.messages.errors import UserFault
from penstock.messages.weights import ADAPTER_DOWN, ADAPTER_UP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.messages.weights import LowRank

FIELDS: Final = ("qkv", "output", "gate_up", "down")


class Adapters(NamedTuple):
    """What was published beside a model."""

    tensors: Mapping[str, torch.Tensor]
    """By the names that :class:`.LowRank` says."""
    low_rank: LowRank


@dataclass(frozen=True, slots=True)
class Beside:
    """Of one fused matrix."""

    down: torch.Tensor
    """``A'``, float32 ``[in, K·r]``"""
    up: torch.Tensor
    """``B'``, float32 ``[K·r, out]``"""

    def added(self, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``product [N, out]`` and what the adapters make of ``x [N, in]``."""
        return torch.addmm(product.float(), torch.mm(x.float(), self.down), self.up).to(product.dtype)


@dataclass(frozen=True, slots=True)
class LayerBeside:
    """Of one decoder layer, as :class:`.LayerWeights` names its matrices; None: without adapter."""

    qkv: Beside | None = None
    output: Beside | None = None
    gate_up: Beside | None = None
    down: Beside | None = None

    def of(self, field: str) -> Beside | None:
        """That beside the matrix of this name."""
        found: Beside | None = getattr(self, field)
        return found


class Gains(NamedTuple):
    """What is folded into the matrices of a layer, ``[H]`` each."""

    qkv: torch.Tensor
    gate_up: torch.Tensor


class _Part(NamedTuple):
    """A matrix of a checkpoint, in the columns of a fused one."""

    name: str
    begin: int
    end: int
    is_turned: bool = False
    """Dimensions that turn together stand side by side in the fused matrix."""


class BesideWeights:
    """The adapters of one model on one device; none until the first ``load``."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._head_dim, self._device = config.head_dim, device
        self._parts = _parts(config)
        self._loaded: tuple[int, frozenset[str]] = (0, frozenset())
        """Rank, and names of the tensors."""
        self.layers = (LayerBeside(),) * config.num_layers

    def tensors(self) -> list[torch.Tensor]:
        """All memory of them."""
        found = [layer.of(field) for layer in self.layers for field in FIELDS]
        return [tensor for beside in found if beside is not None for tensor in (beside.down, beside.up)]

    def load(self, adapters: Adapters | None, gains: tuple[Gains, ...]) -> bool:
        """Take these adapters, which :func:`check_adapters` has passed.

        Args:
            adapters: None: the model is computed as it is.
            gains: of each layer, where they are folded into its matrices; else none.

        Returns:
            Whether they lie in other memory than those before.
        """
        names = frozenset[str]() if adapters is None else frozenset(adapters.tensors)
        rank = 0 if adapters is None else adapters.low_rank.rank
        is_elsewhere = self._loaded != (rank, names)
        if is_elsewhere:
            self._loaded = rank, names
            self.layers = tuple(self._empty(index) for index in range(len(self.layers)))
        if adapters is not None:
            for index, layer in enumerate(self.layers):
                self._fill(index, layer, adapters, gains[index] if gains else None)
        return is_elsewhere

    def _fill(self, index: int, layer: LayerBeside, adapters: Adapters, gains: Gains | None) -> None:
        for field in FIELDS:
            beside = layer.of(field)
            if beside is None:
                continue
            beside.up.zero_()
            for number, (path, part) in enumerate(self._adapted(index, field)):
                self._place(
                    beside, number, part, adapters.tensors[path + ADAPTER_DOWN], adapters.tensors[path + ADAPTER_UP]
                )
            beside.up.mul_(adapters.low_rank.scale)
            gain = None if gains is None else {"qkv": gains.qkv, "gate_up": gains.gate_up}.get(field)
            if gain is not None:
                beside.down.mul_(gain[:, None])

    def _place(self, beside: Beside, number: int, part: _Part, down: torch.Tensor, up: torch.Tensor) -> None:
        rank = len(down)
        rows = slice(number * rank, (number + 1) * rank)
        beside.down[:, rows].copy_(down.t())
        target, source = beside.up[rows, part.begin : part.end], up.t()
        if part.is_turned:
            half = self._head_dim // 2
            target = target.view(rank, -1, half, 2)
            source = source.reshape(rank, -1, 2, half).transpose(2, 3)
        target.copy_(source)

    def _empty(self, index: int) -> LayerBeside:
        made: dict[str, Beside] = {}
        for field in FIELDS:
            num_columns = self._loaded[0] * len(self._adapted(index, field))
            if num_columns:
                num_inputs, parts = self._parts[field]
                made[field] = Beside(
                    torch.empty(num_inputs, num_columns, device=self._device),
                    torch.empty(num_columns, parts[-1].end, device=self._device),
                )
        return LayerBeside(**made)

    def _adapted(self, index: int, field: str) -> list[tuple[str, _Part]]:
        """Of a fused matrix the parts that have an adapter, by the names of their matrices."""
        named = [(f"model.layers.{index}.{part.name}", part) for part in self._parts[field][1]]
        return [(path, part) for path, part in named if path + ADAPTER_UP in self._loaded[1]]


def _parts(c: ModelConfig) -> dict[str, tuple[int, tuple[_Part, ...]]]:
    """Inputs and parts of each fused matrix of a layer that adapters can be beside."""
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    size, hidden = c.intermediate_size, c.hidden_size
    qkv = (
        _Part("self_attn.q_proj", 0, query, is_turned=True),
        _Part("self_attn.k_proj", query, query + key, is_turned=True),
        _Part("self_attn.v_proj", query + key, query + 2 * key),
    )
    return {
        "qkv": (hidden, qkv),
        "output": (query, (_Part("self_attn.o_proj", 0, hidden),)),
        "gate_up": (hidden, (_Part("mlp.gate_proj", 0, size), _Part("mlp.up_proj", size, 2 * size))),
        "down": (size, (_Part("mlp.down_proj", 0, hidden),)),
    }


def check_adapters(
    config: ModelConfig,
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    low_rank: LowRank,
) -> None:
    """Raise unless these are adapters of matrices of the model, each whole.

    Args:
        config: of the model.
        expected: shapes of the model's own parameters.
        shapes: of the adapters.
        low_rank: what the manifest says of them.

    Raises:
        UserFault: names what does not fit.
    """
    names = [part.name for _, parts in _parts(config).values() for part in parts]
    known = {f"model.layers.{index}.{name}" for index in range(config.num_layers) for name in names}
    for path in sorted({name.removesuffix(ADAPTER_DOWN).removesuffix(ADAPTER_UP) for name in shapes}):
        matrix = expected.get(f"{path}.weight")
        if path not in known or matrix is None:
            raise UserFault(
                f"learner.lora.publish is adapter, and an embedded engine computes no adapter beside {path}; leave it "
                "out of learner.lora.target_modules, or set learner.lora.publish: merged"
            )
        wanted = {ADAPTER_DOWN: (low_rank.rank, matrix[1]), ADAPTER_UP: (matrix[0], low_rank.rank)}
        for kind, shape in wanted.items():
            found = shapes.get(path + kind)
            if found != shape:
                said = "none" if found is None else str(list(found))
                raise UserFault(f"{path}{kind}: expected shape {list(shape)} of rank {low_rank.rank}, found {said}")
