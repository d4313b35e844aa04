"""The three ways in which packed rows attend: one new token per slot, whole fresh contexts, and continued contexts.

Legend: N rows, n running slots, B sequences, T positions of the longest of them, Q query heads, K key and value
heads, G = Q / K, D head dimension.

Padding exists only in here: :class:`RaggedRows` spreads packed rows over ``[B, T]`` and collects them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # the name that every reader of torch code knows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.torch.cache import KeyValueCache
    from penstock.backends.engines.torch.config import ModelConfig


class DecodeAttention:
    """One query per slot against the first ``reach`` positions of its cache.

    The G query heads of a key head stand where SDPA expects G queries: they see the same keys under the same mask,
    so nothing has to be repeated.
    """

    def __init__(self, config: ModelConfig, cache: KeyValueCache, num_running: int, reach: int) -> None:
        self._cache = cache
        self._views = cache.views(num_running, reach)
        self._num_heads = config.num_heads
        self._grouped = (config.num_kv_heads, config.group_size, config.head_dim)
        self._addresses: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def at(self, addresses: torch.Tensor, mask: torch.Tensor) -> DecodeAttention:
        """Set what changes at each step: where this step's keys and values go, and the additive mask ``[n, reach]``
        in the model's dtype."""
        self._addresses = addresses
        self._mask = mask[:, None, None]
        return self

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        assert self._addresses is not None
        self._cache.write(layer, self._addresses, heads[:, self._num_heads :])
        keys, values = self._views[layer]
        queries = heads[:, : self._num_heads].view(heads.shape[0], *self._grouped)
        context = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask)
        return context.reshape(heads.shape[0], -1)


class RaggedRows(NamedTuple):
    """Packed rows of B sequences, and where each row stands in ``[B, T]``."""

    tokens: torch.Tensor
    """``[N]``"""
    positions: torch.Tensor
    """``[N]``: place of each token in its context."""
    places: torch.Tensor
    """``[N]``: index of each row in ``[B·T]``."""
    num_sequences: int
    longest: int

    @staticmethod
    def pack(sequences: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device) -> RaggedRows:
        """Pack B token sequences, of which sequence ``b`` begins at position ``starts[b]`` of its context."""
        longest = max(len(sequence) for sequence in sequences)
        tokens: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            tokens.extend(sequence)
            positions.extend(range(start, start + len(sequence)))
            places.extend(range(row * longest, row * longest + len(sequence)))
        packed = torch.tensor((tokens, positions, places), dtype=torch.int64).to(device)
        return RaggedRows(packed[0], packed[1], packed[2], len(sequences), longest)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """``[N, heads, D]`` to ``[B, heads, T, D]``, zeros where there is no row."""
        if self.num_sequences == 1:
            return rows.transpose(0, 1).unsqueeze(0)
        padded = rows.new_zeros(self.num_sequences * self.longest, *rows.shape[1:])
        padded.index_copy_(0, self.places, rows)
        return padded.view(self.num_sequences, self.longest, *rows.shape[1:]).transpose(1, 2)

    def collect(self, padded: torch.Tensor) -> torch.Tensor:
        """``[B, heads, T, D]`` to ``[N, heads·D]``."""
        flat = padded.transpose(1, 2).flatten(0, 1).flatten(1)
        return flat if self.num_sequences == 1 else flat.index_select(0, self.places)


class FreshAttention:
    """Contexts from their first token: causal within each, nothing read from the cache.

    With ``cache``, keys and values are stored at ``addresses``; without, they are forgotten (scoring).
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: RaggedRows,
        cache: KeyValueCache | None = None,
        addresses: torch.Tensor | None = None,
    ) -> None:
        self._config = config
        self._rows = rows
        self._cache = cache
        self._addresses = addresses

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        if self._cache is not None and self._addresses is not None:
            self._cache.write(layer, self._addresses, heads[:, num_heads:])
        queries = self._rows.spread(heads[:, :num_heads])
        stored = self._rows.spread(heads[:, num_heads:])
        keys, values = stored[:, :num_kv_heads], stored[:, num_kv_heads:]
        context = F.scaled_dot_product_attention(
            queries, _per_query(keys, self._config), _per_query(values, self._config), is_causal=True
        )
        return self._rows.collect(context)


class ContinuedAttention:
    """Further tokens of contexts whose first ``starts[b]`` positions are in the cache already."""

    def __init__(
        self,
        config: ModelConfig,
        rows: RaggedRows,
        cache: KeyValueCache,
        addresses: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        reach: int,
    ) -> None:
        """``slots [B]`` and ``starts [B]`` of the sequences; ``reach`` is beyond the last position of each."""
        self._config = config
        self._rows = rows
        self._cache = cache
        self._addresses = addresses
        self._slots = slots
        self._reach = reach
        device = slots.device
        last_seen = starts[:, None] + torch.arange(rows.longest, device=device)
        self._mask = (torch.arange(reach, device=device) <= last_seen[..., None])[:, None]

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        num_heads = self._config.num_heads
        self._cache.write(layer, self._addresses, heads[:, num_heads:])
        queries = self._rows.spread(heads[:, :num_heads])
        keys, values = self._cache.gathered(layer, self._slots, self._reach)
        context = F.scaled_dot_product_attention(
            queries, _per_query(keys, self._config), _per_query(values, self._config), attn_mask=self._mask
        )
        return self._rows.collect(context)


def _per_query(heads: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """``[B, K, T, D]`` to ``[B, Q, T, D]``. Not left to SDPA, whose memory-efficient kernel takes equal heads only."""
    return heads if config.group_size == 1 else heads.repeat_interleave(config.group_size, dim=1)
