"""A SGLang server driven by Penstock against the same one driven by SGLang's own benchmark client: tokens per second.

How it is measured:

* One server, prompts and responses of fixed lengths, so many requests open at once. The clients take turns in short
  runs, each with an empty prefix cache and once warm; the time is from the first request to the last answer.
* ``bench_serving`` stays up in a process of SGLang's environment and is called three ways: as it comes (every token
  streamed, no log-probs); with log-probs and whole answers; and with Penstock's own requests (log-probs, streamed in
  steps).
* Penstock needs log-probs, so what is claimed is the ratio to the faster of the two ways with log-probs, each the
  median over repetitions of the ratio of runs next to each other. The way without them is shown beside it.
* On a GPU the ratio is that of tokens per second. A CPU server shares its cores with its clients and with whatever else
  runs, so there it is that of tokens per CPU second, of all processes of the server and of the client together; tokens
  per second are shown as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import secrets
import statistics
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.backends.checkpoint.hf_config import HfConfig, read_config
from penstock.backends.checkpoint.make import make_model
from penstock.backends.engines.served.base.calls import GenerateCall
from penstock.backends.engines.served.base.http import ServerHttp
from penstock.backends.engines.served.base.launched import LaunchedServer
from penstock.backends.engines.served.sglang.control import SglangControl
from penstock.backends.engines.served.sglang.environment import device_name, find_environment
from penstock.backends.engines.served.sglang.generate import SglangGenerator
from penstock.backends.engines.served.sglang.server_options import command_line, defaults, merged
from penstock.backends.engines.served.sglang.settings import SglangSettings
from penstock.benchmarks._bench_serving import RUN_TIMEOUT_S, WAYS, WITH_LOGPROBS, Load, Target, bench_serving
from penstock.benchmarks._progress import in_turn
from penstock.messages.arrays import pack_tokens
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from penstock.backends.engines.options import OptionValue

QUICK: Final = ("--requests", "16", "--repetitions", "3")
QUICK_S: Final = 150
REQUIRED_RATIO: Final = 0.95
START_TIMEOUT_S: Final = 600.0
PENSTOCK: Final = "penstock"
CPU_OPTIONS: Final[dict[str, OptionValue]] = {
    "dtype": "float32",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 32768,
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One client, once."""

    tokens_per_s: float
    server_cpu_us: float
    """Per token, all processes of the server."""
    client_cpu_us: float
    """Per token."""

    def cost(self, *, by_cpu: bool) -> float:
        """Microseconds per token, of CPU or of wall time."""
        return self.server_cpu_us + self.client_cpu_us if by_cpu else 1e6 / self.tokens_per_s


class ClientReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of the benchmark found."""

    server: str
    load: Load
    machine: str
    num_cpus: int
    runs: dict[str, list[Run]]
    """By client, one for each repetition."""
    by_cpu: bool
    """Whether tokens per CPU second are compared, not tokens per second."""
    required_ratio: float = REQUIRED_RATIO

    def ratio_to(self, client: str, *, by_cpu: bool) -> float:
        """Penstock ÷ it, the median over repetitions."""
        pairs = zip(self.runs[PENSTOCK], self.runs[client], strict=True)
        return statistics.median(theirs.cost(by_cpu=by_cpu) / ours.cost(by_cpu=by_cpu) for ours, theirs in pairs)

    @property
    def ratio(self) -> float:
        """The one that counts."""
        return min(self.ratio_to(way, by_cpu=self.by_cpu) for way in WITH_LOGPROBS)

    @property
    def passed(self) -> bool:
        """Whether the claim holds."""
        return self.ratio >= self.required_ratio


async def run(load: Load, *, repetitions: int, target: Target | None = None, seed: int = 0) -> ClientReport:
    """Drive a server in turns; without a target, one of a made model that is started for it.

    Raises:
        UserFault: a client did not do its work, or there is no environment with SGLang.
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
        settings = SglangSettings(
            python=environment.python,
            model_folder=model_folder,
            options=tuple(command_line(options)),
            admin_api_key=secrets.token_hex(16),
            log_path=Path(folder) / "server.log",
            start_timeout_s=START_TIMEOUT_S,
            on_cpu=environment.is_cpu,
        )
        server = await LaunchedServer.launch(settings)
        try:
            await server.wait_ready()
            pid = next(process.pid for process in server.processes if process.name == "main")
            yield Target(server.address, settings.admin_api_key, model_folder, environment, pid)
        finally:
            await server.end()


