"""A training step of the Megatron learner against megatron-core driven by a loop of few lines.

Both have the same model, layout, micro-batches and optimizer options, in the same processes, and take turns. The
learner's step is all of it: reading the groups, dividing them, GRPO with its figures, the optimizer. The loop finds its
micro-batches laid out, takes megatron-core's own cross-entropy of every token times a weight, and reports nothing.

* Where there is no GPU other load on the machine disturbs seconds more than CPU seconds (of all ranks together), so the
  ratio of the latter is what is claimed there. A step that waits for another rank over gloo costs none.
* Ratios are those of neighbouring steps: their median, and the middle half of them.
* On GPUs the model is in bfloat16, and the learner's share of the peak (MFU) is printed.
"""

# torch is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from rich.console import Console
from rich.table import Table

from penstock.benchmarks._progress import in_turn
from penstock.benchmarks.ranks import make_batch
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from penstock.backends.checkpoint.make import ModelSize
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.messages.samples import Group

QUICK: Final = ("--model", "xs", "--steps", "6")
QUICK_S: Final = 25
TIMEOUT_S: Final = 900.0
WARM_UP_STEPS: Final = 2
LEARNING_RATE: Final = 1e-5


class Work(NamedTuple):
    """What one rank is to do."""

    rank: int
    num_ranks: int
    folder: str
    tensor: int
    pipeline: int
    num_steps: int
    num_groups: int
    max_tokens: int


class Spent(NamedTuple):
    """By one step on one rank."""

    wall_s: float
    cpu_s: float


class Found(NamedTuple):
    """By one rank, over the steps."""

    learner: list[Spent]
    loop: list[Spent]
    mfu: float | None
    device: str
    num_tokens: int
    """Of a step, trained."""


def measure_rank(work: Work) -> Found:
    """As one rank, in a process of its own."""
    from penstock.backends.learners.megatron.cpu import no_cuda

    no_cuda.install()
    import torch

    from penstock.backends.learners.megatron.layout.layout import layout_of
    from penstock.backends.learners.megatron.model.build import open_groups

    torch.set_num_threads(1)
    device = torch.device("cuda", work.rank) if torch.cuda.is_available() else torch.device("cpu")
    workers = _joined(work, device)
    options = _options(work)
    open_groups(layout_of(options.megatron, work.num_ranks), seed=1)
    groups = make_batch(seed=0)[: work.num_groups]
    learner = _trainable(work, options, workers)
    train = _learner_step(learner, options, groups, workers)
    minimal = _loop_step(_trainable(work, options, workers), options, groups, workers)
    spent: dict[str, list[Spent]] = {"learner": [], "loop": []}
    figures: dict[str, float] = {}
    steps = range(WARM_UP_STEPS + work.num_steps)
    for number in in_turn(steps, lambda number: f"step {number + 1} of learner and loop") if work.rank == 0 else steps:
        # The first of two that follow each other finds other caches than the second.
        order = ("learner", "loop") if number % 2 else ("loop", "learner")
        for name in order:
            took = _timed(lambda: figures.update(train()), workers) if name == "learner" else _timed(minimal, workers)
            if number >= WARM_UP_STEPS:
                spent[name].append(took)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Found(spent["learner"], spent["loop"], figures.get("perf/mfu"), name, int(figures["train/num_tokens"]))


def _joined(work: Work, device: torch.device) -> WorkerGroup:
    import torch
    import torch.distributed as dist

    from penstock.backends.learners.worker_group.workers import join_workers

    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{work.folder}/store", work.num_ranks)  # type: ignore[attr-defined]  # it is
    return join_workers(
        store=store,
        rank=work.rank,
        num_ranks=work.num_ranks,
        device=device,
        timeout_s=TIMEOUT_S,
    )


