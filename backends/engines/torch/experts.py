"""Mixture of experts: each row goes to a few of many small MLPs, computed expert by expert.

Legend: N rows, k experts per row, E experts, S = N·k pairs of a row and one of its experts, H hidden, I intermediate
size of an expert.

Invariants:

* Which experts a row goes to, and with what weights, is decided in float32, as the Hugging Face model does.
* A row's result does not depend on the other rows. The pairs of one expert are made up to :data:`MIN_ROWS` rows, for
  matrix products of fewer round otherwise; what stands in the added rows is never read.
* No size depends on values, so a GPU is not waited for; only experts that someone goes to cost anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # the name that every reader of torch code knows

from penstock.backends.engines.torch.slots import MIN_ROWS

if TYPE_CHECKING:
    from penstock.backends.checkpoint.model_config import ExpertsConfig
    from penstock.backends.engines.torch.weights import LayerWeights


class _Grouping(NamedTuple):
    """Pairs in the order of their experts."""

    rows: torch.Tensor
    """``[P]``, P ≥ S: which row stands at each place."""
    places: torch.Tensor
    """``[S]``: where each pair stands."""
    ends: torch.Tensor
    """int32 ``[E]``: the first place beyond those of each expert."""


class Experts:
    """The sparse MLP of every layer of one model; keeps nothing between calls."""

    def __init__(self, config: ExpertsConfig, device: torch.device) -> None:
        self._num_per_row = config.num_per_token
        self._normalized = config.normalized
        self._num_experts = config.num_experts
        self._ids = torch.arange(config.num_experts, device=device)

    def onto(
        self, residual: torch.Tensor, x: torch.Tensor, layer: LayerWeights, idle: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual [N, H]`` plus what the experts make of the normed ``x [N, H]``, and which experts ``[N, k]``.

        Rows in ``idle`` belong to nobody; they follow the first row, so that no expert is computed for them alone.
        """
        assert layer.router is not None
        probabilities = torch.softmax(torch.mm(x, layer.router), -1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, self._num_per_row, -1)
        if self._normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        if idle.start < idle.stop:
            chosen[idle] = chosen[:1]
        rows, places, ends = self._grouped(chosen.view(-1))
        gate, up = F.grouped_mm(x.index_select(0, rows), layer.gate_up, offs=ends).chunk(2, 1)
        made = F.grouped_mm(F.silu(gate).mul_(up), layer.down, offs=ends)
        per_row = made.index_select(0, places).view(*chosen.shape, -1)
        return torch.baddbmm(residual.unsqueeze(1), weights.to(x.dtype).unsqueeze(1), per_row).squeeze(1), chosen

    def _grouped(self, chosen: torch.Tensor) -> _Grouping:
        """``chosen [S]``: the expert of each pair; the pairs of a row stand side by side."""
        num_pairs = chosen.shape[0]
        ordered, pairs = torch.sort(chosen, stable=True)
        ends = torch.searchsorted(ordered, self._ids, right=True)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        sizes = counts.clamp_min(MIN_ROWS).mul_(counts > 0)
        padded_ends = sizes.cumsum(0)
        # Within an expert the pairs stay in order, so all of them move by the same number of places.
        moved = (padded_ends - sizes).sub_(ends - counts)
        at = moved.index_select(0, ordered).add_(torch.arange(num_pairs, device=chosen.device))
        num_places = num_pairs + (MIN_ROWS - 1) * min(num_pairs, self._num_experts)
        rows = chosen.new_zeros(num_places).index_copy_(0, at, pairs.div(self._num_per_row, rounding_mode="floor"))
        places = torch.empty_like(at).index_copy_(0, pairs, at)
        return _Grouping(rows, places, padded_ends.to(torch.int32))
