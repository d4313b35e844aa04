"""Attention for packed micro-batches: no padding outside it, rows of a padded batch inside it.

Every matrix product of the model sees ``N`` tokens laid end to end. Only here are queries, keys and values copied to
``B`` rows of ``P`` positions, one sequence a row, attended causally, and copied back. A context that several
sequences share stands in the row of each; what it gives in attention is the same in all of them, so it is read back
from one. A sequence never sees another, and what stands where a row is padded reaches nothing: it comes after every
token of its row, and its own output is not read.

On CUDA, in 16 bits, the rows are laid end to end instead and flash attention's kernel for sequences of uneven length
attends within each (``torch.nn.attention.varlen``): nothing is padded there either. In float32 that kernel does not
exist, and rows are padded.

Axis letters: ``N`` tokens, ``B`` rows, ``P`` positions of a row, ``H`` heads, ``K`` key-value heads, ``D`` head size.
"""

# torch.from_numpy and transformers' registry are typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from penstock.backends.learners.torch.row_products import attend_row_by_row, filled_up
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backends.learners.batch.packing import PackedTokens
    from penstock.backends.learners.torch.layout import Layout

PACKED_ATTENTION: Final = "penstock_packed"
"""Name under which transformers finds it. It has no entry among transformers' mask functions, so no mask is built."""
OLDEST_GPU: Final = (8, 0)
"""Oldest compute capability that flash attention has kernels for."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Which of the ``N`` tokens stand where in the ``[B, P]`` rows, on the device of the model."""

    num_positions: int
    tokens: Tensor
    """``[B · P]``, int64: the token of each place; some token or other where a row is padded."""
    places: Tensor
    """``[N]``, int64: a place of each token. A shared context stands in several rows, alike in each."""
    ends: Tensor | None = None
    """``[B + 1]``, int32: where each row begins and the last ends, if rows of their own lengths are laid end to end and
    ``tokens`` and ``places`` are of these; None if they are padded to ``num_positions``."""
    lengths: tuple[int, ...] = ()
    """Of each row that is not padded; known where there are ``num_places``."""
    num_places: int | None = None
    """Attend as decoding does, over contexts that are filled up to so many positions; see :mod:`.row_products`."""

    @classmethod
    def of(
        cls,
        packed: PackedTokens,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        num_places: int | None = None,
    ) -> PackedRows:
        """The rows of a micro-batch, padded or not as attention of this dtype takes them there."""
        if has_uneven_kernel(device, dtype):
            return cls.end_to_end(packed, device)
        return cls(
            num_positions=packed.rows.shape[1],
            tokens=torch.from_numpy(packed.rows.reshape(-1)).to(device),
            places=torch.from_numpy(packed.places).to(device),
            lengths=tuple(packed.lengths.tolist()),
            num_places=num_places,
        )

    @classmethod
    def end_to_end(cls, packed: PackedTokens, device: torch.device) -> PackedRows:
        """The rows of a micro-batch without padding."""
        num_positions = packed.rows.shape[1]
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(packed.lengths)])
        positions = np.arange(num_positions, dtype=np.int64)
        is_token: NDArray[np.bool_] = np.less(positions[None, :], packed.lengths[:, None])
        row, position = packed.places // num_positions, packed.places % num_positions
        return cls(
            num_positions=num_positions,
            tokens=torch.from_numpy(packed.rows[is_token]).to(device),
            places=torch.from_numpy(ends[row] + position).to(device),
            ends=torch.from_numpy(ends.astype(np.int32)).to(device),
        )

    def padded(self) -> PackedRows:
        """The same rows, padded."""
        if self.ends is None:
            return self
        lengths, count = self.ends.diff(), len(self.tokens)
        row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=count)
        at = torch.arange(count, device=lengths.device) - self.ends[row] + row * self.num_positions
        tokens = self.tokens.new_zeros(len(lengths) * self.num_positions).index_copy(0, at, self.tokens)
        return PackedRows(num_positions=self.num_positions, tokens=tokens, places=at[self.places])

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


class TokenInputs(NamedTuple):
    """What a model is called with for the tokens of a micro-batch."""

    arguments: dict[str, Tensor | PackedRows]
    places: Tensor
    """Where trained tokens are predicted, int64 ``[T]``: among the ``N`` inputs, or the ``B · P`` places of rows."""


