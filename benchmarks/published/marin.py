"""marin's Snowball (67B, of which 2B are active): 32 H100 that train, 8 that generate, 32 prompts with 4 responses.

Published is the time of 25 updates by how often weights are synchronised, with 8 GPUs that generate and with 16, and
what training and weights have of it (marin-community/marin#8936); and the time of 100 updates by the allowance of
staleness, of two versions of the trainer (#8955).

* By cadence. Fitted is the synchronous run: what it takes beyond training and weights is the generation of a batch,
  which gives the time of a token. Lengths are those of an earlier run, by their mean and by the share that a limit of
  2,048 tokens cut off. Weights after every update and after every second, and 16 GPUs, are predicted.
* By allowance. Lengths had changed and are not published, so two runs of ``main`` are fitted: that with 0 gives the
  time of a token, that with 4 the median of the lengths. Of the branch the run with 0 is fitted, with those lengths.

The trainer drops what is older than the allowance when its turn comes, so ``on_stale: drop`` is played.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.benchmarks.published._model import Setting, bisected
from penstock.runtime.prediction.imports.lengths import log_normal_of

SAMPLES: Final = 128
"""Of an update."""
LONGEST: Final = 4_096
LENGTHS: Final = log_normal_of(mean=3_312_485 / 3_200, longest=2_048, num_samples=SAMPLES, truncated=0.1744)
"""Tokens and share of the earlier run."""
NUM_STEPS: Final = 41
"""Of which, with an allowance of 1, the steady ones are even in number, as synchronisations after every second ask."""
LOAD_SHARE: Final = 0.005
ENGINES: Final = 8
"""Data-parallel ranks of a GPU each."""
SYNCHRONOUS_S: Final = 1652.8 / 25
TRAINING_S: Final = 231.65 / 25
WEIGHTS_S: Final = 270.95 / 13
"""Of one synchronisation, while which nothing is generated; with every second update there are 13."""
LATER_TRAINING_S: Final = 8.4
"""Of the runs by allowance: the mean of updates 2 to 11 of one of their series."""


class Cadence(NamedTuple):
    """A run of 25 updates."""

    engines: int
    publish_every: int
    total_s: float

    @property
    def name(self) -> str:
        """For the table."""
        return f"weights after {self.publish_every}, {self.engines} GPUs"


CADENCES: Final = (Cadence(8, 1, 1182.2), Cadence(8, 2, 959.7), Cadence(16, 2, 927.010))


class Sweep(NamedTuple):
    """Runs of 100 updates, by the allowance of staleness."""

    name: str
    workers: int
    """Groups that are generated at a time, at most."""
    weights_s: float
    total_s: dict[int, float]
    fitted: tuple[int, ...]


MAIN: Final = Sweep("main", 64, 20.9, {0: 8524, 1: 5583, 2: 5093, 3: 4754, 4: 4301}, (0, 4))
BRANCH: Final = Sweep("branch", 192, 3.6, {0: 6235, 1: 4360, 2: 3544, 3: 3142, 4: 2942}, (0,))


class Predicted(NamedTuple):
    """Seconds an update."""

    median: float
    """Of the lengths of the runs by allowance, in tokens."""
    by_cadence: dict[Cadence, float]
    by_allowance: dict[str, dict[int, float]]
    """Of each sweep, by allowance from 1 on."""


def generation(engines: int, median: float, token_s: float, slots: int = SAMPLES) -> Setting:
    """The synchronous run without training."""
    return Setting(
        engines=engines, group_size=4, groups_per_batch=SAMPLES // 4, median=median, sigma=LENGTHS.sigma,
        longest=LONGEST, token_s=token_s, token_load_s=LOAD_SHARE * token_s, slots=slots, num_steps=24,
    )  # fmt: skip


def overlapped(alone: Setting, allowance: int, training_s: float, weights_s: float) -> Setting:
    """Generation beside training."""
    return alone._replace(
        step_s=training_s, apply_s=weights_s, policy="fully_async", update_mode="in_flight", on_stale="drop",
        max_staleness=allowance, num_steps=NUM_STEPS,
    )  # fmt: skip


def token_s(median: float, generation_s: float, seed: int) -> float:
    """At which a synchronous batch takes so long to generate."""
    return 0.01 * generation_s / generation(ENGINES, median, 0.01).step_time_s(seed)


def with_allowance(sweep: Sweep, allowance: int, median: float, seed: int) -> float:
    """An update, with the time of a token that the run with 0 gives."""
    unit = token_s(median, sweep.total_s[0] / 100 - LATER_TRAINING_S - sweep.weights_s, seed)
    alone = generation(ENGINES, median, unit, sweep.workers * 4 // ENGINES)
    return overlapped(alone, allowance, LATER_TRAINING_S, sweep.weights_s).step_time_s(seed)


def predicted(seed: int) -> Predicted:
    """Fit, and play the rest."""
    unit = token_s(LENGTHS.median, SYNCHRONOUS_S - TRAINING_S - WEIGHTS_S, seed)
    by_cadence = {
        each: overlapped(generation(each.engines, LENGTHS.median, unit), 1, TRAINING_S, WEIGHTS_S)
        ._replace(publish_every=each.publish_every)
        .played(seed)
        .step_s
        for each in CADENCES
    }
    # The shorter most responses are beside the longest, the more of the generation further batches hide.
    median = LONGEST / bisected(
        MAIN.total_s[4] / 100, lambda shortness: with_allowance(MAIN, 4, LONGEST / shortness, seed), 1.0, 4.0, rounds=5
    )
    by_allowance = {
        sweep.name: {each: with_allowance(sweep, each, median, seed) for each in sweep.total_s if each}
        for sweep in (MAIN, BRANCH)
    }
    return Predicted(median, by_cadence, by_allowance)
