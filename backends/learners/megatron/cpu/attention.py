"""Attention in plain torch for packed and context-parallel sequences, where Transformer Engine is not.

Axis letters: ``T`` tokens of this rank, ``S`` tokens of all context-parallel ranks, ``B`` rows, ``H`` heads, ``D``
channels of a head.

Invariants:

* A token sees itself and what stands before it in its own sequence, and nothing else.
* With ``n`` context-parallel ranks each sequence is cut into ``2 n`` pieces, and rank ``r`` has pieces ``r`` and
  ``2 n − 1 − r``: megatron-core's own division, under which every rank has as much to do. Keys and values are gathered.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor


class CoreAttention(MegatronModule):
    """What lies between the projections of one layer."""

    current_max_attn_logits = None
    """Of ``qk_clip``, which needs Transformer Engine."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """The names and their order are megatron-core's; the mask is always causal."""
        super().__init__(config=config)
        group = None if pg_collection is None else getattr(pg_collection, "cp", None)
        self.group = parallel_state.get_context_parallel_group() if group is None else group
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """``[T, H, D]`` packed, or ``[T, B, H, D]``, to ``[T, H · D]`` or ``[T, B, H · D]``."""
        assert attention_bias is None, "no model here has one"
        num_ranks: int = self.group.size()
        if packed_seq_params is None:
            lengths = [query.size(0) * num_ranks]
        else:
            lengths = _lengths(packed_seq_params)
            query, key, value = (part.unsqueeze(1) for part in (query, key, value))
        own = positions(lengths, num_ranks, self.group.rank(), query.device)
        all_ = own
        if num_ranks > 1:
            key = gather_from_sequence_parallel_region(key, group=self.group)
            value = gather_from_sequence_parallel_region(value, group=self.group)
            all_ = torch.cat([positions(lengths, num_ranks, rank, query.device) for rank in range(num_ranks)], dim=1)
        mask = (own[0][:, None] == all_[0]) & (own[1][:, None] >= all_[1])
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        flat = out.permute(2, 0, 1, 3).flatten(start_dim=2)
        return flat if packed_seq_params is None else flat.squeeze(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[object, ...] = (), metadata: object = None
    ) -> dict[str, object]:
        """It has no weights."""
        return {}


def positions(lengths: Sequence[int], num_ranks: int, rank: int, device: torch.device) -> Tensor:
    """The sequence, and the place in it, of each token that a context-parallel rank has, int64 ``[2, T]``.

    Args:
        lengths: of the sequences, multiples of ``2 · num_ranks`` where there are several ranks.
        num_ranks: of the context-parallel group.
        rank: in that group.
        device: of the result.
    """
    columns: list[Tensor] = []
    for number, length in enumerate(lengths):
        place = torch.arange(length, device=device)
        if num_ranks > 1:
            pieces = place.view(2 * num_ranks, -1)
            place = torch.cat([pieces[rank], pieces[2 * num_ranks - 1 - rank]])
        columns.append(torch.stack([torch.full_like(place, number), place]))
    return torch.cat(columns, dim=1)


def _lengths(packed: PackedSeqParams) -> list[int]:
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    return cast("list[int]", (ends[1:] - ends[:-1]).tolist())
