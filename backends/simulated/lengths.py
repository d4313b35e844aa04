"""How long a modelled response gets.

Invariants:

* It depends on the seed of its sample, and, where lengths go together within a group, on the run's seed and the group.
* Where lengths change over training, that goes by the number of the group and not by the weights, so that every
  schedule has the same lengths.
* The same holds for the number of turns of an episode, their lengths, and what each waits for its tools.
* A response that is longer already than what was drawn for it, as one that a real engine has begun may be, gets the
  next draw that is longer: so its length is that of a response of which this much is known.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.draws import normal, uniform
from penstock.backends.simulated.engine_request import GROUP_LENGTH, LENGTH, NUM_TURNS, TOOL_WAIT, TURN_LENGTH
from penstock.messages.samples import is_evaluation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.options import EpisodeModelOptions, LatencyOptions
    from penstock.messages.commands import Generate

_NORMAL: Final = NormalDist()
MAX_DRAWS: Final = 256


class Planned(NamedTuple):
    """What becomes of a sample if nothing ends it before."""

    ends: tuple[int, ...]
    """Tokens of the response at the end of each turn, with those that tools have put in before; of a single response
    one."""
    is_cut: bool
    """The last turn has as many as it may, and would have had more."""


def planned(model: LatencyOptions, max_tokens: int, command: Generate, *, run_seed: int) -> Planned:
    """Turns of the sample; ``max_tokens`` is of each."""
    episode = model.episode
    if episode is None:
        num_tokens = num_tokens_of(model, max_tokens, command, run_seed=run_seed)
        return Planned((num_tokens,), num_tokens == max_tokens)
    place, num_turns = uniform(command.seed, NUM_TURNS) * sum(episode.turns), 1
    for share in episode.turns[:-1]:
        if (place := place - share) < 0:
            break
        num_turns += 1
    ends: list[int] = []
    length = 0
    for turn in range(num_turns):
        length = _drawn(model, max_tokens, command, normal(command.seed, TURN_LENGTH, turn), run_seed)
        ends.append(ends[-1] + episode.reply_tokens + length if ends else length)
    return Planned(tuple(ends), length == max_tokens)


def tool_wait_s(episode: EpisodeModelOptions, seed: int, num_tokens: int) -> float:
    """For what the turn that ended with this token asks; ``seed`` is the sample's."""
    if not episode.tool_sigma:
        return episode.tool_s
    return episode.tool_s * math.exp(episode.tool_sigma * normal(seed, TOOL_WAIT, num_tokens))


def num_tokens_of(model: LatencyOptions, max_tokens: int, command: Generate, *, run_seed: int) -> int:
    """Tokens of the response, at least 1 and at most ``max_tokens``; not less than there are already."""
    num_made = 0 if command.prefix is None else command.prefix.num_tokens
    if not model.response_tokens_sigma and not model.response_tokens_quantiles:  # all alike: nothing to draw
        return max(num_made, 1, min(max_tokens, int(model.response_tokens_median * _factor(model, command))))
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
        length = quantile(model.response_tokens_quantiles, _NORMAL.cdf(drawn)) * _factor(model, command) + 0.5
    else:
        length = model.response_tokens_median * math.exp(model.response_tokens_sigma * drawn) * _factor(model, command)
    return max(1, min(max_tokens, int(length)))


def _factor(model: LatencyOptions, command: Generate) -> float:
    """Of the lengths of this group; those of evaluations are as in the middle of the recorded runs."""
    course, group_id = model.response_tokens_course, command.key.group_id
    if not course or is_evaluation(group_id):
        return 1.0
    if len(course) == 1:
        return course[0]
    return quantile(course, min(1.0, group_id / model.response_tokens_course_groups))


def quantile(quantiles: Sequence[float], share: float) -> float:
    """Between the evenly spaced ``quantiles``, the first of share 0 and the last of share 1, on straight lines."""
    place = share * (len(quantiles) - 1)
    below = min(int(place), len(quantiles) - 2)
    return quantiles[below] + (place - below) * (quantiles[below + 1] - quantiles[below])
