"""How long an engine's decode passes take, by how many requests are in them: it alone can time one, or tell of them.

What a request takes in all says little of that where the engine is always full: the requests that run with it vary
hardly, and other costs with its length. A few passes with few requests, at a run's start and end, in evaluations and
before swaps, tell the two apart.

Invariants:

* Only plain passes count, which admit nothing: one token each of requests that run already.
* The first pass with a number of requests does not count: memory is taken for it, kernels are chosen and captured.
* Seconds are those in which an embedded engine on a CPU had a core, and of the wall clock with every other engine.
* Bands are powers of two: one with 2ᵏ holds the passes with 2ᵏ … 2ᵏ⁺¹ − 1 requests.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.base import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PASSES: Final = "engine/decode"
_KEYS: Final = ("passes", "passes_s", "requests", "context_tokens")
_COUNT: Final = re.compile(rf"{PASSES}/(\d{{1,9}})/passes")


class DecodeBand(NamedTuple):
    """Sums over the passes of one band."""

    least: int
    """Requests, a power of two."""
    passes: float
    seconds: float
    requests: float
    """Of every pass, those that were in it."""
    context_tokens: float
    """Of every pass, those that its requests held together."""


class DecodePasses:
    """Adds them up. For one thread; another may read, and then sees at worst one pass in part."""

    def __init__(self) -> None:
        self._bands: dict[int, list[float]] = {}
        self._seen: set[int] = set()

    def add(self, num_running: int, context_tokens: int, seconds: float) -> None:
        """A plain pass with so many requests, one or more, which held so many tokens."""
        if num_running not in self._seen:
            self._seen.add(num_running)
        else:
            self.add_alike(1, num_running, context_tokens, seconds)

    def add_alike(self, num_passes: int, running: float, context_tokens: float, pass_s: float) -> None:
        """So many plain passes of this mean, with one request or more, none of them the first with its number."""
        band = self._bands.setdefault(1 << (int(running).bit_length() - 1), [0.0, 0.0, 0.0, 0.0])
        for place, value in enumerate((1, pass_s, running, context_tokens)):
            band[place] += num_passes * value

    def metrics(self) -> tuple[Metric, ...]:
        """Four running totals of each band that has any."""
        return tuple(
            Metric(f"{PASSES}/{least}/{what}", value)
            for least, sums in sorted(self._bands.copy().items())
            for what, value in zip(_KEYS, sums, strict=True)
        )


def bands_in(metrics: Mapping[str, float | None]) -> list[DecodeBand]:
    """What :meth:`DecodePasses.metrics` has told; bands that are not whole, or not of passes, are left out."""
    found: list[DecodeBand] = []
    for name in metrics:
        if (match := _COUNT.fullmatch(name)) is None:
            continue
        passes, seconds, requests, context = (metrics.get(f"{PASSES}/{match[1]}/{key}") or 0.0 for key in _KEYS)
        if min(passes, seconds) > 0 and requests >= passes and context >= 0:
            found.append(DecodeBand(int(match[1]), passes, seconds, requests, context))
    return sorted(found)


def added_up(bands: Iterable[DecodeBand]) -> list[DecodeBand]:
    """Those of several engines or runs as one."""
    sums: dict[int, list[float]] = {}
    for band in bands:
        before = sums.setdefault(band.least, [0.0] * 4)
        sums[band.least] = [total + value for total, value in zip(before, band[1:], strict=True)]
    return [DecodeBand(least, *values) for least, values in sorted(sums.items())]
