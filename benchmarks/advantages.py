"""GAE of a batch of long responses: the learner's scan against the recurrence token by token.

Both in float64 on one thread, in turn, CPU time; the recurrence goes through the positions of a
padded table with all samples side by side. That the two agree is checked first.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.learners.objectives.advantages import generalized_token_advantages
from penstock.benchmarks._harness import Benchmark, Measured, claim, figures, interleaved, pairs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from torch import Tensor

DISCOUNT: Final = 0.999
TRACE: Final = 0.95
TOLERANCE: Final = 1e-12
QUICK: Final = ("--lengths", "512", "4096")
QUICK_S: Final = 10


def plain(rewards: Tensor, values: Tensor) -> Tensor:
    """``A_t = r_t + γ V_{t+1} − V_t + γλ A_{t+1}`` along the rows ``[S, T]``, last position first."""
    advantages = torch.zeros_like(rewards)
    following = next_value = rewards.new_zeros(len(rewards))
    for position in reversed(range(rewards.shape[1])):
        error = rewards[:, position] + DISCOUNT * next_value - values[:, position]
        following = error + DISCOUNT * TRACE * following
        advantages[:, position] = following
        next_value = values[:, position]
    return advantages


def arms_of(longest: int, num_samples: int) -> tuple[int, dict[str, Callable[[], float]]]:
    """Tokens of the batch; what gives the CPU milliseconds of the recurrence and of the scan.

    Raises:
        RuntimeError: they disagree.
    """
    draw = random.Random(longest)
    sizes = torch.tensor([longest, *(draw.randint(longest // 8, longest) for _ in range(num_samples - 1))])
    mask = torch.arange(longest) < sizes[:, None]
    rewards = torch.zeros(num_samples, longest, dtype=torch.float64)
    rewards[torch.arange(num_samples), sizes - 1] = 1.0
    values = torch.rand(num_samples, longest, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * mask
    flat_rewards, flat_values = rewards[mask], values[mask]

    def scan() -> Tensor:
        return generalized_token_advantages(flat_rewards, flat_values, sizes, discount=DISCOUNT, trace=TRACE)

    if not torch.allclose(plain(rewards, values)[mask], scan(), rtol=TOLERANCE, atol=TOLERANCE):
        raise RuntimeError("the scan and the recurrence disagree")
    return int(sizes.sum()), {
        "recurrence": lambda: _timed_ms(lambda: plain(rewards, values)),
        "scan": lambda: _timed_ms(scan),
    }


def _timed_ms(act: Callable[[], object]) -> float:
    began_s = time.thread_time()
    act()
    return 1e3 * (time.thread_time() - began_s)


def measure(given: argparse.Namespace) -> Measured:
    """Both, for each length in turn."""
    torch.set_num_threads(1)
    measured = Measured([], [])
    for longest in given.lengths:
        num_tokens, arms = arms_of(longest, given.samples)
        case = f"{given.samples} responses of up to {longest:,}, {num_tokens:,} tokens"
        found = figures(interleaved(arms, given.repetitions), "CPU ms", float, f"{{}}, {case}")
        measured.figures.extend(found)
        measured.claims.append(claim(f"recurrence ÷ scan, {case}", pairs(*found), at_least=1))
    return measured


def main(argv: list[str] | None = None) -> int:
    """Measure and judge; returns the exit code."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--lengths", type=int, nargs="+", default=[512, 4096, 32768], help="of the longest response")
    benchmark.option("--samples", type=int, default=32)
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
