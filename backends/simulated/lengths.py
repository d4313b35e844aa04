"""How long a modelled response gets.

Invariants:

* It depends on the seed of its sample, and, where lengths go together within a group, on the run's seed and the group.
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


def num_tokens_of(model: LatencyOptions, max_tokens: int, command: Generate, *, run_seed: int) -> int:
    """Tokens of the response, at least 1 and at most ``max_tokens``."""
    if not model.response_tokens_sigma and not model.response_tokens_quantiles:
        return max(1, min(max_tokens, int(model.response_tokens_median)))  # all alike: nothing to draw
    drawn = normal(command.seed, LENGTH)
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
