"""Attention for packed micro-batches: no padding outside it, rows of a padded batch inside it.

Every matrix product of the model sees ``N`` tokens laid end to end. Only here are queries, keys and values copied to
``B`` rows of ``P`` positions, one sequence a row, attended causally, and copied back. A context that several
sequences share stands in the row of each; what it gives in attention is the same in all of them, so it is read back
from one. A sequence never sees another, and what stands where a row is padded reaches nothing: it comes after every
token of its row, and its own output is not read.

Axis letters: ``N`` tokens, ``B`` rows, ``P`` positions of a row, ``H`` heads, ``K`` key-value heads, ``D`` head size.
"""

# torch.from_numpy and transformers' registry are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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
    """Which of the ``N`` tokens stand where in the ``[B, P]`` rows, on the device of the model."""

    num_positions: int
    tokens: Tensor
    """``[B · P]``, int64: the token of each place; some token or other where a row is padded."""
    places: Tensor
    """``[N]``, int64: a place of each token. A shared context stands in several rows, alike in each."""

    @classmethod
    def of(cls, packed: PackedTokens, device: torch.device) -> PackedRows:
        """The rows of a micro-batch."""
        return cls(
            num_positions=packed.rows.shape[1],
            tokens=torch.from_numpy(packed.rows.reshape(-1)).to(device),
            places=torch.from_numpy(packed.places).to(device),
        )

    def spread(self, states: Tensor) -> Tensor:
        """``[1, H, N, D]`` → ``[B, H, P, D]``."""
        _, heads, _, size = states.shape
        flat = states[0].transpose(0, 1).reshape(-1, heads * size)
        rows = flat.index_select(0, self.tokens)
        return rows.view(-1, self.num_positions, heads, size).transpose(1, 2)

    def gather(self, rows: Tensor) -> Tensor:
        """``[B, H, P, D]`` → ``[1, N, H, D]``."""
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
    mask = _window_mask(packed_rows.num_positions, sliding_window, query.device)
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
    """``[B, K, P, D]`` → ``[B, K · repeats, P, D]``."""
    if repeats == 1:
        return states
    rows, heads, places, size = states.shape
    expanded = states[:, :, None].expand(rows, heads, repeats, places, size)
    return expanded.reshape(rows, heads * repeats, places, size)


def _window_mask(num_positions: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """True ``[P, P]`` where a query may see a key; None where plain causality says the same."""
    if sliding_window is None or num_positions <= sliding_window:
        return None
    place = torch.arange(num_positions, device=device)
    age = place[:, None] - place[None, :]
    return (age >= 0) & (age < sliding_window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
