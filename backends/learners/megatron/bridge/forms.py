"""How the tensors of a checkpoint and one rank's part of a parameter consist of the same blocks.

Loading and gathering both go by :func:`blocks`: the one copies blocks of tensors into a parameter, the other blocks of
parameters into tensors. That the way out is the inverse of the way in needs no further care.

Invariants:

* A block is a run of rows, or of columns, of one tensor, and of one rank's part.
* The blocks of all ranks cover each tensor once (for ``WHOLE``: those of each rank do).
* Rows that a vocabulary is filled up with are in no block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, assert_never

from penstock.backends.learners.megatron.bridge.families import Form

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Block(NamedTuple):
    """Elements ``start`` to ``start + length`` along ``axis`` of a tensor are those from ``place`` on of a rank's part
    of the parameter, along the same axis."""

    tensor: int
    """Which of the parameter's tensors it is of."""
    axis: int
    start: int
    length: int
    place: int


class Division(NamedTuple):
    """What the blocks of a parameter depend on, besides the shapes of its tensors."""

    num_shards: int
    num_kv_heads: int
    """Groups that queries, keys and values are interleaved by."""
    padded_vocab_size: int


def blocks(form: Form, shapes: Sequence[tuple[int, ...]], shard: int, division: Division) -> list[Block]:
    """The blocks of one rank's part of a parameter, in the order of its elements.

    Args:
        form: of the parameter.
        shapes: of its tensors in the checkpoint.
        shard: which part, in the order of the tensor-parallel ranks.
        division: into how many, and how.
    """
    count = division.num_shards
    match form:
        case Form.WHOLE:
            return [Block(0, 0, 0, shapes[0][0], 0)]
        case Form.COLUMNS:
            return _share(0, 1, shapes[0][1], 0, shard, count, 0)
        case Form.ROWS:
            return list(_stacked([(index, 0, shape[0]) for index, shape in enumerate(shapes)], shard, count))
        case Form.FUSED_ROWS:
            half = shapes[0][0] // 2
            return list(_stacked([(0, 0, half), (0, half, half)], shard, count))
        case Form.VOCABULARY:
            return list(_cut([(0, 0, shapes[0][0])], shard, division.padded_vocab_size // count))
        case Form.QKV:
            heads = division.num_kv_heads
            runs = [
                (index, group * (shape[0] // heads), shape[0] // heads)
                for group in range(heads)
                for index, shape in enumerate(shapes)
            ]
            return list(_cut(runs, shard, sum(shape[0] for shape in shapes) // count))
        case _:
            assert_never(form)


def part_shape(form: Form, shapes: Sequence[tuple[int, ...]], division: Division) -> tuple[int, ...]:
    """The shape of one rank's part of a parameter."""
    count, rest = division.num_shards, shapes[0][1:]
    match form:
        case Form.WHOLE:
            return shapes[0]
        case Form.COLUMNS:
            return (shapes[0][0], shapes[0][1] // count)
        case Form.ROWS | Form.FUSED_ROWS | Form.QKV:
            return (sum(shape[0] for shape in shapes) // count, *rest)
        case Form.VOCABULARY:
            return (division.padded_vocab_size // count, *rest)
        case _:
            assert_never(form)


def _stacked(runs: Sequence[tuple[int, int, int]], shard: int, count: int) -> Iterator[Block]:
    """A share of each run (tensor, start, length), one after the other."""
    place = 0
    for tensor, start, length in runs:
        yield from _share(tensor, 0, length, start, shard, count, place)
        place += length // count


def _share(tensor: int, axis: int, length: int, start: int, shard: int, count: int, place: int) -> list[Block]:
    own = length // count
    return [Block(tensor, axis, start + shard * own, own, place)]


def _cut(runs: Sequence[tuple[int, int, int]], shard: int, own: int) -> Iterator[Block]:
    """What lies in a share of all runs laid end to end; it may begin or end within one."""
    first, last, place = shard * own, (shard + 1) * own, 0
    for tensor, start, length in runs:
        low, high = max(place, first), min(place + length, last)
        if low < high:
            yield Block(tensor, 0, start + low - place, high - low, low - first)
        place += length
