"""How long an engine's passes take, by how many requests are in them: it alone can time one, or tell of them.

What a request takes in all says little of that where the engine is always full: the requests that run with it vary
hardly, and other costs with its length. A few passes with few requests, at a run's start and end, in evaluations and
before swaps, tell the two apart.

On a CPU that others want too, a pass waits for a core, and when it gets one back, caches are cold: then it takes up to
twice as much CPU time, and so does the next one. So passes are added up apart by whether they were disturbed: what a
pass costs on a core of its own, those say that were not; by how much all were slower, both together.

Passes that admit requests read their prompts besides, and are added up apart from those: what they take beyond a plain
pass with as many requests is what reading costs. What a request takes says little of that either, as everything that is
done once for it goes with its prompt: to take it, to answer it.

Invariants:

* Plain passes admit nothing: one token each of requests that run already.
* The first pass with a number of requests does not count: memory is taken for it, kernels are chosen and captured.
* Seconds are those in which an embedded engine on a CPU had a core, and of the wall clock with every other engine.
* Bands are powers of two: one with 2ᵏ holds the passes with 2ᵏ … 2ᵏ⁺¹ − 1 requests.
* Undisturbed is a pass that waited for no core, after one that did not either.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.base import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PASSES: Final = "engine/decode"
DISTURBED: Final = "engine/decode_disturbed"
READING: Final = "engine/prefill"
READING_DISTURBED: Final = "engine/prefill_disturbed"
WAITED: Final = 1.1
"""Times its CPU time, from which on a pass has waited for a core."""
_KEYS: Final = ("passes", "passes_s", "requests", "context_tokens", "wall_s", "read_tokens")
_KINDS: Final = "|".join((PASSES, DISTURBED, READING, READING_DISTURBED))
_COUNT: Final = re.compile(rf"({_KINDS})/(\d{{1,9}})/passes")


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
    wall_s: float = 0.0
    """By the clock, more than ``seconds`` where it waited for a core; 0: nobody told."""
    read_tokens: float = 0.0
    """Of contexts that it admitted; none in plain passes."""


class DecodePasses:
    """Adds them up. For one thread; another may read, and then sees at worst one pass in part."""

    def __init__(self) -> None:
        self._bands: dict[tuple[str, int], list[float]] = {}
        self._seen: set[int] = set()
        self._has_waited = True

    def add(
        self, num_running: int, context_tokens: int, seconds: float, wall_s: float, *, read_tokens: int = 0
    ) -> None:
        """A pass. One that admitted requests counts where a plain one with as many has been.

        Args:
            num_running: requests in it, one or more.
            context_tokens: that they held together.
            seconds: that it took; on a CPU those in which it had a core.
            wall_s: that it took by the clock.
            read_tokens: of the contexts that it admitted, those that were in no cache; 0: it is a plain one.
        """
        had_waited, self._has_waited = self._has_waited, wall_s > WAITED * seconds
        is_disturbed, was_seen = had_waited or self._has_waited, num_running in self._seen
        sums = (1, seconds, num_running, context_tokens, wall_s)
        if not read_tokens:
            self._seen.add(num_running)
        if was_seen and read_tokens:
            self._add(READING_DISTURBED if is_disturbed else READING, num_running, (*sums, read_tokens))
        elif was_seen:
            self._add(DISTURBED if is_disturbed else PASSES, num_running, sums)

    def add_alike(self, num_passes: int, running: float, context_tokens: float, pass_s: float) -> None:
        """So many plain passes of this mean by the clock, with one request or more, none of them the first with its
        number. Whether they waited for a core nobody tells."""
        each = (1, pass_s, running, context_tokens, 0.0)
        self._add(PASSES, running, [num_passes * value for value in each])

    def _add(self, kind: str, running: float, sums: Sequence[float]) -> None:
        band = self._bands.setdefault((kind, 1 << (int(running).bit_length() - 1)), [0.0] * len(sums))
        for place, value in enumerate(sums):
            band[place] += value

    def metrics(self) -> tuple[Metric, ...]:
        """Running totals of each band that has any."""
        return tuple(
            Metric(f"{kind}/{least}/{what}", value)
            for (kind, least), sums in sorted(self._bands.copy().items())
            for what, value in zip(_KEYS, sums, strict=False)  # plain ones have read nothing
        )


def bands_in(metrics: Mapping[str, float | None], kind: str = PASSES) -> list[DecodeBand]:
    """What :meth:`DecodePasses.metrics` has told of undisturbed plain passes, or of another kind; bands that are not
    whole are left out."""
    found: list[DecodeBand] = []
    for name in metrics:
        if (match := _COUNT.fullmatch(name)) is None or match[1] != kind:
            continue
        band = DecodeBand(int(match[2]), *(metrics.get(f"{kind}/{match[2]}/{key}") or 0.0 for key in _KEYS))
        if min(band.passes, band.seconds) > 0 and band.requests >= band.passes and band.context_tokens >= 0:
            found.append(band)
    return sorted(found)


def added_up(bands: Iterable[DecodeBand]) -> list[DecodeBand]:
    """Those of several engines or runs as one."""
    sums: dict[int, list[float]] = {}
    for band in bands:
        before = sums.setdefault(band.least, [0.0] * len(_KEYS))
        sums[band.least] = [total + value for total, value in zip(before, band[1:], strict=True)]
    return [DecodeBand(least, *values) for least, values in sorted(sums.items())]
