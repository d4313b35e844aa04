"""Which row a group gets, and which seed a sample: pure functions of the run's seed, so that a PromptSource that was
replaced goes on exactly where its predecessor stopped.

The shuffle is a permutation computed point by point (a Feistel network over the next even number of bits, walked until
it lands inside the range), so that no list of rows is ever held or shuffled. Source: J. Black and P. Rogaway, "Ciphers
with arbitrary finite domains", CT-RSA 2002.
"""

from __future__ import annotations

from typing import Final

_MASK: Final = (1 << 64) - 1
_ROUNDS: Final = 6


def mix(*words: int) -> int:
    """64 well-mixed bits of these numbers (the finaliser of splitmix64, chained)."""
    state = 0
    for word in words:
        state = (state + 0x9E3779B97F4A7C15 + (word & _MASK)) & _MASK
        state ^= state >> 30
        state = (state * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 27
        state = (state * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permute(position: int, size: int, key: int) -> int:
    """Where ``position`` goes in the permutation of ``0 … size−1`` that ``key`` names."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = position
    while True:
        left, right = value >> half_bits, value & mask
        for round_number in range(_ROUNDS):
            left, right = right, left ^ (mix(key, round_number, right) & mask)
        value = (left << half_bits) | right
        if value < size:
            return value


def row_of(ordinal: int, *, num_rows: int, seed: int, shuffle: bool) -> tuple[int, int]:
    """Row and epoch of a place in the endless stream of prompts."""
    epoch, position = divmod(ordinal, num_rows)
    return (permute(position, num_rows, mix(seed, epoch)) if shuffle else position), epoch


def sample_seed(seed: int, group_id: int, index: int) -> int:
    """The seed of one sample, 63 bits."""
    return mix(seed, 0x5A3B1E, group_id, index) >> 1
