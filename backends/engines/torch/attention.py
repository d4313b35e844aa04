"""The three ways in which packed rows attend: one new token per slot, whole fresh contexts, and continued contexts.

Legend: N rows, n running slots, B sequences, T positions of the longest of them, Q query heads, K key and value
heads, G = Q / K, D head dimension.

Padding exists only in here: :class:`RaggedRows` spreads packed rows over ``[B, T]`` and collects them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  # the name that every reader of torch code knows

from penstock.backends.engines.torch.cache import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.backends.engines.torch.cache import KeyValueCache


MAX_KNOWN_RANGES: Final = 1024
"""Views on the cache are kept for so many ranges."""


class Attention(Protocol):
    """One layer's attention over the rows of one forward pass; their keys and values are in the cache already."""

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """``heads [N, Q + 2K, D]``, rotated, to context vectors ``[N, Q·D]``."""
        ...


class SlotRange(NamedTuple):
    """Slots ``begin`` … ``end − 1``, whose contexts all end before position ``reach``."""

    begin: int
    end: int
    reach: int


class RangeAttention:
    """One query per slot of a range against the first ``reach`` positions of its cache.

    The G query heads of a key head stand where G queries are expected: they see the same keys under the same mask, so
    nothing has to be repeated. On a CPU in float32 the three products are called one by one, which takes four fifths
    of the time of SDPA for so few queries.
    """

    def __init__(self, config: ModelConfig, cache: KeyValueCache, slots: SlotRange) -> None:
        self._slots = slots
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._scale = config.head_dim**-0.5
        self._num_rows = slots.end - slots.begin
        self._grouped = (self._num_rows * config.num_kv_heads, config.group_size, config.head_dim)
        self._is_fused = not cache.is_plain
        views = cache.views(slots.begin, slots.end, slots.reach)
        if self._is_fused:
            self._views = [(keys.unsqueeze(1), values.unsqueeze(1)) for keys, values in views]
        else:
            self._views = [(keys.transpose(1, 2), values) for keys, values in views]

    def mask_of(self, mask: torch.Tensor) -> torch.Tensor:
        """This range's part of the additive mask ``[n, C]``, as it is wanted."""
        part = self._rows_of(mask).narrow(1, 0, self._slots.reach).unsqueeze(1)
        return part if self._num_kv_heads == 1 else part.repeat_interleave(self._num_kv_heads, dim=0)

    def __call__(self, layer: int, heads: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``heads [n, Q + 2K, D]`` of all running slots to context vectors ``[end − begin, Q·D]``."""
        queries = self._rows_of(heads).narrow(1, 0, self._num_heads).reshape(self._grouped)
        keys, values = self._views[layer]
        if self._is_fused:
            context = F.scaled_dot_product_attention(queries.unsqueeze(1), keys, values, attn_mask=mask.unsqueeze(1))
        else:
            scores = torch.baddbmm(mask, queries, keys, alpha=self._scale)
            context = torch.bmm(torch.softmax(scores, -1), values)
        return context.reshape(self._num_rows, -1)

    def _rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This range's part of ``[n, …]``."""
        is_all = tensor.shape[0] == self._num_rows
        return tensor if is_all else tensor.narrow(0, self._slots.begin, self._num_rows)


class DecodeAttention:
    """One query per running slot; the slots may be split into ranges with reaches of their own."""

    def __init__(self, config: ModelConfig, cache: KeyValueCache) -> None:
        self._config = config
        self._cache = cache
        self._known: dict[SlotRange, RangeAttention] = {}
        self._parts: list[tuple[RangeAttention, torch.Tensor]] = []
        self.num_running = 0

    def prepare(self, ranges: Sequence[SlotRange], mask: torch.Tensor) -> DecodeAttention:
        """Set up one step over adjoining ranges from slot 0 on, under the additive mask ``[n, C]`` in the model's
        dtype."""
        if len(self._known) > MAX_KNOWN_RANGES:
            self._known.clear()
        self._parts = []
        for slots in ranges:
            part = self._known.get(slots)
            if part is None:
                part = self._known[slots] = RangeAttention(self._config, self._cache, slots)
            self._parts.append((part, part.mask_of(mask)))
        self.num_running = ranges[-1].end
        return self

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        if len(self._parts) == 1:
            part, mask = self._parts[0]
            return part(layer, heads, mask)
        return torch.cat([part(layer, heads, mask) for part, mask in self._parts])


class RaggedRows(NamedTuple):
    """Packed rows of B sequences, and where each row stands in ``[B, T]``."""

    tokens: torch.Tensor
    """``[N]``"""
    positions: torch.Tensor
    """``[N]``: place of each token in its context."""
    places: torch.Tensor
    """``[N]``: index of each row in ``[B·T]``."""
    num_sequences: int
    padded_length: int
    """T, a multiple of :data:`~penstock.backends.engines.torch.cache.BLOCK`."""

    @staticmethod
    def pack(sequences: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device) -> RaggedRows:
        """Pack B token sequences, of which sequence ``b`` begins at position ``starts[b]`` of its context."""
        padded_length = round_up(max(len(sequence) for sequence in sequences))
        tokens: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            tokens.extend(sequence)
            positions.extend(range(start, start + len(sequence)))
            places.extend(range(row * padded_length, row * padded_length + len(sequence)))
        packed = torch.tensor((tokens, positions, places), dtype=torch.int64).to(device)
        return RaggedRows(packed[0], packed[1], packed[2], len(sequences), padded_length)

    @property
    def num_rows(self) -> int:
        """N."""
        return self.tokens.shape[0]

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """``[N, heads, D]`` to ``[B, heads, T, D]``, zeros where there is no row."""
        padded = rows.new_zeros(self.num_sequences * self.padded_length, *rows.shape[1:])
        padded.index_copy_(0, self.places, rows)
        return padded.view(self.num_sequences, self.padded_length, *rows.shape[1:]).transpose(1, 2)

    def collect(self, padded: torch.Tensor) -> torch.Tensor:
        """``[B, heads, T, D]`` to ``[N, heads·D]``."""
        return padded.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, self.places)


