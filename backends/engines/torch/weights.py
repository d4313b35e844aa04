"""The weights as the decode loop wants them: few large matrices, filled from Hugging Face tensors.

Invariants:

* ``load`` checks every name and shape before it writes the first value, so weights of another model change nothing.
* Loading writes into the same memory each time: views on it stay valid, and a swap is one pass of copies.
* Folded weights compute the same function in exact arithmetic, and in float32 up to rounding. Other dtypes are not
  folded, because the product of weight and gain would be rounded once more.

Legend: H hidden, Q query heads, K key and value heads, D head dimension, I intermediate, E experts, V vocabulary.
Matrices are ``[in, out]``, transposed against Hugging Face's, which saves a tenth on small products. Experts have the
names of checkpoints, one set of matrices each; the model in memory of transformers has other names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.checkpoint.layers_beyond import layers_beyond, predicting_layers
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.engines.torch.low_rank import BesideWeights, Gains, check_adapters
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.backends.engines.torch.low_rank import Adapters
    from penstock.backends.engines.torch.vision import EngineEyes

EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"
NUM_NAMED: Final = 5
"""So many offending parameters are named in an error."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. A gain of None is folded into the matrix that follows it."""

    qkv: torch.Tensor
    """``[H, (Q + 2K)·D]``; within each query and key head, dimensions that turn together stand side by side."""
    qkv_bias: torch.Tensor | None
    qk_gain: torch.Tensor | None
    """``[Q + K, D]``: the gains of the query and key norms, where the model has them."""
    output: torch.Tensor
    """``[Q·D, H]``"""
    output_bias: torch.Tensor | None
    router: torch.Tensor | None
    """``[H, E]``. None: one MLP for all rows."""
    gate_up: torch.Tensor
    """``[H, 2I]``; of experts ``[E, H, 2I]``"""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """``[I, H]``; of experts ``[E, I, H]``"""
    down_bias: torch.Tensor | None
    input_gain: torch.Tensor | None
    """``[H]``"""
    mlp_gain: torch.Tensor | None
    """``[H]``"""


