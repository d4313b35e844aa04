"""The forward pass over packed rows: matrix products see every token once, attention alone knows who belongs to whom.

Legend: N rows (tokens of any number of sequences), H hidden, Q query heads, K key and value heads, D head dimension,
V vocabulary.

Invariants:

* Hidden states are those of the Hugging Face model of the same weights up to rounding of the weights' dtype.
* In each layer the keys and values of all rows are in the cache before the first row attends.
* Rows do not influence each other except through the attention that the caller hands in.

Folded norms. Where the gains are folded into the matrices, ``x / sqrt(mean(x²) + ε)`` is computed as
``x / hypot(|x|, sqrt(ε·H))``: a third of the time of the library's norm on a CPU. The remaining factor √H is in the
matrices too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812  # the name that every reader of torch code knows

from penstock.backends.engines.torch.experts import Experts
from penstock.backends.engines.torch.rope import rotate_in_place, rotation_table
from penstock.backends.engines.torch.weights import FusedWeights

if TYPE_CHECKING:
    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.backends.engines.torch.attention import Attention
    from penstock.backends.engines.torch.cache import KeyValueCache
    from penstock.backends.engines.torch.engine_settings import EngineSettings
    from penstock.backends.engines.torch.learner_model import LearnerModel, LearnerWeights
    from penstock.backends.engines.torch.low_rank import Beside
    from penstock.backends.engines.torch.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Rows:
    """What one forward pass is about."""

    tokens: torch.Tensor
    """int64 ``[N]``"""
    positions: torch.Tensor
    """int64 ``[N]``; beside images ``[N, 3]``: by time, row and column."""
    addresses: torch.Tensor | None
    """int64 ``[N·2K]``: where their keys and values go; None: nowhere."""
    num_kept: int
    """Hidden states are wanted of the first so many rows only; the others are there for their keys and values."""
    num_idle: int = 0
    """The last so many of those belong to nobody."""
    seen: tuple[torch.Tensor, torch.Tensor] | None = None
    """Rows ``[S]`` that stand for squares of images, and what was seen there ``[S, H]``; None: none do."""

    def with_prefill(self, prefill: Rows) -> Rows:
        """These, which are decoded, and behind them those of new contexts, of which nothing is kept."""
        assert self.addresses is not None
        assert prefill.addresses is not None
        positions, seen = self.positions, prefill.seen
        if prefill.positions.ndim == 2:
            positions = positions[:, None].expand(-1, 3)
        if seen is not None:
            seen = (seen[0] + len(positions), seen[1])
        return Rows(
            torch.cat((self.tokens, prefill.tokens)),
            torch.cat((positions, prefill.positions)),
            torch.cat((self.addresses, prefill.addresses)),
            self.num_kept,
            self.num_idle,
            seen,
        )


class DecoderModel:
    """A decoder-only transformer on fused weights and one cache; keeps no other state between calls."""

    def __init__(self, weights: FusedWeights, cache: KeyValueCache, max_context: int) -> None:
        config = weights.config
        self.weights = weights
        self.cache = cache
        self._rotations = rotation_table(config, max_context, weights.device)
        self._num_queries = config.num_heads
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._num_heads = self._num_rotated + config.num_kv_heads
        self._num_stored = 2 * config.num_kv_heads
        self._experts = None if config.experts is None else Experts(config.experts, weights.device)
        self._eps = config.rms_eps
        self._hidden_floor = torch.tensor(math.sqrt(config.rms_eps * config.hidden_size), device=weights.device)
        self._head_floor = torch.tensor(math.sqrt(config.rms_eps * config.head_dim), device=weights.device)

    def hidden_states(self, rows: Rows, attention: Attention) -> torch.Tensor:
        """Hidden states ``[num_kept, H]`` after the last layer, before the final norm."""
        x = self.weights.embedding.index_select(0, rows.tokens)
        if rows.seen is not None:
            x.index_copy_(0, *rows.seen)
        rotation = self._rotation(rows.positions).unsqueeze(1)
        last = len(self.weights.layers) - 1
        for index, (layer, beside) in enumerate(zip(self.weights.layers, self.weights.beside.layers, strict=True)):
            heads = self._heads(x, layer, beside.qkv, rotation)
            if rows.addresses is not None:
                self.cache.write(index, rows.addresses, heads.narrow(1, self._num_queries, self._num_stored))
            # Nobody reads the last layer's hidden states of the others; which experts they went to may be asked.
            if index == last and rows.num_kept < x.shape[0] and not self.cache.records_experts:
                x, heads = x[: rows.num_kept], heads[: rows.num_kept]
                if not rows.num_kept:
                    return x
            x = _linear_onto(x, attention(index, heads), layer.output, layer.output_bias, beside.output)
            normed = self._norm(x, layer.mlp_gain)
            if layer.router is None:
                gate, up = _linear(normed, layer.gate_up, layer.gate_up_bias, beside.gate_up).chunk(2, 1)
                x = _linear_onto(x, F.silu(gate).mul_(up), layer.down, layer.down_bias, beside.down)
            else:
                assert self._experts is not None
                idle = slice(rows.num_kept - rows.num_idle, rows.num_kept)
                x, chosen = self._experts.onto(x, normed, layer, idle)
                if rows.addresses is not None and self.cache.records_experts:
                    self.cache.write_experts(index, rows.addresses, chosen)
        return x[: rows.num_kept]

    def _rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """``[N, D / 2]``"""
        if positions.ndim == 1:
            return self._rotations.index_select(0, positions)
        vision = self.weights.config.vision
        assert vision is not None
        parts = torch.split(self._rotations, list(vision.sections), dim=1)
        return torch.cat([part[positions[:, axis]] for axis, part in enumerate(parts)], dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, H]`` to float32 ``[N, V]``."""
        gain = self.weights.final_gain
        if self.weights.fold:
            hidden = self._norm(hidden, None)
            hidden = hidden if gain is None else hidden * gain
        else:
            hidden = self._norm(hidden, gain)
        return torch.mm(hidden, self.weights.head).float()

    def _heads(
        self, x: torch.Tensor, layer: LayerWeights, beside: Beside | None, rotation: torch.Tensor
    ) -> torch.Tensor:
        qkv = _linear(self._norm(x, layer.input_gain), layer.qkv, layer.qkv_bias, beside)
        heads = qkv.view(x.shape[0], self._num_heads, -1)
        rotated = heads.narrow(1, 0, self._num_rotated)
        if layer.qk_gain is not None:
            if self.weights.fold:
                rotated.div_(_length(rotated, self._head_floor)).mul_(layer.qk_gain)
            else:
                rotated.copy_(F.rms_norm(rotated, rotated.shape[-1:], None, self._eps)).mul_(layer.qk_gain)
        rotate_in_place(rotated, rotation)
        return heads

    def _norm(self, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        if self.weights.fold:
            return x / _length(x, self._hidden_floor)
        return F.rms_norm(x, x.shape[-1:], gain, self._eps)


def _length(x: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    norm = cast("torch.Tensor", torch.linalg.vector_norm(x, dim=-1, keepdim=True))  # pyright: ignore[reportUnknownMemberType]  # no type in torch
    return torch.hypot(norm, floor)


def _linear(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, beside: Beside | None) -> torch.Tensor:
    product = torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)
    return product if beside is None else beside.added(product, x)


def _linear_onto(
    residual: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, beside: Beside | None
) -> torch.Tensor:
    summed = torch.addmm(residual, x, matrix)
    summed = summed if bias is None else summed.add_(bias)
    return summed if beside is None else beside.added(summed, x)


def open_weights(config: ModelConfig, settings: EngineSettings) -> FusedWeights | LearnerWeights:
    """One set, unset."""
    if settings.learner_model is not None:
        from penstock.backends.engines.torch.learner_model import LearnerWeights  # brings transformers

        return LearnerWeights(config, settings.learner_model)
    fold = settings.dtype == torch.float32 and settings.device.type == "cpu"
    return FusedWeights(config, settings.dtype, settings.device, fold=fold)


def open_model(
    weights: FusedWeights | LearnerWeights, cache: KeyValueCache, max_scored: int
) -> DecoderModel | LearnerModel:
    """What computes with these weights over the cache."""
    if isinstance(weights, FusedWeights):
        return DecoderModel(weights, cache, max_scored)
    from penstock.backends.engines.torch.learner_model import LearnerModel  # brings transformers

    return LearnerModel(weights, cache)
