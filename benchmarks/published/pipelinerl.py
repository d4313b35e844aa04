"""PipelineRL: new weights in flight on two parts of the GPUs, against turns on all of them.

Two comparisons of arXiv 2509.19128 are predicted, both in units of their own, as it publishes no times:

* The estimate of its appendix A: 128 H100, batches of 128 sequences whose lengths are uniform from 1 to the longest.
  44 GPUs that generate, 192 sequences each, make 16.9 tokens a flash (the time that a token takes at the least), and
  84 can train 17.08. Both are fitted: the time of a pass and the training of a token. Predicted are that pipeline
  with all its waits, the age of its oldest tokens (its formula says 133 steps), and the run in turns with the same
  greatest lag, 134 steps for each generation, which the estimate puts at 10.7 tokens a flash.
* Its run: a 7B model, batches of 1,024, 48 GPUs that generate 64 sequences each and 80 that train, which learnt about
  twice as fast as 32 steps on what 128 GPUs had generated at 64 each. Published besides is that some tokens were more
  than 50 thousand samples old. Its formula of the lag says then how much longer than the mean the longest response
  is; that is fitted. Training is taken to keep up, no more, as its authors advise.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from penstock.benchmarks.published._model import Setting
from penstock.runtime.prediction.imports.lengths import mean_of_cut
from penstock.runtime.prediction.steady import fewest_steps

NUM_GPUS: Final = 128
SIGMA: Final = 1.0
"""Of the logarithm of the lengths of the run, which are cut off at the longest."""
MEAN: Final = 500.0
"""Of the lengths, in tokens; only ratios to it count."""
PIPELINE: Final = (16.9, 17.08)
"""Tokens a flash that the estimate's pipeline generates, and trains."""
IN_TURNS: Final = 10.7
"""Likewise of the run in turns."""
SPEED_UP: Final = 1.57
LAG: Final = 133
"""Steps of 128 sequences, of the estimate."""


class Split(NamedTuple):
    """A pipeline, and the run in turns beside it."""

    num_generating: int
    slots: int
    batch: int
    """Sequences of a step."""
    turn: int
    """Sequences that the run in turns generates on all GPUs, and trains then."""
    turn_slots: int
    """Of them, that a GPU runs at a time."""
    longest_by_mean: float
    """Longest ÷ mean of the lengths."""
    sigma: float
    """Log-normal lengths; 0: uniform ones."""
    scale: int
    """GPUs and sequences of the pipeline are simulated as one of so many alike parts."""
    turn_scale: int
    """Likewise of the run in turns."""

    @property
    def lag(self) -> int:
        """Steps while the longest sequence is made: what the pipeline makes meanwhile ÷ a batch (the paper's)."""
        return math.ceil(self.slots * self.num_generating * self.longest_by_mean / self.batch)


ESTIMATE: Final = Split(44, 192, 2048, (LAG + 1) * 128, 192, 2.0, 0.0, 22, 32)
"""With batches 16 times as large as its 128, and so steps of the lag 16 times as few, which it calls the same."""
OLDEST: Final = 50_000
"""Sequences by which some tokens of the run were behind."""
RUN: Final = Split(48, 64, 1024, 32 * 1024, 64, OLDEST / (48 * 64), SIGMA, 16, 16)
PASS_S: Final = 0.01
"""Of a token of each sequence: no time is published, so this is the unit."""


class Predicted(NamedTuple):
    """Tokens in the unit of time in which the pipeline's engines can make ``generated``."""

    pipeline: float
    in_turns: float
    oldest: int
    """Greatest age of what the pipeline trained, in sequences."""

    @property
    def speed_up(self) -> float:
        return self.pipeline / self.in_turns


def pipeline(split: Split, generated: float, trained: float) -> Setting:
    """Generation and training side by side.

    Args:
        split: who does what.
        generated: tokens that the engines make in a unit of time while all slots are taken.
        trained: tokens that the other GPUs can train in one.
    """
    return _setting(split, split.num_generating, split.slots, split.batch, split.scale)._replace(
        step_s=_unit_s(split, generated) * split.batch * MEAN / trained, policy="fully_async", update_mode="in_flight",
        max_staleness=split.lag + 2, num_steps=fewest_steps(split.lag + 2) + 2 * split.lag,
    )  # fmt: skip


def in_turns(split: Split, generated: float, trained: float) -> Setting:
    """Generation and training on all GPUs in turns; a pass takes as long as the pipeline's."""
    trained *= NUM_GPUS / (NUM_GPUS - split.num_generating)
    return _setting(split, NUM_GPUS, split.turn_slots, split.turn, split.turn_scale)._replace(
        step_s=_unit_s(split, generated) * split.turn * MEAN / trained, num_steps=6
    )


def predicted(split: Split, seed: int, generated: float = 1.0, trained: float = 1.0) -> Predicted:
    """Play both."""
    beside = pipeline(split, generated, trained).played(seed)
    turns = in_turns(split, generated, trained).step_time_s(seed)
    return Predicted(
        pipeline=_unit_s(split, generated) * split.batch * MEAN / beside.step_s,
        in_turns=_unit_s(split, generated) * split.turn * MEAN / turns,
        oldest=split.batch * max(age for age, share in enumerate(beside.ages) if share),
    )


def _setting(split: Split, num_gpus: int, slots: int, batch: int, scale: int) -> Setting:
    longest = round(MEAN * split.longest_by_mean)
    return Setting(
        engines=num_gpus // scale, group_size=1, groups_per_batch=round(batch / scale), median=_median(split),
        sigma=split.sigma, quantiles=() if split.sigma else (1.0, longest), longest=longest, slots=slots,
        token_s=PASS_S,
    )  # fmt: skip


def _unit_s(split: Split, generated: float) -> float:
    """While which the pipeline's engines make ``generated`` tokens."""
    return PASS_S * generated / (split.num_generating * split.slots)


def _median(split: Split) -> float:
    """At which the mean of what is cut off is MEAN."""
    low, high = MEAN / 10, MEAN
    for _ in range(40):
        middle = (low + high) / 2
        at_middle = mean_of_cut(middle, split.sigma, MEAN * split.longest_by_mean)
        low, high = (middle, high) if at_middle < MEAN else (low, middle)
    return (low + high) / 2
