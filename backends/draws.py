"""Random numbers as pure functions of integers: no state, so no draw depends on the order of events.

The mixing step is that of splitmix64.
"""

from __future__ import annotations

import math
from typing import Final

_MASK: Final = (1 << 64) - 1


def mixed(*keys: int) -> int:
    """64 well-mixed bits of these integers; their order matters."""
    state = 0x9E3779B97F4A7C15
    for key in keys:
        state = (state ^ (key & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 30
        state = state * 0x94D049BB133111EB & _MASK
        state ^= state >> 27
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)


def uniform(*keys: int) -> float:
    """In ``[0, 1)``."""
    return (mixed(*keys) >> 11) * 2.0**-53


def normal(*keys: int) -> float:
    """Of mean 0 and standard deviation 1."""
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(*keys, 0)))
    return radius * math.cos(2.0 * math.pi * uniform(*keys, 1))
