"""What an evaluation of one dataset comes to: pure functions over its answers.

Invariants:

* An answer that is missing (its generation or its scoring failed for good) is counted as missing, and never as a wrong
  one: no figure but ``missing`` knows of it.
* A prompt counts as much as any other, however many of its answers are there. A figure for which no prompt has enough
  answers is left out, so that 0 always means 0.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.base import Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.messages.samples import VersionSpan


REWARD_MEAN: Final = "reward_mean"
VERSIONS: Final = ("version/oldest", "version/newest", "version/mean")


class Answer(NamedTuple):
    """One answer that was generated and scored."""

    reward: float
    num_tokens: int
    """Tokens that the model made."""
    is_truncated: bool = False
    spans: tuple[VersionSpan, ...] = ()
    """Which weights made which of its tokens."""
    components: tuple[Metric, ...] = ()
    """Components of the reward by name."""


class Answered(NamedTuple):
    """One prompt with the answers that there are."""

    row: int
    answers: tuple[Answer, ...]


class VersionsOf(NamedTuple):
    """Which weights the answers of an evaluation come from."""

    oldest: int
    newest: int
    mean: float
    """Over the tokens."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of ``k`` answers passes, estimated without bias from ``n`` answers of which ``c``
    pass: 1 − C(n − c, k) / C(n, k), the share of the choices of k out of n in which not all fail. (Chen et al. 2021,
    "Evaluating large language models trained on code".)

    The quotient is a product of factors between 0 and 1, so nothing overflows.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} answers of which {c} pass: expected 1 ≤ k ≤ n and 0 ≤ c ≤ n")
    if n - c < k:
        return 1.0
    return -math.expm1(math.fsum(math.log1p(-k / i) for i in range(n - c + 1, n + 1)))


def figures_of(
    prompts: Sequence[Answered], *, num_expected: int, k: Iterable[int], pass_reward: float
) -> tuple[Metric, ...]:
    """The figures of one dataset, in the order in which people read them.

    Args:
        prompts: all of them, those without any answer too.
        num_expected: answers that were asked for, over all prompts.
        k: for which pass@k is wanted.
        pass_reward: an answer passes with a reward of at least this.
    """
    answers = [answer for prompt in prompts for answer in prompt.answers]
    figures: list[Metric] = []
    if answers:
        figures += _rewards(prompts)
        figures += _passes(prompts, k, pass_reward)
        lengths = [answer.num_tokens for answer in answers]
        figures += (
            Metric("truncated", statistics.fmean(answer.is_truncated for answer in answers)),
            Metric("response_len/mean", statistics.fmean(lengths)),
            Metric("response_len/max", float(max(lengths))),
        )
        figures += _components(answers)
    figures += (
        Metric("missing", 1.0 - len(answers) / num_expected if num_expected else 0.0),
        Metric("num_prompts", float(len(prompts))),
        Metric("num_answers", float(len(answers))),
        Metric("num_tokens", float(sum(answer.num_tokens for answer in answers))),
    )
    versions = versions_of(answers)
    if versions is not None:
        figures += (
            Metric(name, float(value))
            for name, value in zip(VERSIONS, (versions.oldest, versions.newest, versions.mean), strict=True)
        )
    return tuple(figures)


def versions_of(answers: Iterable[Answer]) -> VersionsOf | None:
    """The versions that made the tokens of these answers; None where there are no tokens."""
    spans = [span for answer in answers for span in answer.spans if span.num_tokens]
    if not spans:
        return None
    versions = [span.version for span in spans]
    weighted = sum(span.version * span.num_tokens for span in spans)
    return VersionsOf(min(versions), max(versions), weighted / sum(span.num_tokens for span in spans))


def metric_name(dataset: str, figure: str) -> str:
    """``eval/gsm8k/pass@1``"""
    return f"eval/{dataset}/{figure}"


def _rewards(prompts: Sequence[Answered]) -> Iterator[Metric]:
    """Mean over the prompts of their mean reward, and its standard error: answers to one prompt are alike, so prompts
    are what is counted as independent."""
    means = [statistics.fmean(answer.reward for answer in prompt.answers) for prompt in prompts if prompt.answers]
    yield Metric(REWARD_MEAN, statistics.fmean(means))
    if len(means) > 1:
        yield Metric("reward_stderr", statistics.stdev(means) / math.sqrt(len(means)))


def _passes(prompts: Sequence[Answered], wanted: Iterable[int], pass_reward: float) -> Iterator[Metric]:
    counts = [
        (len(prompt.answers), sum(answer.reward >= pass_reward for answer in prompt.answers)) for prompt in prompts
    ]
    for k in wanted:
        estimates = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        if estimates:
            yield Metric(f"pass@{k}", statistics.fmean(estimates))


def _components(answers: Sequence[Answer]) -> Iterator[Metric]:
    """Each over the answers that have it."""
    values: dict[str, list[float]] = {}
    for answer in answers:
        for component in answer.components:
            values.setdefault(component.name, []).append(component.value)
    for name, found in values.items():
        yield Metric(f"components/{name}", statistics.fmean(found))
