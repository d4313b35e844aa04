"""The embedded engine against transformers' ``generate``, both with log-probs: tokens per CPU second, one thread.

Cases: batches in which every response has the same length, and the long-tailed lengths of the quickstart's task, where
only the tokens that a response wants are counted. The latter are taken in two ways: 256 rows at even quantiles of the
task's lengths, so that no draw decides how long the tail is, decoded side by side on both sides; and one batch of the
quickstart as it comes (32 prompts with 8 samples each, the engine's usual 64 slots), whose tail is shorter and for
which nothing is claimed.

How it is measured:

* Both sides in one process with one thread, repetitions interleaved, the median of the CPU seconds of each. CPU time
  and not wall time, so that other load on the machine does not count; ratios within one run are what is claimed.
* Lengths are forced (no end token, a limit per request), so both sides make the same number of useful tokens.
* ``generate`` decodes a batch until its longest response has ended. It may take the requests all at once or in chunks
  of the engine's slots, in the order of their arrival; the faster of the two is compared with.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3ForCausalLM

from penstock.backends.checkpoint.make import PAD_ID, SYMBOLS, character_tokenizer, make_model
from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.data.lines import LinesRow, lines_row
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.requests import GenerationRequest
from penstock.benchmarks._progress import in_turn
from penstock.messages.arrays import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ModelSize = Literal["xs", "s", "m"]

QUICK: Final = ("--batches", "8", "--repetitions", "1")
REQUIRED_EQUAL: Final = 2.0
REQUIRED_LONG_TAILED: Final = 5.0
SAMPLES_PER_GROUP: Final = 8
PROMPT_TOKENS: Final = 16
NUM_ROWS: Final = 20_480
"""Rows of the task whose lengths stand for all."""
MAX_CONTEXT: Final = 512
TIMED_TOKENS: Final = 2048
"""A measurement is repeated within a repetition until it makes so many tokens."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One case: prompts, and how many tokens each response gets."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    chunk_sizes: tuple[int, ...]
    """In what chunks ``generate`` may take the requests."""
    num_slots: int
    required_ratio: float | None = None

    @property
    def num_tokens(self) -> int:
        """That the responses want."""
        return sum(self.lengths)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One case, measured; times are medians over the repetitions."""

    name: str
    num_requests: int
    num_tokens: int
    """That the responses want."""
    generate_cpu_s: dict[str, float]
    """By chunk size."""
    engine_cpu_s: float
    engine_wall_s: float
    ratio: float
    """Tokens per CPU second, engine ÷ the fastest ``generate``."""
    required_ratio: float | None
    """None: nothing is claimed."""

    @property
    def passed(self) -> bool:
        """Whether the claim holds."""
        return self.required_ratio is None or self.ratio >= self.required_ratio


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of the benchmark found."""

    model: str
    repetitions: int
    torch_version: str
    machine: str
    num_cpus: int
    cases: list[Measured]

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        return all(case.passed for case in self.cases)


class _Generated(Protocol):
    sequences: torch.Tensor
    logits: tuple[torch.Tensor, ...]


class _Generator(Protocol):
    """What is used of a transformers model."""

    def generate(self, **options: object) -> _Generated: ...


