"""Fits episodes of several turns: how many there are, what they wait for between them, and what is read again.

A turn is timed and measured like a response (:mod:`penstock.runtime.prediction.decode_fit`). What is between two turns
is time of a tool, with that of the function that asks it: from the end of one turn to the begin of the next.

Invariants:

* Only episodes count that were seen from their first turn to their end, without an interruption.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.backends.engines.options import EpisodeModelOptions
from penstock.runtime.prediction.fitting import Error, error_of, fit_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.prediction.recorded import Episode, Recording


class EpisodeFit(NamedTuple):
    """What came of it."""

    model: EpisodeModelOptions
    num_episodes: int
    error: Error
    """Of the waits between turns: of their mean under odd steps, on those under even ones."""


def fit_episodes(recordings: Sequence[Recording]) -> EpisodeFit | None:
    """Over all runs; None where nobody played episodes, or none was seen as a whole."""
    episodes = [each for recording in recordings for each in recording.episodes if each.is_whole]
    if not episodes:
        return None
    counts = Counter(len(each.turns) for each in episodes)
    waits = [(max(wait_s, 1e-6), each) for each in episodes for wait_s in _waits_s(each)]
    seconds = np.array([wait_s for wait_s, _ in waits] or [1e-6])
    unseen = np.array([each.is_even for _, each in waits] or [False])
    sigma = float(np.log(seconds).std())
    mean_s = float(seconds.mean())
    seen = seconds[~unseen]
    fitted = np.full_like(seconds, seen.mean() if len(seen) else mean_s)
    return EpisodeFit(
        EpisodeModelOptions(
            turns=tuple(counts[number] / len(episodes) for number in range(1, max(counts) + 1)),
            tool_s=mean_s * math.exp(-sigma * sigma / 2) if waits else 0.0,  # of a log-normal time of this mean
            tool_sigma=sigma if waits else 0.0,
            end_s=statistics.fmean(max(0.0, each.end_s - each.turns[-1].end_s) for each in episodes),
            reply_tokens=round(statistics.fmean([*itertools.chain(*map(_replies, episodes))] or [0])),
            reread_share=_reread_share(episodes),
        ),
        len(episodes),
        error_of(seconds, fitted, unseen),
    )


def _waits_s(episode: Episode) -> list[float]:
    return [after.start_s - before.end_s for before, after in itertools.pairwise(episode.turns)]


def _replies(episode: Episode) -> list[int]:
    """Tokens that were put before each turn but the first; of another conversation they cannot be told."""
    return [
        max(0, after.num_context - before.num_context - before.num_tokens)
        for before, after in itertools.pairwise(episode.turns)
        if before.conversation == after.conversation
    ]


def _reread_share(episodes: Sequence[Episode]) -> float:
    """Of what stood before the replies of later turns, how much was not in the cache, beside prompts that others of
    their groups may have read; engines that do not say what they had there are taken to read nothing again."""
    rows = [
        (sample.num_read - sample.num_cached - replies, episode.turns[0].num_context, stood)
        for episode in episodes
        if (sample := episode.sample) is not None and sample.num_read is not None and sample.num_cached is not None
        for replies in (sum(_replies(episode)),)
        for stood in (sum(turn.num_context for turn in episode.turns[1:]) - replies,)
    ]
    if not any(stood for _, _, stood in rows):
        return 0.0
    unread, prompts, stood = np.array(rows, dtype=np.float64).T
    line = fit_line(unread, {"stood": stood, "prompts": prompts}, np.zeros(len(rows), dtype=np.bool_))
    return min(1.0, max(0.0, line.values["stood"]))