class FusedWeights:
    """All weights of one model on one device, unset until the first ``load``.

    With ``fold`` the gains of the norms before the matrices, and the √H that turns a vector of unit length into one
    of unit mean square, are multiplied into the matrices; see :mod:`penstock.backends.engines.torch.model`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, fold: bool) -> None:
        if fold and dtype != torch.float32:
            raise ValueError(f"fold needs float32 weights, got {dtype}")
        self.config = config
        self.dtype = dtype
        self.device = device
        self.fold = fold
        self.embedding = self._empty(config.vocab_size, config.hidden_size)
        self.head = self.embedding.t() if config.tied_head else self._empty(config.hidden_size, config.vocab_size)
        self.final_gain = None if fold and not config.tied_head else self._empty(config.hidden_size)
        """``[H]``. A tied head cannot take the gain in, for the embedding must not have it."""
        self.eyes: EngineEyes | None = None
        """None: it takes text only."""
        if config.vision is not None:
            from penstock.backends.engines.torch.vision import EngineEyes  # brings transformers

            self.eyes = EngineEyes(config.vision, dtype, device)
        self.layers = tuple(self._empty_layer(index) for index in range(config.num_layers))
        self.beside = BesideWeights(config, device)
        """Adapters, which are computed beside the layers."""
        self._gains: tuple[Gains, ...] = ()
        """Of the layers, where they are folded into the matrices."""

    def tensors(self) -> list[torch.Tensor]:
        """All memory of the weights; a tied head is a view of the embedding."""
        return [*self._own(), *self.beside.tensors()]

    def _own(self) -> list[torch.Tensor]:
        """Without the adapters."""
        found = [self.embedding, self.head, self.final_gain]
        for layer in self.layers:
            found += [getattr(layer, field.name) for field in fields(layer)]
        if self.eyes is not None:
            found += self.eyes.tensors()
        return [tensor for tensor in found if tensor is not None]

    def take(self, other: FusedWeights) -> bool:
        """Copy what the other set holds, which has no adapters, into the memory of this one, on one device.

        Returns:
            As :meth:`load`.
        """
        for mine, theirs in zip(self._own(), other._own(), strict=True):
            if mine is not self.head or not self.config.tied_head:  # a view of the embedding
                mine.copy_(theirs)
        self._gains = other._gains
        return self.beside.load(None, self._gains)

    def load(self, tensors: Mapping[str, torch.Tensor] | None, adapters: Adapters | None = None) -> bool:
        """Take these parameters (Hugging Face names, any device and floating dtype), and these adapters beside them.

        Args:
            tensors: None: the parameters stay.
            adapters: None: there are none.

        Returns:
            Whether something lies in other memory than before.

        Raises:
            UserFault: a parameter or an adapter is missing, unknown, or of another shape; nothing has changed.
        """
        if adapters is not None:
            check_adapters(self.config, parameter_shapes(self.config), shapes_of(adapters.tensors), adapters.low_rank)
        if tensors is not None:
            check_parameters(self.config, shapes_of(tensors))
            self._load(tensors)
        return self.beside.load(adapters, self._gains)

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.device.type != "cpu":
            tensors = _Brought(tensors, self.device)
        if self.eyes is not None:
            self.eyes.load(tensors)
        self.embedding.copy_(tensors[EMBEDDING])
        norm = tensors[FINAL_NORM]
        if not self.config.tied_head:
            self.head.copy_(tensors[HEAD].t())
            if self.final_gain is None:
                self.head.mul_(self._folded_gain(norm)[:, None])
        if self.final_gain is not None:
            self.final_gain.copy_(norm)
            if self.fold:
                self.final_gain.mul_(math.sqrt(self.config.hidden_size))
        for index, layer in enumerate(self.layers):
            self._load_attention(layer, f"model.layers.{index}.", tensors)
            self._load_mlp(layer, f"model.layers.{index}.", tensors)
        if self.fold:
            names = [f"model.layers.{index}.{{}}_layernorm.weight" for index in range(len(self.layers))]
            self._gains = tuple(
                Gains(*(self._folded_gain(tensors[name.format(norm)]) for norm in ("input", "post_attention")))
                for name in names
            )

    def _load_attention(self, layer: LayerWeights, prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
        c = self.config
        query_end, key_end = c.num_heads * c.head_dim, (c.num_heads + c.num_kv_heads) * c.head_dim
        attention = f"{prefix}self_attn."
        # The last axis of a slice of the fused matrix, seen as [heads, pairs, 2], takes the same axis of Hugging
        # Face's matrix, seen as [heads, 2, pairs] and transposed.
        half = c.head_dim // 2
        for name, begin, end in (("q", 0, query_end), ("k", query_end, key_end)):
            source = tensors[f"{attention}{name}_proj.weight"].t()
            target = layer.qkv[:, begin:end].view(c.hidden_size, -1, half, 2)
            target.copy_(source.view(c.hidden_size, -1, 2, half).transpose(2, 3))
            if layer.qkv_bias is not None:
                source = tensors[f"{attention}{name}_proj.bias"]
                layer.qkv_bias[begin:end].view(-1, half, 2).copy_(source.view(-1, 2, half).transpose(1, 2))
        _turn_over(layer.qkv[:, key_end:], tensors[f"{attention}v_proj.weight"])
        if layer.qkv_bias is not None:
            layer.qkv_bias[key_end:].copy_(tensors[f"{attention}v_proj.bias"])
        layer.output.copy_(tensors[f"{attention}o_proj.weight"].t())
        if layer.output_bias is not None:
            layer.output_bias.copy_(tensors[f"{attention}o_proj.bias"])
        if layer.qk_gain is not None:
            gains = layer.qk_gain.view(-1, half, 2)
            gains[: c.num_heads].copy_(tensors[f"{attention}q_norm.weight"].view(2, half).t())
            gains[c.num_heads :].copy_(tensors[f"{attention}k_norm.weight"].view(2, half).t())
            if self.fold:
                layer.qk_gain.mul_(math.sqrt(c.head_dim))
        self._take_gain(layer.input_gain, (layer.qkv,), tensors[f"{prefix}input_layernorm.weight"])

    def _load_mlp(self, layer: LayerWeights, prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
        mlp, gain = f"{prefix}mlp.", tensors[f"{prefix}post_attention_layernorm.weight"]
        if layer.router is not None:
            layer.router.copy_(tensors[f"{mlp}gate.weight"].t())
            for expert, (gate_up, down) in enumerate(zip(layer.gate_up, layer.down, strict=True)):
                _load_matrices(gate_up, down, f"{mlp}experts.{expert}.", tensors)
            self._take_gain(layer.mlp_gain, (layer.router, layer.gate_up), gain)
            return
        _load_matrices(layer.gate_up, layer.down, mlp, tensors)
        size = self.config.intermediate_size
        if layer.gate_up_bias is not None:
            layer.gate_up_bias[:size].copy_(tensors[f"{mlp}gate_proj.bias"])
            layer.gate_up_bias[size:].copy_(tensors[f"{mlp}up_proj.bias"])
        if layer.down_bias is not None:
            layer.down_bias.copy_(tensors[f"{mlp}down_proj.bias"])
        self._take_gain(layer.mlp_gain, (layer.gate_up,), gain)

    def _take_gain(self, kept: torch.Tensor | None, matrices: tuple[torch.Tensor, ...], gain: torch.Tensor) -> None:
        if kept is None:
            folded = self._folded_gain(gain)[:, None]
            for matrix in matrices:
                matrix.mul_(folded)
        else:
            kept.copy_(gain)

    def _folded_gain(self, gain: torch.Tensor) -> torch.Tensor:
        return gain.to(self.device, self.dtype) * math.sqrt(self.config.hidden_size)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _empty_layer(self, index: int) -> LayerWeights:
        c, experts = self.config, self.config.experts_of(index)
        copies = () if experts is None else (experts.num_experts,)
        size = c.intermediate_size if experts is None else experts.intermediate_size
        qkv_width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        return LayerWeights(
            qkv=self._empty(c.hidden_size, qkv_width),
            qkv_bias=self._empty(qkv_width) if c.qkv_bias else None,
            qk_gain=self._empty(c.num_heads + c.num_kv_heads, c.head_dim) if c.qk_norm else None,
            output=self._empty(c.num_heads * c.head_dim, c.hidden_size),
            output_bias=self._empty(c.hidden_size) if c.output_bias else None,
            router=None if experts is None else self._empty(c.hidden_size, experts.num_experts),
            gate_up=self._empty(*copies, c.hidden_size, 2 * size),
            gate_up_bias=self._empty(2 * size) if c.mlp_bias else None,
            down=self._empty(*copies, size, c.hidden_size),
            down_bias=self._empty(c.hidden_size) if c.mlp_bias else None,
            input_gain=None if self.fold else self._empty(c.hidden_size),
            mlp_gain=None if self.fold else self._empty(c.hidden_size),
        )


class _Brought(Mapping[str, torch.Tensor]):
    """Parameters that are brought to a device whole when they are asked for: taken apart and turned over on the way,
    their copies would be made number by number on the host."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _load_matrices(gate_up: torch.Tensor, down: torch.Tensor, prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
    size = down.shape[0]
    _turn_over(gate_up[:, :size], tensors[f"{prefix}gate_proj.weight"])
    _turn_over(gate_up[:, size:], tensors[f"{prefix}up_proj.weight"])
    down.copy_(tensors[f"{prefix}down_proj.weight"].t())