async def _measure(target: Target, load: Load, repetitions: int, seed: int) -> ClientReport:
    http = ServerHttp(target.url, admin_api_key=target.admin_api_key)
    try:
        info = await SglangControl(http).server_info()
        config = read_config(target.model_folder, HfConfig)
        generator = SglangGenerator(
            http,
            vocab_size=config.vocab_size,
            incremental=info.incremental_streaming,
            stream_interval=load.stream_interval,
        )
        async with bench_serving(target) as bench:
            # What is slow the first time is so for none of the runs that count; these have no warm-up of their own,
            # because its CPU time would count.
            await _drive(generator, load, config.vocab_size, seed)
            for way in in_turn(WAYS, "{}, once before anything counts".format):
                await bench.drive(load, way, seed)
            runs: dict[str, list[Run]] = {client: [] for client in (PENSTOCK, *WAYS)}
            order = list(runs)
            for repetition in range(repetitions):
                for client in in_turn(order, f"{{}}, repetition {repetition + 1} of {repetitions}".format):
                    if client == PENSTOCK:
                        await SglangControl(http).flush_cache(wait_s=60.0)
                        work, pid = _drive(generator, load, config.vocab_size, seed + repetition), os.getpid()
                    else:
                        work, pid = bench.drive(load, client, seed + repetition), bench.pid
                    runs[client].append(await _counted(work, load, server_pid=target.pid, client_pid=pid))
                # Back and forth, so that a load that grows or shrinks favours none.
                order.reverse()
    finally:
        await http.close()
    return ClientReport(
        server=f"SGLang {info.version} on {device_name(is_cpu=target.environment.is_cpu)}",
        load=load,
        machine=f"{platform.machine()} {platform.system()}",
        num_cpus=os.cpu_count() or 1,
        runs=runs,
        by_cpu=target.environment.is_cpu,
    )


async def _counted(work: Coroutine[None, None, float], load: Load, *, server_pid: int, client_pid: int) -> Run:
    """One run, with the CPU time that it took of both sides."""
    pids = _with_children(server_pid)
    before, client_before = sum(map(_cpu_s, pids)), _cpu_s(client_pid)
    rate = await work
    us = 1e6 / load.num_tokens
    return Run(
        tokens_per_s=rate,
        server_cpu_us=(sum(map(_cpu_s, pids)) - before) * us,
        client_cpu_us=(_cpu_s(client_pid) - client_before) * us,
    )


def _with_children(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {int(entry.name): int(_stat(int(entry.name))[1]) for entry in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found


def _cpu_s(pid: int) -> float:
    """User and system time of one process so far."""
    return (int(_stat(pid)[11]) + int(_stat(pid)[12])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; a process that is gone has no parent and took no time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0", *["0"] * 20]


async def _drive(generator: SglangGenerator, load: Load, vocab_size: int, seed: int) -> float:
    """Tokens per second."""
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
            raise UserFault(f"request {call.rid} ended as {generated.end}: {generated.detail}")
        return num_tokens

    begun = time.perf_counter()
    total = sum(await asyncio.gather(*(one(index, load.new_tokens) for index in range(load.num_requests))))
    return total / (time.perf_counter() - begun)


def _print(report: ClientReport) -> None:
    load = report.load
    title = (
        f"{report.server}: {load.num_requests} requests, {load.prompt_tokens} + {load.new_tokens} tokens, "
        f"{load.concurrency} at once"
    )
    table = Table(title=title)
    for heading in ("driven by", "tokens/s", "CPU µs/token, server + client", "ratio of tokens/s", "per CPU second"):
        table.add_column(heading, justify="left" if heading == "driven by" else "right")
    for client, runs in report.runs.items():
        server, own = (
            statistics.median(run.server_cpu_us for run in runs),
            statistics.median(run.client_cpu_us for run in runs),
        )
        ratios = ("", "") if client == PENSTOCK else (report.ratio_to(client, by_cpu=by) for by in (False, True))
        figures = [ratio if isinstance(ratio, str) else f"{ratio:.2f}" for ratio in ratios]
        rate = statistics.median(run.tokens_per_s for run in runs)
        table.add_row(client, f"{rate:,.0f}", f"{server:.0f} + {own:.1f}", *figures)
    console = Console()
    console.print(table)
    colour = "green" if report.passed else "red"
    what = "CPU second" if report.by_cpu else "second"
    console.print(
        f"medians; against the faster way with log-probs, tokens per {what}: [{colour}]{report.ratio:.2f}[/] "
        f"(required ≥ {report.required_ratio:g})"
    )


def main(argv: list[str] | None = None) -> int:
    """``penstock bench sglang_client``; 1 when the claim does not hold on this machine."""
    parser = argparse.ArgumentParser(
        prog="penstock bench sglang_client", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--requests", type=int, default=64, help="of each client and repetition (default: 64)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=16, help="requests open at once (default: 16)")
    parser.add_argument("--stream-interval", type=int, default=64, help="tokens between two events (default: 64)")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", default="", help="of a running server on this machine (default: one is started)")
    parser.add_argument("--model", type=Path, default=None, help="folder of the model that it serves")
    parser.add_argument("--pid", type=int, default=0, help="of its first process")
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
        if options.model is None or not options.pid:
            raise UserFault(
                "--url needs --model, the folder of the model that the server serves, and --pid, its process"
            )
        key = os.environ.get("SGLANG_ADMIN_API_KEY", "")
        target = Target(options.url, key, options.model.resolve(), find_environment(), options.pid)
    report = asyncio.run(run(load, repetitions=options.repetitions, target=target, seed=options.seed))
    if options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    _print(report)
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
