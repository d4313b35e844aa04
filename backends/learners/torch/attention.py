"""Attention for packed micro-batches: no padding outside it, rows of a padded batch inside it.

Every matrix product of the model sees ``N`` tokens laid end to end. Only here are queries, keys and values moved to
``B`` rows of ``T`` places, one sequence a row, attended causally, and moved back. A sequence never sees another one,
and what stands in the places that pad a row reaches nothing: it comes after every token of its row, and its own
output is not read.

Axis letters: ``N`` tokens, ``B`` rows, ``T`` places of a row, ``H`` heads, ``K`` key-value heads, ``D`` head size.
"""

# torch.from_numpy and transformers' registry are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backends.learners.packing import PackedTokens

PACKED_ATTENTION: Final = "penstock_packed"
"""Name under which transformers finds it. It has no entry among transformers' mask functions, so no mask is built."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where each of the ``N`` tokens stands in the ``[B, T]`` rows."""

    num_rows: int
    row_places: int
    places: Tensor
    """``[N]``, int64: row · T + position."""

    @classmethod
    def of(cls, packed: PackedTokens, device: torch.device) -> PackedRows:
        """The rows of a micro-batch: one for each sequence, as long as the longest."""
        num_rows, row_places = len(packed.lengths), int(packed.lengths.max())
        row_of = np.repeat(np.arange(num_rows), packed.lengths)
        places = torch.from_numpy(row_of * row_places + packed.position_ids)
        return cls(num_rows=num_rows, row_places=row_places, places=places.to(device))

    def spread(self, tokens: Tensor) -> Tensor:
        """``[1, H, N, D]`` → ``[B, H, T, D]``, zero where a row is padded."""
        _, heads, _, size = tokens.shape
        flat = tokens[0].transpose(0, 1).reshape(-1, heads * size)
        empty = flat.new_zeros(self.num_rows * self.row_places, heads * size)
        rows = empty.index_copy(0, self.places, flat)
        return rows.view(self.num_rows, self.row_places, heads, size).transpose(1, 2)

    def gather(self, rows: Tensor) -> Tensor:
        """``[B, H, T, D]`` → ``[1, N, H, D]``."""
        _, heads, _, size = rows.shape
        flat = rows.transpose(1, 2).reshape(-1, heads * size)
        return flat.index_select(0, self.places).view(1, -1, heads, size)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_rows: PackedRows | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, as transformers' attention interface wants it.

    Args:
        module: the attention layer.
        query: ``[1, H, N, D]``.
        key: ``[1, K, N, D]``, with K a divisor of H.
        value: ``[1, K, N, D]``.
        attention_mask: None; the rows say who sees whom.
        scaling: of the scores; None means ``1 / √D``.
        dropout: 0, as the model is in evaluation mode.
        sliding_window: a token sees itself and this many less one before it; None means all before it.
        packed_rows: the layout, which the model hands through from its call.
        unused: what other attention functions take.

    Returns:
        ``[1, N, H, D]``, and no attention weights.

    Raises:
        ValueError: the model asks for a kind of attention that this function does not compute.
    """
    if packed_rows is None or attention_mask is not None or dropout:
        raise ValueError(
            f"{type(module).__name__} calls attention in a way that packed training does not support "
            f"(layout {'missing' if packed_rows is None else 'there'}, mask "
            f"{'none' if attention_mask is None else 'given'}, dropout {dropout}); use a decoder such as Qwen3 or Llama"
        )
    for name in ("softcap", "s_aux"):
        if unused.get(name) is not None:
            raise ValueError(f"{type(module).__name__} needs attention with {name}, which packed training lacks")
    repeats = query.shape[1] // key.shape[1]
    rows = [packed_rows.spread(tokens) for tokens in (query, key, value)]
    mask = _window_mask(packed_rows.row_places, sliding_window, query.device)
    attended = functional.scaled_dot_product_attention(
        rows[0],
        _repeat_heads(rows[1], repeats),
        _repeat_heads(rows[2], repeats),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return packed_rows.gather(attended), None


def _repeat_heads(states: Tensor, repeats: int) -> Tensor:
    """``[B, K, T, D]`` → ``[B, K · repeats, T, D]``."""
    if repeats == 1:
        return states
    rows, heads, places, size = states.shape
    expanded = states[:, :, None].expand(rows, heads, repeats, places, size)
    return expanded.reshape(rows, heads * repeats, places, size)


def _window_mask(row_places: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """True ``[T, T]`` where a query may see a key; None where plain causality says the same."""
    if sliding_window is None or row_places <= sliding_window:
        return None
    place = torch.arange(row_places, device=device)
    age = place[:, None] - place[None, :]
    return (age >= 0) & (age < sliding_window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
