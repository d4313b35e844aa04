"""What an evaluation of one dataset comes to: pure functions over its answers.

Invariants:

* An answer that is missing (its generation or its scoring failed for good) is counted as missing, and never as a wrong
  one: no figure but ``missing`` knows of it.
* A prompt counts as much as any other, however many of its answers are there. A figure for which no prompt has enough
  answers is left out, so that 0 always means 0. maj@k is left out where no answer was extracted from any response.
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
MAX_VOTES: Final = 64
"""Of prompts with more answers than this maj@k is told only for k = all of them: counting choices takes too long."""
SHARES_AT_K: Final = ("pass@", "maj@")
"""How the names of figures begin that are told for each k."""
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
    extracted: str = ""
    """What the reward function took for the final answer; empty: none."""


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


def maj_at_k(votes: Sequence[tuple[str, bool]], k: int) -> float:
    """The chance that the answer which most of ``k`` answers give passes, over all choices of ``k`` of these ``votes``
    (an extracted answer, and whether it passes): so without bias, as pass@k is.

    Answers that tie share the chance equally. One that is empty is no vote; where nobody votes, nothing passes. It
    passes as often as the answers do that give it.

    For each number of votes that may win, one pass over the answers counts the choices in which this is the highest
    number, by how many answers tie at it, and with them the sum of how often these pass.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} of {n} answers: expected 1 ≤ k ≤ n")
    given: dict[str, list[bool]] = {}
    for answer, passes in votes:
        if answer:
            given.setdefault(answer, []).append(passes)
    counts = [(len(each), statistics.fmean(each)) for each in given.values()]
    if k == n:
        top = max((count for count, _ in counts), default=0)
        return statistics.fmean(share for count, share in counts if count == top) if counts else 0.0
    num_silent = n - sum(count for count, _ in counts)
    highest = min(k, max((count for count, _ in counts), default=0))
    won = math.fsum(_won_at(level, counts, num_silent, k) for level in range(1, highest + 1))
    return won / math.comb(n, k)


def _won_at(level: int, counts: Sequence[tuple[int, float]], num_silent: int, k: int) -> float:
    """Choices of ``k`` whose most frequent answers have ``level`` votes, each times the share of these that passes."""
    ways: dict[tuple[int, int], tuple[int, float]] = {(0, 0): (1, 0.0)}
    for count, share in counts:
        following: dict[tuple[int, int], tuple[int, float]] = {}
        for (taken, tied), (number, passing) in ways.items():
            for votes in range(min(count, level, k - taken) + 1):
                chosen = math.comb(count, votes)
                is_top = votes == level
                key = taken + votes, tied + is_top
                before, passed = following.get(key, (0, 0.0))
                more = passing + share * number if is_top else passing
                following[key] = before + number * chosen, passed + more * chosen
        ways = following
    return math.fsum(
        passing / tied * math.comb(num_silent, k - taken)
        for (taken, tied), (_, passing) in ways.items()
        if tied and k - taken <= num_silent
    )


def figures_of(
    prompts: Sequence[Answered], *, num_expected: int, k: Iterable[int], pass_reward: float
) -> tuple[Metric, ...]:
    """The figures of one dataset, in the order in which people read them.

    Args:
        prompts: all of them, those without any answer too.
        num_expected: answers that were asked for, over all prompts.
        k: for which pass@k and maj@k are wanted.
        pass_reward: an answer passes with a reward of at least this.
    """
    answers = [answer for prompt in prompts for answer in prompt.answers]
    figures: list[Metric] = []
    if answers:
        figures += _rewards(prompts)
        figures += _passes(prompts, k := tuple(k), pass_reward)
        if any(answer.extracted for answer in answers):
            figures += _majorities(prompts, k, pass_reward)
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


def _majorities(prompts: Sequence[Answered], wanted: Iterable[int], pass_reward: float) -> Iterator[Metric]:
    votes = [[(answer.extracted, answer.reward >= pass_reward) for answer in prompt.answers] for prompt in prompts]
    for k in (k for k in wanted if k > 1):
        estimates = [
            maj_at_k(each, k) for each in votes if len(each) >= k and (k == len(each) or len(each) <= MAX_VOTES)
        ]
        if estimates:
            yield Metric(f"maj@{k}", statistics.fmean(estimates))


def _components(answers: Sequence[Answer]) -> Iterator[Metric]:
    """Each over the answers that have it."""
    values: dict[str, list[float]] = {}
    for answer in answers:
        for component in answer.components:
            values.setdefault(component.name, []).append(component.value)
    for name, found in values.items():
        yield Metric(f"components/{name}", statistics.fmean(found))
