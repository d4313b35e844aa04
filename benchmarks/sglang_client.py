"""A SGLang server driven by Penstock against the same one driven by SGLang's own benchmark client: tokens per second.

How it is measured:

* One server, prompts and responses of fixed lengths, so many requests open at once. The clients take turns, each with
  an empty prefix cache and after a warm-up; a client's time is from its first request to its last answer.
* ``bench_serving`` runs in its own process and environment in three ways: as it comes (every token streamed, no
  log-probs); with log-probs and whole answers; and with Penstock's own requests (log-probs, streamed in steps).
* Penstock needs log-probs, so the ratio claimed is that to the fastest way with log-probs, by repetition; the median
  counts. The way without them is shown beside it.

A CPU server shares its cores with its clients: there the ratio counts what a client costs, and not only whether it
keeps up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import statistics
import subprocess
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.backends.engines.sglang.control import SglangControl
from penstock.backends.engines.sglang.environment import device_name, find_environment
from penstock.backends.engines.sglang.generate import GenerateCall, SglangGenerator
from penstock.backends.engines.sglang.http import SglangHttp
from penstock.backends.engines.sglang.server import SglangServer
from penstock.backends.engines.sglang.server_options import command_line, defaults, merged
from penstock.backends.engines.sglang.settings import ServerSettings
from penstock.backends.models.make import make_model
from penstock.messages.arrays import pack_tokens
from penstock.runtime.errors import UserError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from penstock.backends.engines.options import OptionValue
    from penstock.backends.engines.sglang.environment import SglangEnvironment

REQUIRED_RATIO: Final = 0.95
START_TIMEOUT_S: Final = 600.0
RUN_TIMEOUT_S: Final = 900.0
PENSTOCK: Final = "penstock"
AS_IT_COMES: Final = "bench_serving, as it comes"
WHOLE_ANSWERS: Final = "bench_serving, log-probs, whole answers"
SAME_REQUESTS: Final = "bench_serving, the same requests"
WITH_LOGPROBS: Final = (WHOLE_ANSWERS, SAME_REQUESTS)
CPU_OPTIONS: Final[dict[str, OptionValue]] = {
    "dtype": "float32",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 32768,
}
NO_DATASETS: Final = '''"""Stands in for a package that random prompts do not need."""


def load_dataset(*_: object, **__: object) -> object:
    raise ImportError("the package datasets is not in this environment")
'''


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What every client has to do."""

    num_requests: int = 96
    prompt_tokens: int = 64
    new_tokens: int = 256
    concurrency: int = 16
    stream_interval: int = 64

    @property
    def num_tokens(self) -> int:
        """That all responses have together."""
        return self.num_requests * self.new_tokens


