"""Fits what a decode pass costs to what engines have timed: passes by how many requests were in them, and by what all
passes were slower than that where others wanted the cores too.

A pass with ``r`` requests that hold ``C`` tokens takes

    token_s + (r − 1) · token_load_s + C · context_token_s

seconds. A band's mean pass is that of its mean ``r`` and ``C``, so each band is one measurement. How long a pass
really takes is no straight line in ``r``, so no band's mean is believed to more than :data:`BENT`, however many passes
it has: one with few requests then counts beside one with many, and the line is as far off at every load.

Passes of embedded engines on a CPU are timed by the cores that they had, all others by the wall clock. Either goes with
the responses of the same runs: waits for cores are taken out of these (:mod:`penstock.runtime.prediction.cores_fit`)
only where all engines are embedded ones on a CPU.

Passes that admit requests take longer. What they take beyond this, all of them together, goes with the tokens that they
have read: how many requests are admitted at a time is much alike under every policy, as few slots are free at a time.

Invariants:

* Every coefficient is at least 0, and ``token_s`` is above it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.backends.engines.decode_passes import added_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.backends.engines.decode_passes import DecodeBand

    Floats = NDArray[np.float64]

NAMES: Final = ("token_s", "token_load_s", "context_token_s")
SPREAD: Final = 0.5
"""Standard deviation of a pass's time within its band, as a share of its mean: what is taken to be so."""
BENT: Final = 0.05
"""Of a band's mean, how far a straight line is taken to be off it besides."""
CERTAIN: Final = 2.0
"""Standard errors that the cost of held tokens has to be above 0 to be told apart from that of a request."""
FEWEST_PASSES: Final = 20
"""Of a band, fewer tell nothing."""


class PassesFit(NamedTuple):
    """What came of it."""

    values: dict[str, float]
    """``token_s``, ``token_load_s``, ``context_token_s``."""
    dropped: dict[str, str]
    """Why a coefficient is 0."""
    num_passes: int
    fewest: float
    """Requests in the passes of the lowest band, in the mean."""
    most: float
    """Likewise of the highest."""
    error: float
    """Mean of the bands' |fitted − measured| ÷ measured."""

    def mean_s(self, running: Floats, context: Floats) -> Floats:
        """Of passes with so many requests and tokens, float64 ``[N]`` each."""
        token_s, load_s, context_s = self.values.values()
        mean: Floats = token_s + (running - 1) * load_s + context * context_s
        return mean

    def sum_s(self, bands: Iterable[DecodeBand]) -> float:
        """Of plain passes with as many requests and tokens as these have."""
        token_s, load_s, context_s = self.values.values()
        return sum(
            band.passes * token_s + (band.requests - band.passes) * load_s + band.context_tokens * context_s
            for band in bands
        )


class Slowed(NamedTuple):
    """By what the passes of engines were slower than on cores of their own."""

    waits: float
    """Time by the clock ÷ time with a core, 1 or more."""
    cold: float
    """Time with a core ÷ that of undisturbed passes with as many requests, 1 or more."""


def slowed(undisturbed: Sequence[DecodeBand], disturbed: Sequence[DecodeBand]) -> Slowed | None:
    """Over the bands of all engines; None where nobody told the time by the clock."""
    both = added_up([*undisturbed, *disturbed])
    if not both or not all(band.wall_s for band in (*undisturbed, *disturbed)):
        return None
    seconds = sum(band.seconds for band in both)
    alone = {band.least: band.seconds / band.passes for band in _enough(undisturbed)}
    told = [band for band in both if band.least in alone] if len(alone) > 1 else []
    alone_s = sum(band.passes * alone[band.least] for band in told)
    return Slowed(
        waits=max(1.0, sum(band.wall_s for band in both) / seconds),
        cold=max(1.0, sum(band.seconds for band in told) / alone_s) if told else 1.0,
    )


def fit_passes(undisturbed: Sequence[DecodeBand], disturbed: Sequence[DecodeBand] = ()) -> PassesFit | None:
    """Over the bands of all engines: of undisturbed passes, and of all where those fill fewer than two. None where
    there are not two even so, as one load tells nothing of another."""
    bands = _enough(undisturbed)
    if len(bands) < 2:
        bands = _enough([*undisturbed, *disturbed])
    if len(bands) < 2:
        return None
    passes, seconds, requests, context, *_ = np.array([band[1:] for band in bands], dtype=np.float64).T
    mean_s, running, held = seconds / passes, requests / passes, context / passes
    weights = 1 / (mean_s * np.sqrt(SPREAD**2 / passes + BENT**2))
    columns = np.stack((np.ones_like(passes), running - 1, held), axis=1)
    values, dropped = _solved(mean_s * weights, columns * weights[:, None])
    off = np.abs(columns @ values - mean_s) / mean_s
    return PassesFit(
        values=dict(zip(NAMES, values.tolist(), strict=True)),
        dropped=dropped,
        num_passes=round(float(passes.sum())),
        fewest=float(running.min()),
        most=float(running.max()),
        error=float(off.mean()),
    )


def fit_reading(
    plain: PassesFit,
    disturbed: Sequence[DecodeBand],
    reading: Sequence[DecodeBand],
    reading_disturbed: Sequence[DecodeBand],
) -> float | None:
    """``prefill_token_s``, of all engines: what passes that read took beyond plain ones, by the tokens that they read.
    Disturbed ones count as if they had been slower than others by what disturbed plain ones were: which passes nothing
    disturbs is no matter of chance, and those that admit a whole batch are seldom among the others. None where too few
    were timed."""
    both = [*reading, *reading_disturbed]
    if sum(band.passes for band in both) < FEWEST_PASSES:
        return None
    cold = max(1.0, sum(band.seconds for band in disturbed) / plain.sum_s(disturbed)) if disturbed else 1.0
    alone_s = sum(band.seconds for band in reading) + sum(band.seconds for band in reading_disturbed) / cold
    return max(0.0, alone_s - plain.sum_s(both)) / max(1.0, sum(band.read_tokens for band in both))


def _enough(bands: Sequence[DecodeBand]) -> list[DecodeBand]:
    return [band for band in added_up(bands) if band.passes >= FEWEST_PASSES]


def _solved(y: Floats, columns: Floats) -> tuple[Floats, dict[str, str]]:
    """Float64 ``[3]``: with the tokens that are held, if that can be told; else without; else the mean. The rows have
    a standard deviation of 1."""
    apart = "its effect is not told apart from that of a request that runs"
    tried: tuple[tuple[list[int], dict[str, str]], ...] = (
        ([0, 1, 2], {}),
        ([0, 1], {"context_token_s": apart}),
        ([0, 2], {"token_load_s": "its effect is not told apart from that of the tokens that it holds"}),
    )
    for chosen, dropped in tried:
        matrix = columns[:, chosen]
        if len(y) < len(chosen) or np.linalg.matrix_rank(matrix) < len(chosen):
            continue
        solution = np.linalg.lstsq(matrix, y, rcond=None)[0]
        spread = math.sqrt(float(np.linalg.inv(matrix.T @ matrix)[-1, -1]))
        if solution[0] > 0 and solution.min() >= 0 and (len(chosen) < 3 or solution[-1] >= CERTAIN * spread):
            values = np.zeros(3)
            values[chosen] = solution
            return values, dropped
    mean = float(columns[:, 0] @ y) / float(columns[:, 0] @ columns[:, 0])
    why = "passes with more requests did not take longer"
    return np.array([mean, 0.0, 0.0]), {"token_load_s": why, "context_token_s": why}
