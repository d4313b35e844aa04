"""What a server's parameters must hash to, computed from the weights that it was given.

A server fuses tensors and splits them over its ranks, and ``/weights_checker`` hashes each of its parameters as it lies
there. Here the same is done to the tensors that were fetched: query, key and value one below the other, gate and up
likewise, the experts of a layer stacked, each cut into the share of its tensor-parallel rank.

Invariants:

* A parameter is right, wrong, or unknown here. Unknown ones are counted and never taken for right.
* Only CPU servers hash in a way that is computed here (the first 8 bytes of SHA-256). A server on GPUs hashes with a
  kernel of its own; its parameters are all unknown, and engines that are laid out alike are compared with each other.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.weights.tensor_file import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.backends.engines.served.sglang.server_facts import RankChecksums

HASH_BYTES: Final = 8
VOCAB_PADDING: Final = 64
"""Rows of embedding and head are filled up with zeros to a multiple of this."""

_FUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_KEY_VALUE: Final = ("k_proj", "v_proj")
_EXPERTS: Final = re.compile(r"(?P<layer>.*\.experts)\.(?P<which>w13|w2)_weight")
_EXPERT_PARTS: Final[Mapping[str, tuple[str, ...]]] = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}
_VOCABULARY: Final = ("embed_tokens.weight", "lm_head.weight")
_SPLIT_BY_COLUMNS: Final = ("o_proj.weight", "down_proj.weight")


class _Shard(NamedTuple):
    """Which part of a parameter a rank holds."""

    tp_rank: int
    tp_size: int


class Comparison(NamedTuple):
    """The outcome for a whole server."""

    num_right: int
    wrong: tuple[str, ...]
    """``name (rank 1)``."""
    unknown: tuple[str, ...]


def compare_checksums(
    tensors: Mapping[str, torch.Tensor], ranks: Sequence[RankChecksums], *, tp_size: int, num_kv_heads: int
) -> Comparison:
    """Compare what a CPU server has with the tensors that it was given, which must have its dtype already.

    Args:
        tensors: Hugging Face name → tensor ``[...]``.
        ranks: of the whole server.
        tp_size: of the server.
        num_kv_heads: of the model.
    """
    num_right, wrong, unknown = 0, list[str](), set[str]()
    for rank in ranks:
        shard = _Shard(rank.tp_rank, tp_size)
        for name, found in rank.checksums.items():
            expected = {hash_of(tensor) for tensor in _candidates(name, tensors, shard, num_kv_heads)}
            if not expected:
                unknown.add(name)
            elif found in expected:
                num_right += 1
            else:
                wrong.append(f"{name} (rank {rank.tp_rank})")
    return Comparison(num_right, tuple(wrong), tuple(sorted(unknown)))


def hash_of(tensor: torch.Tensor) -> str:
    """As a CPU server hashes a parameter."""
    return hashlib.sha256(tensor_bytes(tensor)).digest()[:HASH_BYTES].hex()


def _candidates(
    name: str, tensors: Mapping[str, torch.Tensor], shard: _Shard, num_kv_heads: int
) -> Iterator[torch.Tensor]:
    """What this parameter may hold if it was loaded right; nothing when it is not known how it is made."""
    if (experts := _EXPERTS.fullmatch(name)) is not None:
        parts = _EXPERT_PARTS[experts["which"]]
        if (stacked := _stacked(experts["layer"], parts, tensors, shard)) is not None:
            yield stacked
        return
    stem, _, kind = name.rpartition(".")
    parent, _, leaf = stem.rpartition(".")
    if leaf in _FUSED:
        names = [f"{parent}.{part}.{kind}" for part in _FUSED[leaf]]
        if all(part in tensors for part in names):
            heads = [num_kv_heads if part in _KEY_VALUE else shard.tp_size for part in _FUSED[leaf]]
            yield torch.cat([_rows(tensors[part], shard, num) for part, num in zip(names, heads, strict=True)])
        return
    if (tensor := tensors.get(name)) is None:
        return
    if name.endswith(_VOCABULARY):
        yield from _vocabulary(tensor, shard)
    elif name.endswith(_SPLIT_BY_COLUMNS):
        yield tensor.chunk(shard.tp_size, dim=1)[shard.tp_rank]
    else:
        yield tensor


def _rows(tensor: torch.Tensor, shard: _Shard, num_heads: int) -> torch.Tensor:
    """The rank's share of the rows. Heads that are fewer than the ranks are held by several of them."""
    if num_heads >= shard.tp_size:
        return tensor.chunk(shard.tp_size)[shard.tp_rank]
    return tensor.chunk(num_heads)[shard.tp_rank * num_heads // shard.tp_size]


def _stacked(
    layer: str, parts: Sequence[str], tensors: Mapping[str, torch.Tensor], shard: _Shard
) -> torch.Tensor | None:
    experts: list[torch.Tensor] = []
    while all(f"{layer}.{len(experts)}.{part}.weight" in tensors for part in parts):
        own = [tensors[f"{layer}.{len(experts)}.{part}.weight"] for part in parts]
        if len(parts) > 1:
            experts.append(torch.cat([_rows(tensor, shard, shard.tp_size) for tensor in own]))
        else:
            experts.append(own[0].chunk(shard.tp_size, dim=1)[shard.tp_rank])
    return torch.stack(experts) if experts else None


def _vocabulary(tensor: torch.Tensor, shard: _Shard) -> Iterator[torch.Tensor]:
    yield tensor.chunk(shard.tp_size)[shard.tp_rank]
    missing = -len(tensor) % VOCAB_PADDING
    if missing:
        padded = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        yield padded.chunk(shard.tp_size)[shard.tp_rank]
