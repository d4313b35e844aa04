"""The KV cache: one preallocated tensor, addressed by slot, never gathered while decoding.

Legend: L layers, S slots, K key and value heads, C positions, D head dimension, N tokens.

Invariants:

* Keys and values of slot ``s`` at position ``p`` are whatever was written there last; readers mask what they must
  not see, so nothing is cleared but what is no number: a reader multiplies what it masks with 0.
* C is a multiple of :data:`BLOCK`, so a reach that is rounded up never leaves the cache.
* Which experts a token went to lies where its keys and values do, and is copied with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.engines.expert_choices import pack_experts

if TYPE_CHECKING:
    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.messages.samples import ExpertChoices

BLOCK: Final = 32
"""Attention reads whole blocks of so many positions, so that its views change once in so many steps."""


def round_up(length: int) -> int:
    """The next multiple of :data:`BLOCK`."""
    return -(-length // BLOCK) * BLOCK


class KeyValueCache:
    """``[L, 2, S·K, C, D]``: the keys of all slots, then their values."""

    def __init__(
        self, config: ModelConfig, num_slots: int, max_context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.is_plain = dtype == torch.float32 and device.type == "cpu"
        """Whether attention over it is made of plain products: SDPA is slower there for few queries."""
        self.num_kv_heads = config.num_kv_heads
        self.capacity = round_up(max_context)
        num_rows = num_slots * config.num_kv_heads
        shape = (config.num_layers, 2, num_rows, self.capacity, config.head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self._flat = tuple(self._data.flatten(1, 3).unbind(0))
        self._by_slot = self._data.view(config.num_layers, 2, num_slots, config.num_kv_heads, *shape[3:])
        first = (torch.arange(2 * num_rows, device=device) * self.capacity).view(2, num_slots, -1)
        self._first = first.transpose(0, 1).flatten(1).contiguous()
        """``[S, 2K]``: where position 0 of each head of a slot lies in ``_flat``."""

        self._experts: torch.Tensor | None = None

    def record_experts(self, config: ModelConfig) -> None:
        """Keep beside them which experts each token went to."""
        assert config.experts is not None, "checked by the settings"
        num_slots = self._by_slot.shape[2]
        unknown = torch.iinfo(torch.int16).max
        shape = (config.num_layers, num_slots, self.capacity, config.experts.num_per_token)
        self._experts = torch.full(shape, unknown, dtype=torch.int16, device=self._data.device)
        self._num_experts = config.experts.num_experts

    @property
    def records_experts(self) -> bool:
        return self._experts is not None

    def write_experts(self, layer: int, addresses: torch.Tensor, chosen: torch.Tensor) -> None:
        """Note ``chosen [N, k]`` of N tokens."""
        assert self._experts is not None, "they are recorded"
        first = addresses.view(-1, 2 * self.num_kv_heads)[:, 0]
        rows = first // (self.num_kv_heads * self.capacity) * self.capacity + first % self.capacity
        self._experts[layer].flatten(0, 1).index_copy_(0, rows, chosen.to(torch.int16))

    def experts_of(self, slot: int, num_inputs: int) -> ExpertChoices:
        """Of the tokens at the first positions of a slot."""
        assert self._experts is not None, "they are recorded"
        chosen = self._experts[:, slot, :num_inputs].transpose(0, 1).cpu().numpy()
        return pack_experts(chosen, num_experts=self._num_experts)

    @property
    def data(self) -> torch.Tensor:
        """All of it."""
        return self._data

    def first_addresses(self, num_running: int) -> torch.Tensor:
        """Where position 0 of the heads of the first slots lies, ``[num_running, 2K]``."""
        return self._first[:num_running]

    def addresses(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the heads of N tokens go: ``slots [N]`` and ``positions [N]`` to ``[N·2K]``."""
        return (self._first.index_select(0, slots) + positions[:, None]).view(-1)

    def write(self, layer: int, addresses: torch.Tensor, heads: torch.Tensor) -> None:
        """Store ``heads [N, 2K, D]`` of N tokens."""
        self._flat[layer].index_copy_(0, addresses, heads.flatten(0, 1))

    def views(self, begin: int, end: int, reach: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, keys and values ``[(end − begin)·K, reach, D]`` of a range of slots, without a copy."""
        window = self._data[:, :, begin * self.num_kv_heads : end * self.num_kv_heads, :reach]
        return [(layer[0], layer[1]) for layer in window.unbind(0)]

    def gathered(self, layer: int, slots: torch.Tensor, reach: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, K, reach, D]`` of these slots, copied."""
        rows = self._by_slot[layer, :, :, :, :reach].index_select(1, slots)
        return rows[0], rows[1]

    def clear(self, slot: int) -> None:
        """Zero all keys and values of a slot."""
        self._by_slot[:, :, slot].zero_()

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot ``target`` the first ``length`` positions of slot ``source``, in all layers."""
        self._by_slot[:, :, target, :, :length].copy_(self._by_slot[:, :, source, :, :length])
        if self._experts is not None:
            self._experts[:, target, :length].copy_(self._experts[:, source, :length])
