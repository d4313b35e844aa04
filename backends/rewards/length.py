"""The reward ``length_penalty``: long answers cost something before the limit cuts them off.

With ``L`` the limit, ``C`` the cache, ``p`` the penalty and ``n`` the tokens that the model has written:

    0                      for n <= L - C
    -p (n - (L - C)) / C   for L - C < n <= L
    -p                     for n > L

that is, the soft overlong punishment of DAPO (Yu et al., arXiv 2503.14476, equation 13) with ``p`` = 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backends.rewards.options import LengthPenaltyOptions


def length_penalty(num_tokens: int, options: LengthPenaltyOptions) -> float:
    """The penalty of a response of so many tokens, from ``-options.penalty`` to 0."""
    assert options.max_tokens is not None
    assert options.cache_tokens is not None
    cache = min(options.cache_tokens, options.max_tokens)
    over = num_tokens - (options.max_tokens - cache)
    if over <= 0:
        return 0.0
    return -options.penalty * (min(1.0, over / cache) if cache else 1.0)
