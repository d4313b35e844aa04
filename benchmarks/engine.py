"""The embedded engine against transformers' ``generate`` and continuous batching, all with log-probs: tokens per CPU
second, one thread.

Cases: batches in which every response has the same length, and the long-tailed lengths of the quickstart's task, where
only the tokens that a response wants are counted. The latter are taken in two ways: 256 rows at even quantiles of the
task's lengths, so that no draw decides how long the tail is, decoded side by side on both sides; and one batch of the
quickstart as it comes (32 prompts with 8 samples each, the engine's usual 64 slots), whose tail is shorter and for
which nothing is claimed.

How it is measured:

* Both sides in one process with one thread, in turn. CPU time and not wall time, so that other load on the machine does
  not count; ratios within one run are what is claimed.
* Lengths are forced (no end token, a limit per request), so both sides make the same number of useful tokens.
* ``generate`` decodes a batch until its longest response has ended. It may take the requests all at once or in chunks
  of the engine's slots, in the order of their arrival; the faster of the two is compared with.
* Transformers' continuous batching takes the long-tailed requests, with pages and batches of the sizes that were the
  quickest of those tried on two cores; its start is not counted.
* The engine's generic path (:mod:`penstock.backends.engines.torch.generic`) makes the same tokens of the same model.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3ForCausalLM

from penstock.backends.checkpoint.make import PAD_ID, SYMBOLS, character_tokenizer, make_model
from penstock.backends.checkpoint.model_config import read_model_config
from penstock.backends.checkpoint.tensors import CheckpointTensors
from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.data.lines import LinesRow, lines_row
from penstock.backends.engines.torch.engine import TorchEngine
from penstock.backends.engines.torch.engine_settings import EngineSettings
from penstock.backends.engines.torch.generic import GenericEngine
from penstock.backends.engines.torch.generic_config import GenericConfig
from penstock.backends.engines.torch.requests import GenerationRequest
from penstock.benchmarks._harness import Benchmark, Measured, claim, figures, interleaved, pairs, plain_figure
from penstock.messages.arrays import pack_tokens

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from contextlib import AbstractContextManager

QUICK: Final = ("--batches", "8", "--repetitions", "1")
QUICK_S: Final = 40
REQUIRED_EQUAL: Final = 2.0
REQUIRED_LONG_TAILED: Final = 6.0
REQUIRED_CONTINUOUS: Final = 2.5
"""Times transformers' continuous batching."""
SAMPLES_PER_GROUP: Final = 8
PROMPT_TOKENS: Final = 16
NUM_ROWS: Final = 20_480
"""Rows of the task whose lengths stand for all."""
MAX_CONTEXT: Final = 512
PAGE_TOKENS: Final = 128
BATCH_TOKENS: Final = 512
"""Of transformers' continuous batching."""
RESULT_TIMEOUT_S: Final = 120.0
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
    is_long_tailed: bool = False

    @property
    def num_tokens(self) -> int:
        """That the responses want."""
        return sum(self.lengths)


class _Generated(Protocol):
    sequences: torch.Tensor
    logits: tuple[torch.Tensor, ...]


class _Output(Protocol):
    request_id: str
    generated_tokens: list[int]
    logprobs: list[float]

    def is_finished(self) -> bool: ...


class _Manager(Protocol):
    def add_request(self, input_ids: list[int], *, max_new_tokens: int, eos_token_id: int) -> str: ...

    def get_result(self, *, timeout: float) -> _Output | None: ...


class _Generator(Protocol):
    """What is used of a transformers model."""

    def generate(self, **options: object) -> _Generated: ...

    def continuous_batching_context_manager(self, **options: object) -> AbstractContextManager[_Manager]: ...


def measure(given: argparse.Namespace) -> Measured:
    """Every case, its two sides in turn."""
    torch.set_num_threads(1)
    measured = Measured([], [])
    with tempfile.TemporaryDirectory() as name, quiet_transformers():
        folder = Path(name)
        make_model(given.size, folder, given.seed)
        generator = cast("_Generator", Qwen3ForCausalLM.from_pretrained(folder))  # pyright: ignore[reportUnknownMemberType]
        for workload in workloads_of(given):
            _measure(workload, folder, generator, given.repetitions, measured)
    return measured


def workloads_of(given: argparse.Namespace) -> list[Workload]:
    """The cases."""
    return [
        *(_equal_lengths(batch, given.new_tokens, given.seed) for batch in given.batches),
        _long_tailed(given.requests, given.seed),
        _quickstart_batch(given.requests // SAMPLES_PER_GROUP, SAMPLES_PER_GROUP, given.slots, given.seed),
    ]


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
        is_long_tailed=True,
    )


