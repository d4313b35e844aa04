"""GAE of a batch of long responses: the learner's scan against the recurrence token by token, in one run.

Both in float64 on one thread, interleaved, medians of the CPU seconds; the recurrence goes through the positions of a
padded table with all samples side by side. That the two agree is checked first.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import TYPE_CHECKING, Final

import torch
from rich.console import Console
from rich.table import Table

from penstock.backends.learners.objectives.advantages import generalized_token_advantages
from penstock.benchmarks._progress import in_turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

DISCOUNT: Final = 0.999
TRACE: Final = 0.95
TOLERANCE: Final = 1e-12


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


def measure(longest: int, num_samples: int, repetitions: int) -> tuple[int, float, float]:
    """Tokens of the batch; CPU seconds of the recurrence and of the scan.

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
    times: dict[str, list[float]] = {"plain": [], "scan": []}
    for _ in range(repetitions):
        times["plain"].append(_timed(lambda: plain(rewards, values)))
        times["scan"].append(_timed(scan))
    return int(sizes.sum()), statistics.median(times["plain"]), statistics.median(times["scan"])


def _timed(act: Callable[[], object]) -> float:
    began_s = time.thread_time()
    act()
    return time.thread_time() - began_s


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock bench advantages", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 32768], help="of the longest response")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    table = Table("longest", "tokens", "recurrence ms", "scan ms", "ratio", title=f"GAE of {given.samples} responses")
    for column in table.columns:
        column.justify = "right"
    for longest in in_turn(given.lengths, "responses of up to {:,} tokens".format):
        num_tokens, plain_s, scan_s = measure(longest, given.samples, given.repetitions)
        table.add_row(
            f"{longest:,}", f"{num_tokens:,}", f"{plain_s * 1e3:.1f}", f"{scan_s * 1e3:.1f}", f"{plain_s / scan_s:.1f}×"
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