def _turn_over(target: torch.Tensor, source: torch.Tensor) -> None:
    """Take a matrix transposed. Torch turns over by blocks where the target is contiguous, and else number by number:
    to a part of a fused matrix it is half the time by way of a matrix of its own."""
    if target.is_cpu and target.dtype == source.dtype:
        target.copy_(source.t().contiguous())
    else:
        target.copy_(source.t())


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every parameter of the model."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= {f"{prefix}{name}": shape for name, shape in _layer_shapes(config, index).items()}
    return shapes


def _layer_shapes(c: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linears = {
        "self_attn.q_proj": (query, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (key, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (key, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, query, c.output_bias),
    } | _mlp_shapes(c, index)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden_size,),
        "post_attention_layernorm.weight": (c.hidden_size,),
    }
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if c.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    return shapes


def _mlp_shapes(c: ModelConfig, index: int) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns, and whether there is a bias."""
    experts = c.experts_of(index)
    if experts is None:
        prefixes, size = ["mlp."], c.intermediate_size
    else:
        prefixes, size = [f"mlp.experts.{expert}." for expert in range(experts.num_experts)], experts.intermediate_size
    shapes: dict[str, tuple[int, int, bool]] = {}
    for prefix in prefixes:
        shapes[f"{prefix}gate_proj"] = shapes[f"{prefix}up_proj"] = (size, c.hidden_size, c.mlp_bias)
        shapes[f"{prefix}down_proj"] = (c.hidden_size, size, c.mlp_bias)
    if experts is not None:
        shapes["mlp.gate"] = (experts.num_experts, c.hidden_size, False)
    return shapes


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter; of a checkpoint without reading the tensors."""
    if isinstance(tensors, CheckpointTensors):
        return tensors.shapes()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_parameters(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless these are exactly the parameters of the model (a tied head may be there twice).

    Raises:
        UserFault: names what is missing, unknown or of another shape.
    """
    expected = parameter_shapes(config)
    if config.vision is not None:
        from penstock.backends.engines.torch.vision import vision_shapes  # brings transformers

        expected |= vision_shapes(config.vision)
    beyond = layers_beyond(shapes, config.num_layers)
    further = predicting_layers(shapes)  # which nothing here drafts with
    unused = {name for name, layer in beyond.items() if layer in further}
    check_shapes(expected, shapes, may_be_there={HEAD} | unused)


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], *, may_be_there: Set[str]
) -> None:
    """Raise unless these are exactly the expected shapes, beside names that may be there.

    Raises:
        UserFault: names what is missing, unknown or of another shape.
    """
    names = set(shapes)
    missing = sorted(expected.keys() - names)
    unused = {name for name in names if name.endswith("rotary_emb.inv_freq")}
    unknown = sorted(names - expected.keys() - may_be_there - unused)
    if missing or unknown:
        parts = [f"{what} {_some(found)}" for what, found in (("lack", missing), ("have unknown", unknown)) if found]
        raise UserFault(f"these weights are of another model than config.json describes: they {' and '.join(parts)}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            found = list(shapes[name])
            raise UserFault(f"{name}: expected shape {list(shape)} from config.json, found {found}")


def _some(names: list[str]) -> str:
    more = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