class Target(NamedTuple):
    """The server that all drive."""

    url: str
    admin_api_key: str
    model_folder: Path
    environment: SglangEnvironment


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of the benchmark found."""

    server: str
    load: Load
    machine: str
    num_cpus: int
    tokens_per_s: dict[str, list[float]]
    """By client, one figure for each repetition."""
    penstock_cpu_us_per_token: float
    ratios: list[float]
    """Penstock ÷ the fastest way with log-probs, one for each repetition."""
    required_ratio: float = REQUIRED_RATIO

    @property
    def ratio(self) -> float:
        """The one that counts."""
        return statistics.median(self.ratios)

    @property
    def passed(self) -> bool:
        """Whether the claim holds."""
        return self.ratio >= self.required_ratio


class _Config(msgspec.Struct):
    vocab_size: int


class _BenchLine(msgspec.Struct):
    """What ``bench_serving`` writes of a run."""

    duration: float
    completed: int
    total_output_tokens: int


async def run(load: Load, *, repetitions: int, target: Target | None = None, seed: int = 0) -> ClientReport:
    """Drive a server in turns; without a target, one of a made model that is started for it.

    Raises:
        UserError: a client did not do its work.
        SglangEnvironmentError: there is no environment with SGLang.
    """
    if target is not None:
        return await _measure(target, load, repetitions, seed)
    async with _own_server(load) as own:
        return await _measure(own, load, repetitions, seed)


@asynccontextmanager
async def _own_server(load: Load) -> AsyncGenerator[Target]:
    environment = find_environment()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        model_folder = Path(folder) / "model"
        make_model("s", model_folder, seed=0)
        ours: dict[str, OptionValue] = {
            "max_running_requests": load.concurrency,
            "incremental_streaming_output": True,
        }
        small = CPU_OPTIONS if environment.is_cpu else {}
        options = merged(defaults(is_cpu=environment.is_cpu), small, ours)
        settings = ServerSettings(
            python=environment.python,
            model_folder=model_folder,
            options=tuple(command_line(options)),
            admin_api_key=secrets.token_hex(16),
            log_path=Path(folder) / "server.log",
            start_timeout_s=START_TIMEOUT_S,
            on_cpu=environment.is_cpu,
        )
        server = await SglangServer.launch(settings)
        try:
            await server.wait_ready()
            yield Target(server.address, settings.admin_api_key, model_folder, environment)
        finally:
            await server.end()


async def _measure(target: Target, load: Load, repetitions: int, seed: int) -> ClientReport:
    http = SglangHttp(target.url, admin_api_key=target.admin_api_key)
    try:
        info = await SglangControl(http).server_info()
        config = msgspec.json.decode((target.model_folder / "config.json").read_bytes(), type=_Config)
        generator = SglangGenerator(
            http,
            vocab_size=config.vocab_size,
            incremental=info.incremental_streaming,
            stream_interval=load.stream_interval,
        )
        cpu_us: list[float] = []
        rates: dict[str, list[float]] = {PENSTOCK: [], AS_IT_COMES: [], WHOLE_ANSWERS: [], SAME_REQUESTS: []}
        order = list(rates)
        for repetition in range(repetitions):
            for client in order:
                if client == PENSTOCK:
                    await SglangControl(http).flush_cache(wait_s=60.0)
                    rate, us = await _drive(generator, load, config.vocab_size, seed + repetition)
                    cpu_us.append(us)
                else:
                    rate = await asyncio.to_thread(_bench_serving, target, load, client, seed + repetition)
                rates[client].append(rate)
            # Each goes first once, so that none always follows the same other.
            order.append(order.pop(0))
    finally:
        await http.close()
    return ClientReport(
        server=f"SGLang {info.version} on {device_name(is_cpu=target.environment.is_cpu)}",
        load=load,
        machine=f"{platform.machine()} {platform.system()}",
        num_cpus=os.cpu_count() or 1,
        tokens_per_s=rates,
        penstock_cpu_us_per_token=statistics.median(cpu_us),
        ratios=[rates[PENSTOCK][i] / max(rates[way][i] for way in WITH_LOGPROBS) for i in range(repetitions)],
    )


async def _drive(generator: SglangGenerator, load: Load, vocab_size: int, seed: int) -> tuple[float, float]:
    """Tokens per second, and microseconds of this process's CPU for each."""
    draw = random.Random(seed)
    name = secrets.token_hex(4)
    open_requests = asyncio.Semaphore(load.concurrency)

    async def one(index: int, num_tokens: int) -> int:
        # As bench_serving makes them: ids that follow one another, from anywhere.
        first = draw.randrange(vocab_size)
        call = GenerateCall(
            rid=f"{name}-{index}-{num_tokens}",
            input_ids=pack_tokens((first + j) % vocab_size for j in range(load.prompt_tokens)),
            max_new_tokens=num_tokens,
            ignore_eos=True,
            extra_key=name,
            deadline_s=RUN_TIMEOUT_S,
        )
        async with open_requests:
            generated = await generator.generate(call, lambda _: None)
        if len(generated.tokens) != 4 * num_tokens:
            raise UserError(f"request {call.rid} ended as {generated.end}: {generated.detail}")
        return num_tokens

    await one(-1, 16)
    begun, cpu = time.perf_counter(), time.process_time()
    total = sum(await asyncio.gather(*(one(index, load.new_tokens) for index in range(load.num_requests))))
    took_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    return total / took_s, cpu_s / total * 1e6


