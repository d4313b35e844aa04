"""Fits how quickly engines generate: what each request's time divides into.

A request that made ``N`` tokens while ``r`` requests ran, which held ``C`` tokens, took

    prefill_s + N · (token_s + (r − 1) · token_load_s + C · context_token_s) + R · prefill_token_s

seconds, without the swaps of weights in between; ``R`` are the prompt tokens that its engine read meanwhile, for
whomever. ``r`` and ``C`` are means over its passes: in a stretch in which nobody comes or goes the more of them are
made the quicker one is, so a mean over time would count full stretches too much. How quick, the fit itself says, so it
is made :data:`ROUNDS` times.

Where engines have timed their passes (:mod:`penstock.runtime.prediction.passes_fit`), those say how the bracket
divides and what reading costs, and the requests only how much of both there is: what goes by between passes makes all
of it longer alike. Else the requests say everything: an engine that is always full tells little of a request alone, and
what is done once for each of them is taken for the reading of its prompt.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.runtime.prediction.fitting import Course, fit_line
from penstock.runtime.prediction.passes_fit import fit_passes, fit_reading

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.runtime.prediction.fitting import Line
    from penstock.runtime.prediction.passes_fit import PassesFit
    from penstock.runtime.prediction.recorded import Generation, Recording

    Floats = NDArray[np.float64]
    Marks = NDArray[np.bool_]

ALL_TRACED: Final = 0.999
DECODE: Final = "decode"
ROUNDS: Final = 4


class DecodeFit(NamedTuple):
    """What came of it."""

    line: Line
    passes: PassesFit | None
    """None: of runs whose engines did not time them, or at one load only."""
    ratio: float
    """Of the time of requests, beside what they read and begin with, to that of their passes; 1 without any."""
    fewest_running: float
    """Requests that ran beside each other where fewest did: in passes, else as the mean over a request's time."""
    most_running: int
    """Requests that one engine ran side by side."""
    most_context: int
    """Tokens that they held together."""


class _Seen(NamedTuple):
    """Whole generations of one engine, and what went on beside them; float64 ``[N]`` each."""

    seconds: Floats
    tokens: Floats
    read: Floats
    starts: Floats
    ends: Floats
    stretches: _Stretches
    is_even: NDArray[np.bool_]
    most_running: float
    most_context: float


class _Stretches(NamedTuple):
    """Of one engine, from each moment at which a request begins or ends to the next: float64 ``[M]``."""

    edges: Floats
    """``[M + 1]``."""
    running: Floats
    context: Floats

    def means(self, starts: Floats, ends: Floats, values: Mapping[str, float]) -> tuple[Floats, Floats]:
        """Requests that ran, and tokens that they held, as means over the passes from each start to its end, if what
        a pass takes is made up of ``values``; float64 ``[N]`` each."""
        load_s, context_s = values.get("token_load_s", 0.0), values.get("context_token_s", 0.0)
        pass_s = values["token_s"] + np.maximum(self.running - 1, 0.0) * load_s + self.context * context_s
        passes = np.diff(self.edges) / np.maximum(pass_s, 1e-12)
        first, last = (np.searchsorted(self.edges, at) for at in (starts, ends))
        counted, running, context = (
            np.concatenate(([0.0], np.cumsum(passes * each))) for each in (1.0, self.running, self.context)
        )
        made = np.maximum(counted[last] - counted[first], 1e-9)
        return (
            np.maximum((running[last] - running[first]) / made, 1.0),
            (context[last] - context[first]) / made,
        )


def fit_decode(recordings: Sequence[Recording]) -> DecodeFit | None:
    """Over all engines of all runs; None where no generation is whole."""
    found = [each for recording in recordings for each in _of_run(recording)]
    if not found:
        return None
    seconds, tokens, read = (np.concatenate([each[column] for each in found]) for column in range(3))
    is_even = np.concatenate([each.is_even for each in found])
    others = {"prefill_s": np.ones_like(tokens), "prefill_token_s": read}
    disturbed = [band for recording in recordings for band in recording.disturbed]
    passes = fit_passes([band for recording in recordings for band in recording.bands], disturbed)
    most_running = round(max(each.most_running for each in found))
    most_context = round(max(each.most_context for each in found))
    if passes is None:
        running, context = _means(found, {"token_s": 1.0})
        line = _of_responses(seconds, tokens, running, context, others, is_even)
        for _ in range(ROUNDS - 1):
            running, context = _means(found, line.values)
            line = _of_responses(seconds, tokens, running, context, others, is_even)
        return DecodeFit(line, None, 1.0, float(running.min()), most_running, most_context)
    running, context = _means(found, passes.values)
    decode_s = tokens * passes.mean_s(running, context)
    read_token_s = fit_reading(
        passes,
        disturbed,
        [band for recording in recordings for band in recording.reading],
        [band for recording in recordings for band in recording.reading_disturbed],
    )
    if read_token_s is not None:
        decode_s += others.pop("prefill_token_s") * read_token_s
    line = fit_line(seconds, {DECODE: decode_s, **others}, is_even)
    told = passes.values if read_token_s is None else {**passes.values, "prefill_token_s": read_token_s}
    return DecodeFit(
        _divided(line, told, passes.dropped), passes, line.values[DECODE], passes.fewest, most_running, most_context
    )


def _of_responses(
    seconds: Floats, tokens: Floats, running: Floats, context: Floats, others: Mapping[str, Floats], is_even: Marks
) -> Line:
    decode = {"token_s": tokens, "token_load_s": tokens * (running - 1)}
    return fit_line(seconds, {**decode, **others, "context_token_s": tokens * context}, is_even)


def _divided(line: Line, told: Mapping[str, float], dropped: Mapping[str, str]) -> Line:
    """What passes take together, in what it goes into."""
    values = dict(line.values)
    ratio = values.pop(DECODE)
    of_passes = {name: ratio * part for name, part in told.items() if part}
    return line._replace(values={**of_passes, **values}, dropped={**dropped, **line.dropped})


def _means(found: Sequence[_Seen], values: Mapping[str, float]) -> tuple[Floats, Floats]:
    means = [each.stretches.means(each.starts, each.ends, values) for each in found]
    return np.concatenate([running for running, _ in means]), np.concatenate([context for _, context in means])


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
    edges = np.unique(np.concatenate((starts, ends)))
    own_starts, own_ends, own_made, _, _ = _columns(whole)
    order = np.argsort(starts)
    read_until = np.concatenate(([0.0], np.cumsum(read[order]))) / share
    first, last = (np.searchsorted(starts[order], at, side="left") for at in (own_starts, own_ends))
    swaps = [work for work in recording.work.get("apply_weights", ()) if work.who == engine]
    paused = sum((_overlap(own_starts, own_ends, work.start_s, work.end_s) for work in swaps), np.zeros(len(whole)))
    return _Seen(
        seconds=np.maximum(own_ends - own_starts - paused, 0.0),
        tokens=own_made,
        starts=own_starts,
        ends=own_ends,
        stretches=_Stretches(edges, running.means(edges[:-1], edges[1:]), context.means(edges[:-1], edges[1:])),
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
