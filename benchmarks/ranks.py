"""Training over ranks: tokens per CPU second and per second, on one rank, replicated and sharded.

Batches of the quickstart's shape (32 prompts with 8 samples each, responses of the task's long-tailed lengths), DAPO,
one thread a rank, on CPUs. Tokens are those that are trained.

* CPU seconds are those of all ranks together, so other load on the machine does not count: they say what
  dividing the work costs. Seconds are those of the slowest rank, and mean something only where each has a CPU of its
  own.
* Processes, models and the first batch are not counted. Ratios within one run are what is claimed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast

from rich.console import Console
from rich.table import Table

from penstock.backends.data.lines import lines_row
from penstock.benchmarks._progress import in_turn
from penstock.messages.arrays import pack_floats, pack_tokens
from penstock.messages.samples import Completed, Group, Part, Prompt, Reward, Sample, SampleKey, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.checkpoint.make import ModelSize

QUICK: Final = ("--model", "s", "--batches", "1")
QUICK_S: Final = 40
GROUPS: Final = 32
SAMPLES: Final = 8
VOCABULARY: Final = 70
TIMEOUT_S: Final = 600.0

Layout = Literal["alone", "ddp", "fsdp"]


class Work(NamedTuple):
    """What one rank is to do."""

    rank: int
    num_ranks: int
    layout: Layout
    folder: str
    num_batches: int
    max_tokens: int


class Spent(NamedTuple):
    """By one rank."""

    num_tokens: int
    """Of all ranks."""
    cpu_s: float
    wall_s: float


def make_batch(seed: int) -> tuple[Group, ...]:
    """Random tokens with the lengths of the task."""
    draw = random.Random(f"ranks {seed}")

    def tokens(count: int) -> bytes:
        return pack_tokens(draw.randrange(2, VOCABULARY) for _ in range(count))

    groups: list[Group] = []
    for group_id in range(GROUPS):
        row = lines_row(seed, group_id)
        length = len(row.answer) + 1
        samples = tuple(
            Sample(
                key=SampleKey(group_id, index),
                parts=(
                    Part(
                        tokens=tokens(length),
                        logprobs=pack_floats(-4.0 for _ in range(length)),
                        spans=(VersionSpan(0, length),),
                    ),
                ),
                outcome=Completed(reward=Reward(value=draw.random())),
            )
            for index in range(SAMPLES)
        )
        prompt = Prompt(row=0, epoch=0, tokens=tokens(len(row.prompt)))
        groups.append(Group(group_id=group_id, prompt=prompt, samples=samples))
    return tuple(groups)


def train(work: Work) -> Spent:
    """As one rank, in a process of its own."""
    import torch
    import torch.distributed as dist

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.sharded_load import load_divided
    from penstock.backends.learners.torch.trainer import PolicyTrainer
    from penstock.backends.learners.worker_group.workers import alone_on, join_workers

    torch.set_num_threads(1)
    device = torch.device("cpu")
    workers = alone_on(device)
    if work.num_ranks > 1:
        store = dist.FileStore(f"{work.folder}/{work.layout}", work.num_ranks)  # type: ignore[attr-defined]  # it is
        workers = join_workers(
            store=store,
            rank=work.rank,
            num_ranks=work.num_ranks,
            device=device,
            timeout_s=TIMEOUT_S,
        )
    options = LearnerOptions(
        parallel="fsdp" if work.layout == "fsdp" else "ddp", max_tokens_per_micro_batch=work.max_tokens
    )
    model = load_divided(Path(work.folder), workers, options, dtype="float32")
    trainer = PolicyTrainer(
        model,
        options,
        temperature=1.0,
        num_steps=work.num_batches,
        reference=None,
        check_stop=lambda: None,
        workers=workers,
    )
    batches = [make_batch(seed) for seed in range(work.num_batches + 1)]
    trainer.train(batches[0], version=1, min_token_version=0)
    num_tokens, cpu_s, wall_s = 0, time.process_time(), time.perf_counter()
    for version, batch in enumerate(batches[1:], start=2):
        num_tokens += trainer.train(batch, version=version, min_token_version=0).num_trained_tokens
    spent = Spent(num_tokens, time.process_time() - cpu_s, time.perf_counter() - wall_s)
    if work.num_ranks > 1:
        dist.destroy_process_group()
    return spent


def measure(layout: Layout, num_ranks: int, folder: str, *, num_batches: int, max_tokens: int) -> Spent:
    """All ranks: CPU seconds of all together, seconds of the slowest."""
    work = [Work(rank, num_ranks, layout, folder, num_batches, max_tokens) for rank in range(num_ranks)]
    with multiprocessing.get_context("spawn").Pool(num_ranks) as pool:
        found = pool.map_async(train, work, chunksize=1).get(TIMEOUT_S)
    return Spent(found[0].num_tokens, sum(spent.cpu_s for spent in found), max(spent.wall_s for spent in found))


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    from penstock.backends.checkpoint.make import make_model

    parser = argparse.ArgumentParser(prog="penstock bench ranks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=("xs", "s", "m"), default="m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a micro-batch")
    given = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    cases: list[tuple[Layout, int]] = [("alone", 1), ("ddp", given.ranks), ("fsdp", given.ranks)]
    table = Table("layout", "ranks", "tokens per CPU second", "against one", "tokens per second", "against one")
    with tempfile.TemporaryDirectory() as folder:
        make_model(cast("ModelSize", given.model), Path(folder), seed=0)
        rates: list[tuple[float, float]] = []
        for layout, num_ranks in in_turn(cases, lambda case: f"{case[0]}, {case[1]} rank(s)"):
            spent = measure(layout, num_ranks, folder, num_batches=given.batches, max_tokens=given.max_tokens)
            rates.append((spent.num_tokens / spent.cpu_s, spent.num_tokens / spent.wall_s))
            shares = [f"{one / other:.2f}" for one, other in zip(rates[-1], rates[0], strict=True)]
            figures = [f"{rate:,.0f}" for rate in rates[-1]]
            table.add_row(layout, str(num_ranks), figures[0], shares[0], figures[1], shares[1])
    Console().print(table)
    return 0