def _options(work: Work) -> LearnerOptions:
    from penstock.backends.learners.megatron_options import MegatronOptions
    from penstock.backends.learners.options import LearnerOptions

    layout = MegatronOptions(tensor_parallel=work.tensor, pipeline_parallel=work.pipeline)
    return LearnerOptions(
        backend="megatron",
        num_ranks=work.num_ranks,
        max_tokens_per_micro_batch=work.max_tokens,
        learning_rate=LEARNING_RATE,
        megatron=layout,
    )


def _trainable(work: Work, options: LearnerOptions, workers: WorkerGroup) -> TrainableModel:
    from penstock.backends.learners.megatron.bridge.architecture import read_architecture
    from penstock.backends.learners.megatron.layout.layout import layout_of
    from penstock.backends.learners.megatron.model.build import build_model
    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.learners.megatron.weights.load import load_weights

    model = build_model(
        read_architecture(Path(work.folder)),
        layout_of(options.megatron, work.num_ranks),
        options.megatron,
        precision="bfloat16" if workers.device.type == "cuda" else "float32",
        device=workers.device,
    )
    load_weights(model, Path(work.folder), rank=workers.rank)
    return TrainableModel(
        model,
        options.megatron,
        betas=options.betas,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        device=workers.device,
        entropy_gradient=False,
    )


def _learner_step(
    trainable: TrainableModel, options: LearnerOptions, groups: tuple[Group, ...], workers: WorkerGroup
) -> Callable[[], dict[str, float]]:
    from penstock.backends.learners.megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(
        trainable,
        None,
        options,
        temperature=1.0,
        num_steps=1000,
        check_stop=lambda: None,
        seed=0,
        workers=workers,
    )
    versions = iter(range(1, 1000))

    def step() -> dict[str, float]:
        result = trainer.train(groups, version=next(versions), min_token_version=0)
        return {metric.name: metric.value for metric in result.metrics}

    return step


def _loop_step(
    trainable: TrainableModel, options: LearnerOptions, groups: tuple[Group, ...], workers: WorkerGroup
) -> Callable[[], None]:
    """megatron-core's own parts, with nothing of ours but the model and what is laid out before."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = list(_laid_out(trainable.model, options, groups, workers))
    chunk = trainable.chunks[0]
    run: Any = get_forward_backward_func()

    def forward(inputs: Iterator[dict[str, Any]], module: Any) -> tuple[torch.Tensor, Callable[..., Any]]:  # noqa: ANN401
        batch = next(inputs)
        losses = module(
            batch["ids"], batch["positions"], None, labels=batch["labels"], packed_seq_params=batch["packed"]
        )

        def finish(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            loss = (losses.float() * batch["weights"]).sum()
            return loss, batch["none"], {"loss": loss.detach()}

        return losses, finish

    def step() -> None:
        chunk.zero_grad_buffer()
        trainable.optimizer.zero_grad()
        run(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=chunk,
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        for group in trainable.optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        trainable.optimizer.step()

    return step


def _laid_out(
    model: ParallelModel, options: LearnerOptions, groups: tuple[Group, ...], workers: WorkerGroup
) -> Iterator[dict[str, Any]]:
    """The learner's own micro-batches of this replica, as tensors on the device; every token has a label."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from penstock.backends.learners.batch.packing import divide_over_ranks
    from penstock.backends.learners.batch.sequences import read_groups
    from penstock.backends.learners.megatron.schedule.packed import pack_share

    batch = read_groups(groups, min_token_version=0)
    division = divide_over_ranks(
        batch.sequences,
        num_ranks=model.layout.data,
        max_tokens=options.max_tokens_per_micro_batch,
        hidden_size=model.architecture.hidden_size,
    )
    for part in division.ranks[model.layout.place(workers.rank).data]:
        share = pack_share(
            part or batch.sequences[:1],
            num_context=1,
            context_rank=0,
            num_sequence_shards=model.layout.tensor if model.layout.sequence_parallel else 1,
        )
        ids = torch.from_numpy(share.input_ids).to(workers.device)
        labels, weights = ids.roll(-1), torch.zeros(len(ids), device=workers.device)
        at = torch.from_numpy(share.predicted_at).to(workers.device)
        labels[at] = torch.from_numpy(share.targets).to(workers.device)
        weights[at] = float(bool(part)) / batch.num_trained_tokens
        ends = torch.tensor([0, *share.lengths], device=workers.device).cumsum(0).int()
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends,
            max_seqlen_q=max(share.lengths), max_seqlen_kv=max(share.lengths),
        )  # fmt: skip
        yield {
            "ids": ids[None],
            "positions": torch.from_numpy(share.position_ids).to(workers.device)[None],
            "labels": labels[None],
            "weights": weights[None],
            "packed": packed,
            "none": torch.zeros((), dtype=torch.int, device=workers.device),
        }


