"""The Scorer's backend of a run that evaluates: answers to a dataset are scored as the dataset says.

Invariants:

* Datasets that say the same as the run, or as each other, share its functions and their processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.messages.base import Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.evaluation.sets import EvaluationSet
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.backends.rewards.options import RewardOptions
    from penstock.messages.commands import Score, ScoreGroup


class RewardsWithEvaluation:
    """Implements ``penstock.backends.protocol.Backend``."""

    def __init__(
        self,
        training: Backend[Score | ScoreGroup],
        by_dataset: Sequence[Backend[Score | ScoreGroup]],
        timeouts_s: Sequence[float],
    ) -> None:
        """``by_dataset``: in the order of the scenario; the same one may stand there several times. ``timeouts_s``: for
        answers to each dataset."""
        self._training = training
        self._by_dataset = by_dataset
        self._timeouts_s = timeouts_s
        self._every = [training]
        for backend in by_dataset:
            if not any(backend is other for other in self._every):
                self._every.append(backend)

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        for backend in self._every:
            backend.start(emit, fail)

    def execute(self, command: Score | ScoreGroup, /) -> None:
        """Have the functions asked that are meant."""
        dataset = command.prompt.dataset
        if dataset is None:
            self._training.execute(command)
        else:
            self._by_dataset[dataset].execute(replace(command, timeout_s=self._timeouts_s[dataset]))

    def gauges(self) -> tuple[Metric, ...]:
        """Of all together."""
        totals: dict[str, float] = {}
        for backend in self._every:
            for metric in backend.gauges():
                totals[metric.name] = totals.get(metric.name, 0.0) + metric.value
        return tuple(Metric(name, value) for name, value in totals.items())

    def close(self, timeout_s: float) -> None:
        """Each within the time that all have."""
        for backend in self._every:
            backend.close(timeout_s / len(self._every))


def open_evaluation_rewards(
    run: RewardOptions,
    max_response_tokens: int,
    sets: Sequence[EvaluationSet],
    open_rewards: Callable[[RewardOptions, int], Backend[Score | ScoreGroup]],
) -> Backend[Score | ScoreGroup]:
    """What scores everything of a run.

    Args:
        run: the ``reward:`` block.
        max_response_tokens: of the run's sampling.
        sets: what is evaluated.
        open_rewards: opens a block, for responses of at most so many tokens.
    """
    opened: list[tuple[RewardOptions, int, Backend[Score | ScoreGroup]]] = []

    def opening(options: RewardOptions, max_tokens: int) -> Backend[Score | ScoreGroup]:
        for known, known_tokens, backend in opened:
            if (known, known_tokens) == (options, max_tokens):
                return backend
        opened.append((options, max_tokens, open_rewards(options, max_tokens)))
        return opened[-1][2]

    training = opening(run, max_response_tokens)
    if not sets:
        return training
    by_dataset = [opening(each.reward, each.sampling.max_response_tokens) for each in sets]
    return RewardsWithEvaluation(training, by_dataset, [each.reward.timeout_s for each in sets])