def token_inputs(
    packed: PackedTokens, layout: Layout, *, device: torch.device, dtype: torch.dtype, num_places: int | None = None
) -> TokenInputs:
    """The tokens of a micro-batch, as the model's layout (:mod:`.layout`) has them.

    Args:
        packed: the micro-batch; its images are left aside.
        layout: of the model.
        device: of the model.
        dtype: that it computes in.
        num_places: attention fills contexts up to so many positions (packed only); None: it does not.
    """
    tokens = torch.from_numpy(packed.input_ids).to(device, non_blocking=True)
    if layout == "padded":
        places = torch.from_numpy(packed.places[packed.predicted_at]).to(device, non_blocking=True)
        # Without a mask: transformers makes the causal one, with its windows, by itself.
        return TokenInputs({"input_ids": tokens[torch.from_numpy(packed.rows).to(device)]}, places)
    positions = torch.from_numpy(packed.position_ids).to(device, non_blocking=True)
    if num_places is not None:
        tokens, positions = filled_up(tokens), filled_up(positions)
    arguments: dict[str, Tensor | PackedRows] = {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "packed_rows": PackedRows.of(packed, device, dtype, num_places),
    }
    return TokenInputs(arguments, torch.from_numpy(packed.predicted_at).to(device, non_blocking=True))


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
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
        dropout: 0, in evaluation mode.
        sliding_window: a token sees itself and this many less one before it; None: all before it.
        packed_rows: the layout, which the model hands through from its call.
        softcap: scores ``s`` are bent to ``softcap · tanh(s / softcap)``; None: they are not.
        s_aux: ``[H]``, the score of a sink, which takes its share of attention and gives nothing; None: there is none.
        unused: what other attention functions take.

    Returns:
        ``[1, N, H, D]``, and no attention weights.

    Raises:
        UserFault: the model asks for a kind of attention that this function does not compute.
    """
    if packed_rows is None or attention_mask is not None or dropout:
        raise UserFault(
            f"{type(module).__name__} calls attention in a way that packed training does not support "
            f"(layout {'missing' if packed_rows is None else 'there'}, mask "
            f"{'none' if attention_mask is None else 'given'}, dropout {dropout}); use a decoder such as Qwen3 or Llama"
        )
    if softcap is not None or s_aux is not None:
        return _scored_attention(query, key, value, packed_rows.padded(), scaling, sliding_window, softcap, s_aux), None
    if packed_rows.ends is not None:
        return _uneven_attention(query, key, value, packed_rows, scaling, sliding_window), None
    if packed_rows.num_places is not None:
        return _attention_of_decoding(query, key, value, packed_rows, packed_rows.num_places, scaling), None
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


def _scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As :func:`packed_attention`, with the scores ``[B, H, P, P]`` in memory, where something is done to them that no
    kernel does: ``[1, H, N, D]`` → ``[1, N, H, D]``."""
    repeats = query.shape[1] // key.shape[1]
    queries, keys, values = rows.spread(query), *(_repeat_heads(rows.spread(s), repeats) for s in (key, value))
    scores = queries @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    window = rows.num_positions if sliding_window is None else sliding_window
    scores = scores.masked_fill(~_seen(rows.num_positions, window, query.device), float("-inf"))
    if sinks is not None:
        beside = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, beside], dim=-1)
    shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return rows.gather(shares[..., : rows.num_positions] @ values)


def has_uneven_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch attends to sequences of uneven length there without padding."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(device) >= OLDEST_GPU
    )


def _uneven_attention(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """As :func:`packed_attention`, without padding: ``[1, H, N, D]`` → ``[1, N, H, D]``."""
    assert rows.ends is not None, "end_to_end"
    laid = [states[0].transpose(0, 1).index_select(0, rows.tokens) for states in (query, key, value)]
    queries, keys, values = laid
    before = -1 if sliding_window is None else sliding_window - 1
    attended = varlen_attn(
        queries,
        keys,
        values,
        cu_seq_q=rows.ends,
        cu_seq_k=rows.ends,
        max_q=rows.num_positions,
        max_k=rows.num_positions,
        scale=scaling,
        window_size=(before, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast("Tensor", attended).index_select(0, rows.places)[None]


def _attention_of_decoding(
    query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, num_places: int, scaling: float | None
) -> Tensor:
    """As :func:`packed_attention`, by the products of :func:`.attend_row_by_row`: ``[1, H, N, D]`` →
    ``[1, N, H, D]``."""
    size = query.shape[-1]
    scale = size**-0.5 if scaling is None else scaling
    attended: list[Tensor] = []
    for tokens, length in zip(rows.tokens.view(-1, rows.num_positions), rows.lengths, strict=True):
        own = tokens[:length]
        queries = query[0].transpose(0, 1).index_select(0, own).view(length, key.shape[1], -1, size)
        keys, values = (states[0].index_select(1, own) for states in (key, value))
        found = attend_row_by_row(queries, keys, values, num_places=max(num_places, length), scale=scale)
        attended.append(functional.pad(found.flatten(1), (0, 0, 0, rows.num_positions - length)))
    found = torch.cat(attended).index_select(0, rows.places)
    return functional.pad(found, (0, 0, 0, query.shape[2] - len(found))).view(1, -1, query.shape[1], size)


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
    return _seen(num_positions, sliding_window, device)


def _seen(num_positions: int, window: int, device: torch.device) -> Tensor:
    """True ``[P, P]`` where a query may see a key."""
    place = torch.arange(num_positions, device=device)
    age = place[:, None] - place[None, :]
    return (age >= 0) & (age < window)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
