"""Which row a group gets, and which seed a sample: pure functions of the run's seed, so that a PromptSource that was
replaced goes on exactly where its predecessor stopped.

The shuffle is a permutation computed point by point (a Feistel network over the next even number of bits, walked until
it lands inside the range), so that no list of rows is ever held or shuffled. Source: J. Black and P. Rogaway, "Ciphers
with arbitrary finite domains", CT-RSA 2002.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.messages.evaluation import EvaluatedPlace
    from penstock.messages.rows import RowSource

BLOCKS_AT_A_TIME: Final = 4
"""Blocks that the shuffle of a dataset in blocks mixes with each other: those have to be at hand at the same time."""
_MASK: Final = (1 << 64) - 1
_ROUNDS: Final = 6


def mix(*words: int) -> int:
    """64 well-mixed bits of these numbers (the finaliser of splitmix64, chained)."""
    state = 0
    for word in words:
        state = _mixed_in(state, word)
    return state


def _mixed_in(state: int, word: int) -> int:
    state = (state + 0x9E3779B97F4A7C15 + (word & _MASK)) & _MASK
    state ^= state >> 30
    state = (state * 0xBF58476D1CE4E5B9) & _MASK
    state ^= state >> 27
    state = (state * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def permute(position: int, size: int, key: int) -> int:
    """Where ``position`` goes in the permutation of ``0 … size−1`` that ``key`` names."""
    states = _round_states(key)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = position
    while True:
        left, right = value >> half_bits, value & mask
        for state in states:
            left, right = right, left ^ (_mixed_in(state, right) & mask)
        value = (left << half_bits) | right
        if value < size:
            return value


@lru_cache(maxsize=256)
def _round_states(key: int) -> tuple[int, ...]:
    """What each round of a permutation mixes its half into; of a key that is good for an epoch."""
    return tuple(mix(key, round_number) for round_number in range(_ROUNDS))


def row_of(ordinal: int, *, num_rows: int, seed: int, shuffle: bool) -> tuple[int, int]:
    """Row and epoch of a place in the endless stream of prompts."""
    epoch, position = divmod(ordinal, num_rows)
    return (permute(position, num_rows, mix(seed, epoch)) if shuffle else position), epoch


def row_in_blocks(ordinal: int, *, num_rows: int, block_rows: int, seed: int) -> tuple[int, int]:
    """The same, shuffled, for rows that are read in blocks: the blocks are gone through in a random order, and the rows
    of :data:`BLOCKS_AT_A_TIME` neighbours in that order are mixed, so that few blocks are at hand at a time."""
    epoch, position = divmod(ordinal, num_rows)
    key = mix(seed, epoch)
    window_rows = BLOCKS_AT_A_TIME * block_rows
    start = position - position % window_rows
    inside = permute(position - start, min(window_rows, num_rows - start), mix(key, 1, start))
    num_blocks, rest = divmod(num_rows, block_rows)
    if not rest:
        slot, offset = divmod(start + inside, block_rows)
        return permute(slot, num_blocks, mix(key, 2)) * block_rows + offset, epoch
    # The short block stands at a place of its own among the others.
    short_slot = mix(key, 3) % (num_blocks + 1)
    place = start + inside - short_slot * block_rows
    if 0 <= place < rest:
        return num_blocks * block_rows + place, epoch
    slot, offset = divmod(start + inside - (rest if place >= rest else 0), block_rows)
    return permute(slot, num_blocks, mix(key, 2)) * block_rows + offset, epoch


def mixture_pattern(shares: Sequence[int]) -> list[int]:
    """Which source has each place of a period: after any number of places, each source has had its share of them to
    within one. The place goes to whichever source has to have its next one soonest, of those that may have it already
    (earliest deadline first, which on one machine is optimal)."""
    period = sum(shares)
    counts = [0] * len(shares)
    pattern: list[int] = []
    for place in range(period):
        due = [
            (-(-(count + 1) * period // share), index)
            for index, (count, share) in enumerate(zip(counts, shares, strict=True))
            if count < share and count * period // share <= place
        ]
        index = min(due)[1]
        counts[index] += 1
        pattern.append(index)
    return pattern


class PromptOrder:
    """Rows by their place in the endless stream of prompts, over all sources."""

    def __init__(self, sources: Sequence[RowSource], *, seed: int, shuffle: bool) -> None:
        self._sources = tuple(sources)
        self._seed = seed
        self._shuffle = shuffle
        self._num_rows = sum(source.num_rows for source in sources)
        self._starts = [0, *accumulate(source.num_rows for source in sources)]
        is_mixture = len(sources) > 1 and all(source.share for source in sources)
        self._pattern = mixture_pattern([source.share for source in sources]) if is_mixture else []
        self._places: list[list[int]] = [[] for _ in sources]
        for place, index in enumerate(self._pattern):
            self._places[index].append(place)

    def row_of(self, ordinal: int) -> tuple[int, int]:
        """Row and epoch; of a mixture, the epoch is that of the row's source."""
        if not self._pattern:
            block_rows = max((source.block_rows for source in self._sources), default=0)
            return self._placed(ordinal, self._num_rows, block_rows, self._seed)
        periods, place = divmod(ordinal, len(self._pattern))
        index = self._pattern[place]
        source = self._sources[index]
        number = periods * source.share + bisect_left(self._places[index], place)
        row, epoch = self._placed(number, source.num_rows, source.block_rows, mix(self._seed, 0x50C, index))
        return self._starts[index] + row, epoch

    def counts(self, num_prompts: int) -> tuple[int, ...]:
        """How many of the first prompts are of each source, in a mixture."""
        if not self._pattern:
            return ()
        periods, place = divmod(num_prompts, len(self._pattern))
        return tuple(
            periods * source.share + bisect_left(self._places[index], place)
            for index, source in enumerate(self._sources)
        )

    def num_prompts(self, num_epochs: int) -> int:
        """Prompts until each source has been gone through so often."""
        if not self._pattern:
            return num_epochs * self._num_rows
        ends: list[int] = []
        for source, places in zip(self._sources, self._places, strict=True):
            periods, rest = divmod(num_epochs * source.num_rows - 1, source.share)
            ends.append(periods * len(self._pattern) + places[rest] + 1)
        return max(ends)

    def _placed(self, ordinal: int, num_rows: int, block_rows: int, seed: int) -> tuple[int, int]:
        if self._shuffle and block_rows and num_rows > block_rows:
            return row_in_blocks(ordinal, num_rows=num_rows, block_rows=block_rows, seed=seed)
        return row_of(ordinal, num_rows=num_rows, seed=seed, shuffle=self._shuffle)


def evaluation_seed(seed: int, place: EvaluatedPlace, index: int) -> int:
    """The seed of one sample of an evaluation, 63 bits: the same in every evaluation, so that these differ by the model
    and not by luck."""
    return mix(seed, 0xE7A1, place.dataset, place.row, index) >> 1


def sample_seed(seed: int, group_id: int, index: int) -> int:
    """The seed of one sample, 63 bits."""
    return _mixed_in(_group_state(seed, group_id), index) >> 1


@lru_cache(maxsize=16)
def _group_state(seed: int, group_id: int) -> int:
    """What stands before the index in the seed of a sample; all of a group are asked for in turn."""
    return mix(seed, 0x5A3B1E, group_id)
