"""Fits how quickly engines generate: what each request's time divides into.

A request that made ``N`` tokens while ``r`` requests ran, which held ``C`` tokens, took

    prefill_s + N · (token_s + (r − 1) · token_load_s + C · context_token_s) + R · prefill_token_s

seconds, without the swaps of weights in between; ``R`` are the prompt tokens that its engine read meanwhile, for
whomever. ``r`` and ``C`` are means over its time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.runtime.prediction.fitting import Course, fit_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.runtime.prediction.fitting import Line
    from penstock.runtime.prediction.recorded import Generation, Recording

    Floats = NDArray[np.float64]

ALL_TRACED: Final = 0.999
NAMES: Final = ("token_s", "token_load_s", "prefill_s", "prefill_token_s", "context_token_s")


class DecodeFit(NamedTuple):
    """What came of it."""

    line: Line
    most_running: int
    """Requests that one engine ran side by side."""
    most_context: int
    """Tokens that they held together."""


class _Seen(NamedTuple):
    """Whole generations of one engine, and what went on beside them; float64 ``[N]`` each."""

    seconds: Floats
    tokens: Floats
    running: Floats
    context: Floats
    read: Floats
    is_even: NDArray[np.bool_]
    most_running: float
    most_context: float


def fit_decode(recordings: Sequence[Recording]) -> DecodeFit | None:
    """Over all engines of all runs; None where no generation is whole."""
    found = [each for recording in recordings for each in _of_run(recording)]
    if not found:
        return None
    seconds, tokens, running, context, read = (
        np.concatenate([np.asarray(each[column], dtype=np.float64) for each in found]) for column in range(5)
    )
    columns = (tokens, tokens * (running - 1), np.ones_like(tokens), read, tokens * context)
    line = fit_line(seconds, dict(zip(NAMES, columns, strict=True)), np.concatenate([each.is_even for each in found]))
    return DecodeFit(
        line, round(max(each.most_running for each in found)), round(max(each.most_context for each in found))
    )


def _of_run(recording: Recording) -> list[_Seen]:
    by_engine: defaultdict[str, list[Generation]] = defaultdict(list)
    for generation in recording.generations:
        by_engine[generation.engine].append(generation)
    seen = [_of_engine(recording, engine, generations) for engine, generations in sorted(by_engine.items())]
    return [each for each in seen if each is not None]


def _of_engine(recording: Recording, engine: str, generations: Sequence[Generation]) -> _Seen | None:
    whole = [each for each in generations if each.is_whole and each.outcome in ("completed", "truncated")]
    if not whole:
        return None
    starts, ends, made, prompts, read = _columns(generations)
    share = recording.trace_fraction
    context = Course(
        np.concatenate((ends, starts)),  # at one moment, who ends goes first
        np.concatenate((-(prompts + made), prompts)) / share,
        np.concatenate((-made / (ends - starts), made / (ends - starts))) / share,
    )
    running = _running(recording, engine, starts, ends)
    own_starts, own_ends, own_made, _, _ = _columns(whole)
    order = np.argsort(starts)
    read_until = np.concatenate(([0.0], np.cumsum(read[order]))) / share
    first, last = (np.searchsorted(starts[order], at, side="left") for at in (own_starts, own_ends))
    swaps = [work for work in recording.work.get("apply_weights", ()) if work.who == engine]
    paused = sum((_overlap(own_starts, own_ends, work.start_s, work.end_s) for work in swaps), np.zeros(len(whole)))
    return _Seen(
        seconds=np.maximum(own_ends - own_starts - paused, 0.0),
        tokens=own_made,
        running=np.maximum(running.means(own_starts, own_ends), 1.0),
        context=context.means(own_starts, own_ends),
        read=read_until[last] - read_until[first],
        is_even=np.array([each.sample is not None and (each.sample.version or 1) % 2 == 0 for each in whole]),
        most_running=running.highest,
        most_context=context.highest,
    )


def _columns(generations: Sequence[Generation]) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Start, end, tokens made, prompt tokens, prompt tokens read: float64 ``[N]`` each."""
    rows = [
        (
            each.start_s,
            max(each.end_s, each.start_s + 1e-6),
            each.num_tokens,
            0 if each.sample is None else each.sample.num_read or 0,
            0 if each.sample is None else (each.sample.num_read or 0) - (each.sample.num_cached or 0),
        )
        for each in generations
    ]
    table = np.array(rows, dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4]


def _running(recording: Recording, engine: str, starts: Floats, ends: Floats) -> Course:
    """Requests that ran: of spans where all were traced, else of the lane's occupancy."""
    if recording.trace_fraction >= ALL_TRACED:
        return Course(np.concatenate((ends, starts)), np.concatenate((-np.ones_like(ends), np.ones_like(starts))))
    offset_s, slots = recording.offset_s, recording.scenario.engines.slots
    times: list[float] = []
    jumps: list[float] = []
    for row in recording.activity.get(engine, ()):
        if row.activity.value == "working":
            times += (row.start_s + offset_s, row.end_s + offset_s)
            jumps += (row.occupancy * slots, -row.occupancy * slots)
    return Course(np.array(times or [0.0]), np.array(jumps or [0.0]))


def _overlap(starts: Floats, ends: Floats, start_s: float, end_s: float) -> Floats:
    overlap: Floats = np.maximum(np.minimum(ends, end_s) - np.maximum(starts, start_s), 0.0)
    return overlap