class FreshAttention:
    """Contexts from their first token: causal within each, nothing read from the cache."""

    def __init__(self, config: ModelConfig, rows: RaggedRows) -> None:
        self._config = config
        self._rows = rows

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        spread = self._rows.spread(heads)
        queries = spread.narrow(1, 0, num_heads)
        keys = spread.narrow(1, num_heads, num_kv_heads)
        values = spread.narrow(1, num_heads + num_kv_heads, num_kv_heads)
        context = F.scaled_dot_product_attention(
            queries, _per_query(keys, self._config), _per_query(values, self._config), is_causal=True
        )
        return self._rows.collect(context)


class ContinuedAttention:
    """Further tokens of contexts whose first ``starts[b]`` positions are in the cache already, or are stored by
    other rows of the same pass."""

    def __init__(
        self, config: ModelConfig, rows: RaggedRows, cache: KeyValueCache, slots: torch.Tensor, starts: torch.Tensor,
        reach: int,
    ) -> None:  # fmt: skip
        """``slots [B]`` and ``starts [B]`` of the sequences; ``reach`` is beyond the last position of each."""
        self._config = config
        self._rows = rows
        self._cache = cache
        self._slots = slots
        self._reach = reach
        device = slots.device
        last_seen = starts[:, None] + torch.arange(rows.padded_length, device=device)
        self._mask = (torch.arange(reach, device=device) <= last_seen[..., None])[:, None]

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        queries = self._rows.spread(heads.narrow(1, 0, self._config.num_heads))
        keys, values = self._cache.gathered(layer, self._slots, self._reach)
        context = F.scaled_dot_product_attention(
            queries, _per_query(keys, self._config), _per_query(values, self._config), attn_mask=self._mask
        )
        return self._rows.collect(context)


class ReplayedAttention:
    """The same as :class:`ContinuedAttention`, by the very products that decoding one token after the other makes, so
    that keys and values come out with the same bits. For a CPU in float32; it costs what the decode steps cost."""

    def __init__(
        self, config: ModelConfig, cache: KeyValueCache, stretches: Sequence[tuple[SlotRange, int, int]]
    ) -> None:
        """Per sequence its slot with the reach, the position of its first row, and its number of rows."""
        self._config = config
        self._scale = config.head_dim**-0.5
        self._stretches: list[tuple[int, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        for slots, start, num_rows in stretches:
            seen = torch.arange(slots.reach) <= torch.arange(start, start + num_rows)[:, None]
            mask = torch.zeros(num_rows, slots.reach).masked_fill_(~seen, float("-inf")).unsqueeze(1)
            self._stretches.append((num_rows, mask, cache.views(slots.begin, slots.end, slots.reach)))

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        c = self._config
        queries = heads.narrow(1, 0, c.num_heads).reshape(-1, c.num_kv_heads, c.group_size, c.head_dim)
        context = torch.empty_like(queries)
        begin = 0
        for num_rows, mask, views in self._stretches:
            keys, values = views[layer]
            for head in range(c.num_kv_heads):
                rows = queries[begin : begin + num_rows, head]
                transposed = keys[head].t().expand(num_rows, -1, -1)
                scores = torch.baddbmm(mask, rows, transposed, alpha=self._scale)
                weights = torch.softmax(scores, -1)
                context[begin : begin + num_rows, head] = torch.bmm(weights, values[head].expand(num_rows, -1, -1))
            begin += num_rows
        return context.flatten(1)


class Segments:
    """Several attentions, each over its own successive rows of one pass. Given the rows of the first few only, as in
    the last layer, it computes those."""

    def __init__(self, parts: Sequence[tuple[int, Attention]]) -> None:
        """``(number of rows, attention)`` in the order of the rows."""
        self._parts = parts

    def __call__(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        contexts: list[torch.Tensor] = []
        begin = 0
        for num_rows, part in self._parts:
            if begin == heads.shape[0]:
                break
            contexts.append(part(layer, heads.narrow(0, begin, num_rows)))
            begin += num_rows
        return contexts[0] if len(contexts) == 1 else torch.cat(contexts)


def _per_query(heads: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """``[B, K, T, D]`` to ``[B, Q, T, D]``. Not left to SDPA, whose memory-efficient kernel takes equal heads only."""
    return heads if config.group_size == 1 else heads.repeat_interleave(config.group_size, dim=1)