def _timed(step: Callable[[], object], workers: WorkerGroup) -> Spent:
    import torch

    def settle() -> None:
        if workers.device.type == "cuda":
            torch.cuda.synchronize(workers.device)

    workers.barrier()
    settle()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    step()
    settle()
    return Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def ratios(learner: Sequence[float], loop: Sequence[float]) -> tuple[float, float, float]:
    """Of neighbouring steps: their median, and the ends of their middle half."""
    found = sorted(one / other for one, other in zip(learner, loop, strict=True))
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return middle, low, high


def _row(name: str, learner: Sequence[float], loop: Sequence[float]) -> list[str]:
    middle, low, high = ratios(learner, loop)
    times = [f"{1e3 * statistics.median(values):,.1f}" for values in (learner, loop)]
    return [name, *times, f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    from penstock.backends.checkpoint.make import make_model

    parser = argparse.ArgumentParser(prog="penstock bench megatron", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=("xs", "s", "m"), default="m", help="of the quickstart's")
    parser.add_argument("--folder", type=Path, help="a checkpoint in Hugging Face format instead")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=20, help="of each, after the first few")
    parser.add_argument("--groups", type=int, default=8, help="of 8 samples, in a batch")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a micro-batch")
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("megatron") is None:
        raise UserFault('megatron-core is not installed; pip install -e ".[megatron]"')
    os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    with tempfile.TemporaryDirectory() as folder:
        if given.folder is None:
            make_model(cast("ModelSize", given.model), Path(folder), seed=0)
        else:
            for path in given.folder.iterdir():
                (Path(folder) / path.name).symlink_to(path.resolve())
        works = [
            Work(rank, given.ranks, folder, given.tensor, given.pipeline, given.steps, given.groups, given.max_tokens)
            for rank in range(given.ranks)
        ]
        with multiprocessing.get_context("spawn").Pool(given.ranks) as pool:
            found = pool.map_async(measure_rank, works, chunksize=1).get(TIMEOUT_S)
    _print(found)
    return 0


def _print(found: Sequence[Found]) -> None:
    table = Table("", "learner, ms", "loop, ms", "ratio", "middle half")
    cpu = [[sum(step) for step in zip(*steps, strict=True)] for steps in _by_rank(found, "cpu_s")]
    wall = [[max(step) for step in zip(*steps, strict=True)] for steps in _by_rank(found, "wall_s")]
    if found[0].device == "CPU":
        table.add_row(*_row("CPU seconds of all ranks", *cpu))
    table.add_row(*_row("seconds of the slowest rank", *wall))
    console = Console()
    console.print(f"{found[0].device}, {len(found)} rank(s), {found[0].num_tokens} trained tokens a step")
    console.print(table)
    if found[0].mfu is not None:
        console.print(f"learner: {100 * found[0].mfu:.1f} % of the device's peak in bfloat16")


def _by_rank(found: Sequence[Found], field: str) -> list[list[list[float]]]:
    """Of the learner and of the loop: of each rank, its steps."""
    return [
        [[float(getattr(step, field)) for step in steps] for steps in by_rank]
        for by_rank in ([rank.learner for rank in found], [rank.loop for rank in found])
    ]