def _bench_serving(target: Target, load: Load, way: str, seed: int) -> float:
    """Tokens per second."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        (folder / "datasets.py").write_text(NO_DATASETS)
        output = folder / "result.jsonl"
        command = [
            *(str(target.environment.python), "-m", "sglang.bench_serving", "--backend", "sglang"),
            *("--base-url", target.url, "--model", str(target.model_folder), "--tokenizer", str(target.model_folder)),
            *("--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1"),
            *("--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.new_tokens)),
            *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)),
            *("--temperature", "1.0", "--seed", str(seed), "--flush-cache", "--disable-tqdm"),
            *("--output-file", str(output)),
            *WAYS[way](load),
        ]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            **target.environment.variables,
            "OPENAI_API_KEY": target.admin_api_key,
        }
        if not _has_datasets(target.environment):
            environment["PYTHONPATH"] = str(folder)
        ran = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
        )
        if ran.returncode or not output.exists():
            raise UserError(f"bench_serving ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-2000:]}")
        # It writes Infinity, which JSON does not have and only the standard library reads.
        line = msgspec.convert(json.loads(output.read_text().splitlines()[-1]), _BenchLine)
    if line.completed != load.num_requests or line.total_output_tokens != load.num_tokens:
        raise UserError(f"bench_serving completed {line.completed} of {load.num_requests} requests")
    return line.total_output_tokens / line.duration


def _same_requests(load: Load) -> list[str]:
    sampling = {
        "max_new_tokens": load.new_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream_interval": load.stream_interval,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    body = msgspec.json.encode({"sampling_params": sampling}).decode()
    return ["--return-logprob", "--extra-request-body", body]


def _whole_answers(_: Load) -> list[str]:
    return ["--return-logprob", "--disable-stream"]


def _as_it_comes(_: Load) -> list[str]:
    return []


WAYS: Final[dict[str, Callable[[Load], list[str]]]] = {
    AS_IT_COMES: _as_it_comes,
    WHOLE_ANSWERS: _whole_answers,
    SAME_REQUESTS: _same_requests,
}


def _has_datasets(environment: SglangEnvironment) -> bool:
    """Whether ``bench_serving`` can be imported: it imports a package that the CPU environment leaves out."""
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('datasets') is None)"
    command = [str(environment.python), "-I", "-c", check]
    return subprocess.run(command, timeout=60, check=False).returncode == 0


def _print(report: ClientReport) -> None:
    load = report.load
    title = (
        f"{report.server}: {load.num_requests} requests, {load.prompt_tokens} + {load.new_tokens} tokens, "
        f"{load.concurrency} at once"
    )
    table = Table(title=title)
    for heading in ("driven by", "tokens/s, median", "of", "Penstock ÷ it, median"):
        table.add_column(heading, justify="left" if heading == "driven by" else "right")
    ours = report.tokens_per_s[PENSTOCK]
    for client, rates in report.tokens_per_s.items():
        pairs = [a / b for a, b in zip(ours, rates, strict=True)]
        figures = ", ".join(f"{rate:,.0f}" for rate in rates)
        ratio = "" if client == PENSTOCK else f"{statistics.median(pairs):.2f}"
        table.add_row(client, f"{statistics.median(rates):,.0f}", figures, ratio)
    console = Console()
    console.print(table)
    colour = "green" if report.passed else "red"
    console.print(
        f"against the fastest way with log-probs: [{colour}]{report.ratio:.2f}[/] "
        f"(required ≥ {report.required_ratio:g}); "
        f"Penstock's client takes {report.penstock_cpu_us_per_token:.1f} µs of CPU a token"
    )


def main(argv: list[str] | None = None) -> int:
    """``penstock bench sglang_client``; 1 when the claim does not hold on this machine."""
    parser = argparse.ArgumentParser(
        prog="penstock bench sglang_client", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--requests", type=int, default=96, help="of each client and repetition (default: 96)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=16, help="requests open at once (default: 16)")
    parser.add_argument("--stream-interval", type=int, default=64, help="tokens between two events (default: 64)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", default="", help="of a running server on this machine (default: one is started)")
    parser.add_argument("--model", type=Path, default=None, help="folder of the model that it serves")
    parser.add_argument("--output", type=Path, default=None, help="write the report here as JSON")
    options = parser.parse_args(argv)
    load = Load(
        num_requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        concurrency=options.concurrency,
        stream_interval=options.stream_interval,
    )
    target = None
    if options.url:
        if options.model is None:
            raise UserError("--url needs --model, the folder of the model that the server serves")
        key = os.environ.get("SGLANG_ADMIN_API_KEY", "")
        target = Target(options.url, key, options.model.resolve(), find_environment())
    report = asyncio.run(run(load, repetitions=options.repetitions, target=target, seed=options.seed))
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    _print(report)
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
