"""How long a modelled response gets.

Invariants:

* It depends on the seed of its sample, and, where lengths go together within a group, on the run's seed and the group.
* A response that is longer already than what was drawn for it, as one that a real engine has begun may be, gets the
  next draw that is longer: so its length is that of a response of which this much is known.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

from penstock.backends.draws import normal
from penstock.backends.simulated.engine_request import GROUP_LENGTH, LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.options import LatencyOptions
    from penstock.messages.commands import Generate

_NORMAL: Final = NormalDist()
MAX_DRAWS: Final = 256


def num_tokens_of(model: LatencyOptions, max_tokens: int, command: Generate, *, run_seed: int) -> int:
    """Tokens of the response, at least 1 and at most ``max_tokens``; not less than there are already."""
    num_made = 0 if command.prefix is None else command.prefix.num_tokens
    if not model.response_tokens_sigma and not model.response_tokens_quantiles:  # all alike: nothing to draw
        return max(num_made, 1, min(max_tokens, int(model.response_tokens_median)))
    length = _drawn(model, max_tokens, command, normal(command.seed, LENGTH), run_seed)
    for again in range(1, MAX_DRAWS):
        if length >= num_made:
            return length
        length = _drawn(model, max_tokens, command, normal(command.seed, LENGTH, again), run_seed)
    return num_made  # longer than whatever the model gives


def _drawn(model: LatencyOptions, max_tokens: int, command: Generate, drawn: float, run_seed: int) -> int:
    together = model.response_tokens_correlation
    if together:
        group = normal(run_seed, command.key.group_id, GROUP_LENGTH)
        drawn = math.sqrt(together) * group + math.sqrt(1 - together) * drawn
    if model.response_tokens_quantiles:
        length = quantile(model.response_tokens_quantiles, _NORMAL.cdf(drawn)) + 0.5
    else:
        length = model.response_tokens_median * math.exp(model.response_tokens_sigma * drawn)
    return max(1, min(max_tokens, int(length)))


def quantile(quantiles: Sequence[float], share: float) -> float:
    """Between the evenly spaced ``quantiles``, the first of share 0 and the last of share 1, on straight lines."""
    place = share * (len(quantiles) - 1)
    below = min(int(place), len(quantiles) - 2)
    return quantiles[below] + (place - below) * (quantiles[below + 1] - quantiles[below])