def _measure(workload: Workload, folder: Path, generator: _Generator, repetitions: int, measured: Measured) -> None:
    """Add one case: useful tokens per CPU second of both sides."""
    engine = _open_engine(folder, workload.num_slots)
    num_rounds = max(1, TIMED_TOKENS // workload.num_tokens)
    numbers = itertools.count()

    def rate(act: Callable[[], None]) -> float:
        began_s = time.process_time()
        for _ in range(num_rounds):
            act()
        return num_rounds * workload.num_tokens / (time.process_time() - began_s)

    arms = {
        f"generate, {size} at once": partial(rate, partial(_generate_all, generator, workload, size))
        for size in workload.chunk_sizes
    }
    arms["engine"] = partial(rate, lambda: _decode_all(engine, workload, next(numbers)))
    generic = _open_generic_engine(folder, workload.num_slots)
    arms["engine by transformers' layers"] = partial(rate, lambda: _decode_all(generic, workload, next(numbers)))
    if workload.is_long_tailed:
        arms["transformers' continuous batching"] = partial(_continuous_rate, generator, workload)
    turns = interleaved(arms, repetitions)
    found = figures(turns, "useful tokens/CPU-s", float, f"{workload.name}: {{}}")
    others, (ours, *compared) = found[: len(workload.chunk_sizes)], found[len(workload.chunk_sizes) :]
    fastest = max(others, key=lambda figure: figure.estimate.median)
    measured.figures.extend(found)
    continuous = REQUIRED_CONTINUOUS if workload.required_ratio else None
    for against, required in zip((fastest, *compared), (workload.required_ratio, None, continuous), strict=False):
        text, ratios = f"engine ÷ {against.name}", pairs(ours, against)
        if required is None:
            measured.figures.append(plain_figure(text, "×", ratios))
        else:
            measured.claims.append(claim(text, ratios, at_least=required))


def _continuous_rate(generator: _Generator, workload: Workload) -> float:
    """Useful tokens per CPU second of transformers' continuous batching, from the first request to the last answer."""
    sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=PAD_ID)  # type: ignore[no-untyped-call]
    pages = len(workload.prompts) * -(-MAX_CONTEXT // PAGE_TOKENS)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS, num_blocks=pages, max_batch_tokens=BATCH_TOKENS, return_logprobs=True,
        use_cuda_graph=False, allow_block_sharing=False,
    )  # fmt: skip
    with generator.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=batching, warmup=False
    ) as manager:
        began_s = time.process_time()
        wanted = {
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1): length
            for prompt, length in zip(workload.prompts, workload.lengths, strict=True)
        }
        while wanted:
            output = manager.get_result(timeout=RESULT_TIMEOUT_S)
            if output is None:
                raise RuntimeError(f"transformers' continuous batching did not answer {len(wanted)} requests")
            if output.is_finished():
                length = wanted.pop(output.request_id)
                if not len(output.generated_tokens) == len(output.logprobs) == length:
                    raise RuntimeError(f"{len(output.generated_tokens)} tokens came where {length} were wanted")
        return workload.num_tokens / (time.process_time() - began_s)


def _open_engine(folder: Path, num_slots: int) -> TorchEngine:
    settings = EngineSettings(num_slots=num_slots, max_context=MAX_CONTEXT)
    engine = TorchEngine(read_model_config(folder), settings)
    with CheckpointTensors(folder) as tensors:
        engine.load(tensors, version=0)
    return engine


def _open_generic_engine(folder: Path, num_slots: int) -> GenericEngine:
    read = read_model_config(folder)
    config = GenericConfig(
        folder=folder, vocab_size=read.vocab_size, max_positions=read.max_positions, reason="it is compared"
    )
    engine = GenericEngine(config, EngineSettings(num_slots=num_slots, max_context=MAX_CONTEXT))
    with CheckpointTensors(folder) as tensors:
        engine.load(tensors, version=0)
    return engine


def _decode_all(engine: TorchEngine | GenericEngine, workload: Workload, repetition: int) -> None:
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


def main(argv: list[str] | None = None) -> int:
    """``penstock bench engine``; 1 when a claim does not hold on this machine."""
    benchmark = Benchmark(__file__, __doc__, repetitions=5)
    benchmark.option("--size", choices=("xs", "s", "m"), default="s", help="of the made model (default: s)")
    benchmark.option("--batches", type=int, nargs="+", default=[1, 8, 32], help="of equal lengths")
    benchmark.option("--new-tokens", type=int, default=64, help="per response of equal length (default: 64)")
    benchmark.option("--requests", type=int, default=256, help="of the long-tailed cases, a multiple of 8")
    benchmark.option("--slots", type=int, default=64, help="of the engine, quickstart's batch (default: 64)")
    benchmark.option("--seed", type=int, default=0, help="of weights, prompts and draws")
    return benchmark.run(argv, measure)


if __name__ == "__main__":
    raise SystemExit(main())
