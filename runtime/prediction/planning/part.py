"""A share of a large batch on the same share of the engines, for the first look at a choice.

A batch of ``n`` samples on ``E`` engines goes as one of ``n·E'/E`` on ``E'`` of them: each engine has as many requests
side by side, and as many after another, as before; the learner takes as long for a step, with the times of a token and
of a micro-batch multiplied by ``E/E'``; so do the workers of rewards, which are fewer, for what reaches them. What does
not stay is the longest response: of fewer samples it is shorter. Where every batch is waited for to its end (η = 0)
that shortens each step, and the estimates of the whole and of the part (:mod:`.estimate`) correct what the part came to
by their ratio. Where batches overlap, the next one fills the slots meanwhile, and nothing is corrected.

What is compared in the end is played whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from penstock.runtime.prediction.planning.estimate import Estimator

if TYPE_CHECKING:
    from penstock.backends.rewards.options import SimulatedRewardOptions
    from penstock.runtime.prediction.steady import Steady
    from penstock.runtime.scenario import Scenario

PART_SAMPLES: Final = 1024
"""Of a batch of the part, at least: over the steps that are counted chance evens out as in batches of 512."""
LEAST_ENGINES: Final = 2
"""Of the part: with one there is nothing to choose between."""
LEAST_FACTOR: Final = 1.5
"""Below it a part is hardly cheaper than the whole."""


def part_of(scenario: Scenario) -> Scenario | None:
    """A share of this modelled scenario; None where its batches are not that large, or not all of its load can be
    divided."""
    learner, engines, size = scenario.learner, scenario.engines, scenario.sampling.samples_per_group
    most = learner.groups_per_batch * size / PART_SAMPLES
    count = max(LEAST_ENGINES, math.ceil(engines.count / max(1.0, most)))
    if engines.count < LEAST_FACTOR * count or _has_fixed_load(scenario):
        return None
    groups = round(learner.groups_per_batch * count / engines.count)
    factor = learner.groups_per_batch / groups
    model = learner.simulated
    simulated = replace(model, token_s=model.token_s * factor, micro_batch_s=model.micro_batch_s * factor)
    return replace(
        scenario,
        engines=replace(engines, count=count),
        learner=replace(learner, groups_per_batch=groups, simulated=simulated),
        reward=replace(scenario.reward, simulated=_rewards(scenario.reward.simulated, factor)),
    )


def as_whole(found: Steady, whole: Scenario, part: Scenario) -> Steady:
    """What the whole comes to, by what its part came to."""
    size = whole.learner.groups_per_batch / part.learner.groups_per_batch
    ratio = size
    if not whole.staleness.max_staleness:
        ratio = Estimator(whole).tokens_per_s(whole) / Estimator(part).tokens_per_s(part)
    return replace(found, tokens_per_s=found.tokens_per_s * ratio, step_s=found.step_s * size / ratio)


def times_as_noisy(scenario: Scenario) -> float:
    """By how much further chance moves what a part comes to than what the whole does, at most."""
    samples = scenario.learner.groups_per_batch * scenario.sampling.samples_per_group
    return math.sqrt(max(1.0, samples / PART_SAMPLES))


def _has_fixed_load(scenario: Scenario) -> bool:
    """Whether something in it does not go with the size of the batch: it would be too much for a part."""
    staleness = scenario.staleness
    return (
        bool(scenario.evaluation.datasets)
        or scenario.teacher is not None
        or scenario.reward_model is not None
        or staleness.target_outstanding != "auto"
        or staleness.max_concurrent is not None
    )


def _rewards(model: SimulatedRewardOptions, factor: float) -> SimulatedRewardOptions:
    """With so many times fewer workers; where that is no whole number, as slow as makes up for it."""
    if model.num_workers is None:
        return model
    workers = max(1, round(model.num_workers / factor))
    return replace(model, num_workers=workers, latency_s=model.latency_s * workers * factor / model.num_workers)