def run(
    *,
    size: ModelSize = "s",
    batches: Sequence[int] = (1, 8, 32),
    new_tokens: int = 64,
    num_requests: int = 256,
    num_slots: int = 64,
    repetitions: int = 3,
    seed: int = 0,
    output: Path | None = None,
) -> EngineReport:
    """Measure, print a table, and write the report as JSON to ``output`` if it is given.

    Args:
        size: of the made model.
        batches: of requests with equal lengths.
        new_tokens: length of each of their responses.
        num_requests: of the long-tailed cases, a multiple of 8.
        num_slots: of the engine for the quickstart's batch; the other cases decode all requests side by side.
        repetitions: of each measurement, interleaved.
        seed: of the model's weights, the prompts and the draws.
        output: where the JSON goes.
    """
    torch.set_num_threads(1)
    workloads = [_equal_lengths(batch, new_tokens, seed) for batch in batches]
    workloads.append(_long_tailed(num_requests, seed))
    workloads.append(_quickstart_batch(num_requests // SAMPLES_PER_GROUP, SAMPLES_PER_GROUP, num_slots, seed))
    with tempfile.TemporaryDirectory() as name, quiet_transformers():
        folder = Path(name)
        make_model(size, folder, seed)
        generator = cast("_Generator", Qwen3ForCausalLM.from_pretrained(folder))  # pyright: ignore[reportUnknownMemberType]
        cases = [_measure(workload, folder, generator, repetitions) for workload in workloads]
    report = EngineReport(
        model=size,
        repetitions=repetitions,
        torch_version=str(torch.__version__),
        machine=platform.platform(),
        num_cpus=os.cpu_count() or 1,
        cases=cases,
    )
    _print(report)
    if output is not None:
        output.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


def _equal_lengths(batch: int, new_tokens: int, seed: int) -> Workload:
    draw = random.Random(seed)
    return Workload(
        name=f"batch {batch}, {new_tokens} tokens each",
        prompts=[[draw.randrange(2, len(SYMBOLS)) for _ in range(PROMPT_TOKENS)] for _ in range(batch)],
        lengths=[new_tokens] * batch,
        chunk_sizes=(batch,),
        num_slots=batch,
        required_ratio=REQUIRED_EQUAL,
    )


def _long_tailed(num_requests: int, seed: int) -> Workload:
    rows = sorted((lines_row(seed, index) for index in range(NUM_ROWS)), key=lambda row: len(row.answer))
    step = NUM_ROWS / num_requests
    chosen = [rows[int((index + 0.5) * step)] for index in range(num_requests)]
    random.Random(seed).shuffle(chosen)
    return _of_the_task(f"{num_requests} long-tailed", chosen, num_requests, REQUIRED_LONG_TAILED)


def _quickstart_batch(num_groups: int, samples_per_group: int, num_slots: int, seed: int) -> Workload:
    rows = [row for index in range(num_groups) for row in [lines_row(seed, index)] * samples_per_group]
    return _of_the_task(f"{num_groups} × {samples_per_group} samples", rows, num_slots, None)


def _of_the_task(name: str, rows: list[LinesRow], num_slots: int, required_ratio: float | None) -> Workload:
    tokenizer = character_tokenizer()
    lengths = [len(tokenizer.encode(row.answer).ids) + 1 for row in rows]
    return Workload(
        name=f"{name}, mean {statistics.mean(lengths):.0f}, longest {max(lengths)}",
        prompts=[tokenizer.encode(row.prompt).ids for row in rows],
        lengths=lengths,
        chunk_sizes=tuple(sorted({min(num_slots, len(rows)), len(rows)})),
        num_slots=num_slots,
        required_ratio=required_ratio,
    )


def _measure(workload: Workload, folder: Path, generator: _Generator, repetitions: int) -> Measured:
    engine = _open_engine(folder, workload.num_slots)
    generate_s: dict[int, list[float]] = {size: [] for size in workload.chunk_sizes}
    engine_s: list[tuple[float, float]] = []
    num_rounds = max(1, TIMED_TOKENS // workload.num_tokens)

    def what(number: int) -> str:
        return f"{workload.name}, {'once before any counts' if number < 0 else f'repetition {number + 1}'}"

    for repetition in in_turn(range(-1, repetitions), what):  # the first one warms both sides up and is not counted
        for chunk_size, times in generate_s.items():
            times.append(_timed(num_rounds, partial(_generate_all, generator, workload, chunk_size))[0])
        engine_s.append(_timed(num_rounds, partial(_decode_all, engine, workload, repetition)))
    medians = {str(size): statistics.median(times[1:]) for size, times in generate_s.items()}
    engine_cpu_s = statistics.median(cpu_s for cpu_s, _ in engine_s[1:])
    return Measured(
        name=workload.name,
        num_requests=len(workload.prompts),
        num_tokens=workload.num_tokens,
        generate_cpu_s=medians,
        engine_cpu_s=engine_cpu_s,
        engine_wall_s=statistics.median(wall_s for _, wall_s in engine_s[1:]),
        ratio=min(medians.values()) / engine_cpu_s,
        required_ratio=workload.required_ratio,
    )


def _timed(num_rounds: int, act: Callable[[], None]) -> tuple[float, float]:
    """CPU and wall seconds of one round."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(num_rounds):
        act()
    return (time.process_time() - cpu_s) / num_rounds, (time.perf_counter() - wall_s) / num_rounds


def _open_engine(folder: Path, num_slots: int) -> TorchEngine:
    settings = EngineSettings(num_slots=num_slots, max_context=MAX_CONTEXT)
    engine = TorchEngine(read_model_config(folder), settings)
    with CheckpointTensors(folder) as tensors:
        engine.load(tensors, version=0)
    return engine


def _decode_all(engine: TorchEngine, workload: Workload, repetition: int) -> None:
    first_seed = (repetition + 1) * len(workload.prompts)
    for index, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True)):
        engine.submit(
            GenerationRequest(tag=index, prompt=pack_tokens(prompt), seed=first_seed + index, max_new_tokens=length)
        )
    num_tokens = 0
    while engine.num_running or engine.num_queued:
        num_tokens += sum(ended.part.num_tokens for ended in engine.step().ended)
    if num_tokens != workload.num_tokens:
        raise RuntimeError(f"the engine made {num_tokens} tokens of {workload.num_tokens}")


def _generate_all(generator: _Generator, workload: Workload, chunk_size: int) -> None:
    for begin in range(0, len(workload.prompts), chunk_size):
        prompts = workload.prompts[begin : begin + chunk_size]
        num_new = max(workload.lengths[begin : begin + chunk_size])
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[PAD_ID] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            generated = generator.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=num_new,
                eos_token_id=None,
                pad_token_id=PAD_ID,
                return_dict_in_generate=True,
                output_logits=True,
            )
            drawn = generated.sequences[:, longest:, None]
            logprobs = torch.log_softmax(torch.stack(generated.logits, dim=1), -1).gather(2, drawn)
        if logprobs.shape != (len(prompts), num_new, 1):
            raise RuntimeError(f"generate made log-probs of shape {list(logprobs.shape)}")


def _print(report: EngineReport) -> None:
    table = Table(title=f"Embedded engine against transformers' generate, size {report.model.upper()}, one thread")
    for heading in ("case", "tokens", "generate tokens/CPU-s", "engine tokens/CPU-s", "ratio", "required"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for case in report.cases:
        rates = ", ".join(f"{case.num_tokens / s:,.0f}" for s in case.generate_cpu_s.values())
        table.add_row(
            case.name,
            f"{case.num_tokens:,}",
            rates,
            f"{case.num_tokens / case.engine_cpu_s:,.0f}",
            f"[{'green' if case.passed else 'red'}]{case.ratio:.1f}×",
            "" if case.required_ratio is None else f"≥ {case.required_ratio:g}×",
        )
    console = Console()
    console.print(table)
    if not report.passed:
        console.print("a claim does not hold here; with other load on the machine, ask for more repetitions")


def main(argv: list[str] | None = None) -> int:
    """``penstock bench engine``; 1 when a claim does not hold on this machine."""
    parser = argparse.ArgumentParser(prog="penstock bench engine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=("xs", "s", "m"), default="s", help="of the made model (default: s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="of equal lengths")
    parser.add_argument("--new-tokens", type=int, default=64, help="per response of equal length (default: 64)")
    parser.add_argument("--slots", type=int, default=64, help="of the engine, quickstart's batch (default: 64)")
    parser.add_argument("--repetitions", type=int, default=3, help="of each measurement (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="write the report here as JSON")
    options = parser.parse_args(argv)
    report = run(
        size=options.size,
        batches=options.batches,
        new_tokens=options.new_tokens,
        num_slots=options.slots,
        repetitions=options.repetitions,
        seed=options.seed,
        output=options.output,
    )
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
