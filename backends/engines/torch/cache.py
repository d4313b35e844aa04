"""The KV cache: one preallocated tensor, addressed by slot, never gathered while decoding.

Legend: L layers, S slots, K key and value heads, C positions, D head dimension, N tokens.

Invariants:

* Keys and values of slot ``s`` at position ``p`` are whatever was written there last; readers mask what they must
  not see, so nothing is ever cleared.
* C is a multiple of :data:`BLOCK`, so a reach that is rounded up never leaves the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from penstock.backends.engines.torch.config import ModelConfig

BLOCK: Final = 32
"""Attention reads whole blocks of so many positions, so that its views change once in so many steps."""


def round_up(length: int) -> int:
    """The next multiple of :data:`BLOCK`."""
    return -(-length // BLOCK) * BLOCK


class KeyValueCache:
    """``[L, S, 2K, C, D]``: the keys of K heads, then their values."""

    def __init__(
        self, config: ModelConfig, num_slots: int, max_context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_kv_heads = config.num_kv_heads
        self.capacity = round_up(max_context)
        shape = (config.num_layers, num_slots, 2 * config.num_kv_heads, self.capacity, config.head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._flat = tuple(self._data.flatten(1, 3).unbind(0))
        heads = torch.arange(num_slots * 2 * config.num_kv_heads, device=device)
        self._first = (heads * self.capacity).view(num_slots, 2 * config.num_kv_heads)

    def running_addresses(self, positions: torch.Tensor) -> torch.Tensor:
        """Where the heads of one token of each of the first slots go: ``positions [n]`` to ``[n·2K]``."""
        return (self._first[: positions.shape[0]] + positions[:, None]).view(-1)

    def addresses(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the heads of N tokens go: ``slots [N]`` and ``positions [N]`` to ``[N·2K]``."""
        return (self._first.index_select(0, slots) + positions[:, None]).view(-1)

    def write(self, layer: int, addresses: torch.Tensor, heads: torch.Tensor) -> None:
        """Store ``heads [N, 2K, D]`` of N tokens."""
        self._flat[layer].index_copy_(0, addresses, heads.flatten(0, 1))

    def views(self, num_running: int, reach: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, keys and values ``[num_running, K, reach, D]`` of the first slots, without a copy."""
        window = self._data[:, :num_running, :, :reach]
        keys, values = window[:, :, : self.num_kv_heads], window[:, :, self.num_kv_heads :]
        return list(zip(keys.unbind(0), values.unbind(0), strict=True))

    def gathered(self, layer: int, slots: torch.Tensor, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, K, reach, D]`` of these slots, copied."""
        rows = self._data[layer, :, :, :reach].index_select(0, slots)
        return rows[:, : self.num_kv_heads], rows[:, self.num_kv_heads :]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot ``target`` the first ``length`` positions of slot ``source``, in all layers."""
        self._data[:, target, :, :length].copy_(self._data[:, source, :, :length])
