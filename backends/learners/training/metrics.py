"""What every learner reports about a batch, whatever trains it. Names are those of the field."""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections import Counter
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Final

from penstock.messages.arrays import TOKEN_BYTES
from penstock.messages.base import Metric
from penstock.messages.samples import Truncated

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from penstock.messages.kept_tokens import KeptTokens
    from penstock.messages.samples import Group, Sample

REPETITION_TOKENS: Final = 2500
"""At the end of a response, where a model that has lost its way goes round in circles; a shorter one has none."""
REPETITION_RATIO: Final = 10.0
"""Text of any use is not compressed so far."""


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """``rollout/…``: rewards, groups whose samples all earned the same, lengths in response tokens, shares of truncated
    responses and of those that end in repetition; ``passrate/pass@k`` with a reward of exactly 1 as correct. Empty
    without samples."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {}
    rewards = list(_rewards(groups))
    chances = pass_at_k([[reward == 1.0 for reward in group] for group in rewards])
    lengths = [sample.num_tokens for sample in samples]
    kept = [part.kept for sample in samples for part in sample.parts if part.kept is not None]
    return {
        **({"rollout/raw_reward": statistics.fmean(chain.from_iterable(rewards))} if rewards else {}),
        "rollout/response_len/mean": statistics.fmean(lengths),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/response_len/min": float(min(lengths)),
        "rollout/truncated_ratio": statistics.fmean(isinstance(sample.outcome, Truncated) for sample in samples),
        "rollout/repetition_frac": statistics.fmean(ends_in_repetition(sample) for sample in samples),
        "train/global_batch_size": float(len(samples)),
        **{f"passrate/pass@{k}": chance for k, chance in chances.items()},
        **_without_spread(rewards),
        **(_kept_per_token(kept) if kept else {}),
    }


def ends_in_repetition(sample: Sample) -> bool:
    """Whether the last ``REPETITION_TOKENS`` of its response, as bytes, can be compressed to less than a
    ``REPETITION_RATIO``-th by zlib."""
    if sample.num_tokens < REPETITION_TOKENS:
        return False
    ending = b"".join(part.tokens for part in sample.parts)[-REPETITION_TOKENS * TOKEN_BYTES :]
    return len(ending) > REPETITION_RATIO * len(zlib.compress(ending, 1))


def _kept_per_token(known: Sequence[KeptTokens]) -> dict[str, float]:
    """``rollout/top_p_kept_vocab_per_token``: tokens that cut-offs left for a draw, where they were recorded."""
    num_ids, num_tokens = sum(len(kept.ids) // TOKEN_BYTES for kept in known), sum(kept.num_recorded for kept in known)
    return {"rollout/top_p_kept_vocab_per_token": num_ids / num_tokens} if num_tokens else {}


def _rewards(groups: Sequence[Group]) -> Iterator[list[float]]:
    """Of the groups whose samples have any; those that are imitated have none."""
    for group in groups:
        rewards = [reward for sample in group.samples if (reward := sample.reward) is not None]
        if rewards:
            yield rewards


def _without_spread(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """``rollout/zero_std/count_<r>``: groups of which every sample earned r, to one decimal."""
    alike = Counter(f"{group[0]:.1f}" for group in rewards if len(group) > 1 and len(set(group)) == 1)
    return {f"rollout/zero_std/count_{reward}": float(count) for reward, count in sorted(alike.items())}


def pass_at_k(corrects: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Chance that at least one of ``k`` samples drawn from those of a prompt is correct, the mean over the prompts, for
    k of 1, 2, 4, … up to the samples of the smallest group; empty where that has one or none.

    ``1 − C(n − c, k) / C(n, k)`` with c of n samples correct, without bias: Chen et al., arXiv 2107.03374.
    """
    smallest = min((len(group) for group in corrects), default=0)
    if smallest < 2:
        return {}
    powers = [2**power for power in range(smallest.bit_length())]
    counts = [(len(group), len(group) - sum(group)) for group in corrects]
    return {k: statistics.fmean(1.0 - math.comb(wrong, k) / math.comb(n, k) for n, wrong in counts) for k in powers}


def as_metrics(figures: Mapping[str, float]) -> tuple[Metric, ...]:
    """Figures as they travel, by name."""
    return tuple(Metric(name=name, value=value) for name, value in sorted(figures.items()))


class StepTimes:
    """Where a learner's time goes between one training and the next: training, other work, waiting.

    It is told when there is something to do; a step lasts from the end of one training to the end of the next. For one
    thread.
    """

    def __init__(
        self, clock_s: Callable[[], float] = time.perf_counter, cpu_s: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock_s = clock_s
        self._cpu_s = cpu_s
        self._work_began_cpu_s = 0.0
        self._step_began_s = self._work_began_s = self._idle_since_s = clock_s()
        self._wait_s = 0.0

    @contextmanager
    def at_work(self) -> Generator[None]:
        """While a command is carried out."""
        self._work_began_s, self._work_began_cpu_s = self._clock_s(), self._cpu_s()
        self._wait_s += self._work_began_s - self._idle_since_s
        try:
            yield
        finally:
            self._idle_since_s = self._clock_s()

    def begin(self) -> None:
        """Open: the first step begins."""
        self._step_began_s, self._wait_s = self._clock_s(), 0.0

    def end(self) -> dict[str, float]:
        """``perf/…`` of the step that ends now with the work that is under way; the next one begins."""
        now_s = self._clock_s()
        step_time_s, wait_s, train_time_s = now_s - self._step_began_s, self._wait_s, now_s - self._work_began_s
        self.begin()
        return {
            "perf/train_time": train_time_s,
            "perf/train_cpu_time": self._cpu_s() - self._work_began_cpu_s,
            "perf/train_wait_time": wait_s,
            "perf/step_time": step_time_s,
            "perf/wait_time_ratio": wait_s / step_time_s,
        }
