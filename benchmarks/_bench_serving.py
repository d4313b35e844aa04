"""SGLang's own benchmark client, ``bench_serving``, kept up in a process of its environment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncGenerator, Callable

    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

RUN_TIMEOUT_S: Final = 900.0
AS_IT_COMES: Final = "bench_serving, as it comes"
WHOLE_ANSWERS: Final = "bench_serving, log-probs, whole answers"
SAME_REQUESTS: Final = "bench_serving, the same requests"
WITH_LOGPROBS: Final = (WHOLE_ANSWERS, SAME_REQUESTS)
NO_DATASETS: Final = '''"""Stands in for a package that random prompts do not need."""


def load_dataset(*_: object, **__: object) -> object:
    raise ImportError("the package datasets is not in this environment")
'''

RESIDENT: Final = """
import json, os, sys
told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from sglang.benchmark import serving
for line in sys.stdin:
    sys.argv = ["bench_serving", *json.loads(line)]
    serving.cli_main()
    print("done", file=told, flush=True)
"""
"""In SGLang's environment: runs ``bench_serving`` with every list of arguments that comes in."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What every client has to do."""

    num_requests: int = 64
    prompt_tokens: int = 64
    new_tokens: int = 128
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
    pid: int
    """Of its first process, on this machine."""


class _BenchResult(msgspec.Struct):
    """What ``bench_serving`` writes of a run."""

    duration: float
    completed: int


class BenchServing:
    """The client; a run of it costs no start."""

    def __init__(self, target: Target, process: Process, folder: Path) -> None:
        self._target = target
        self._process = process
        self._folder = folder
        self._num_runs = 0
        self.pid = process.pid

    async def drive(self, load: Load, way: str, seed: int) -> float:
        """Tokens per second.

        Raises:
            UserFault: it did not do its work.
        """
        self._num_runs += 1
        output = self._folder / f"{self._num_runs}.jsonl"
        model = str(self._target.model_folder)
        arguments = [
            *("--backend", "sglang", "--base-url", self._target.url, "--model", model, "--tokenizer", model),
            *("--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1"),
            *("--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.new_tokens)),
            *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)),
            *("--temperature", "1.0", "--seed", str(seed), "--flush-cache", "--disable-tqdm"),
            *("--warmup-requests", "0"),
            *("--output-file", str(output)),
            *WAYS[way](load),
        ]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(arguments) + b"\n")
        async with asyncio.timeout(RUN_TIMEOUT_S):
            told = await self._process.stdout.readline()
        if told != b"done\n":
            log = (self._folder / "log").read_text()
            raise UserFault(f"bench_serving ended before its work was done: {log[-2000:]}")
        # It writes Infinity, which JSON does not have and only the standard library reads.
        result = msgspec.convert(json.loads(output.read_text().splitlines()[-1]), _BenchResult)
        if result.completed != load.num_requests:
            raise UserFault(f"bench_serving completed {result.completed} of {load.num_requests} requests")
        # Its own count of tokens stops at the last event with text in it; the lengths are forced.
        return load.num_tokens / result.duration


@asynccontextmanager
async def bench_serving(target: Target) -> AsyncGenerator[BenchServing]:
    """Up for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        (folder / "datasets.py").write_text(NO_DATASETS)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
            **target.environment.variables,
            "OPENAI_API_KEY": target.admin_api_key,
        }
        if not _has_datasets(target.environment):
            environment["PYTHONPATH"] = str(folder)
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(str(target.environment.python), "-c", RESIDENT),
                env=environment, cwd=folder, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
            )  # fmt: skip
        try:
            yield BenchServing(target, process, folder)
        finally:
            process.kill()
            await process.wait()


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
