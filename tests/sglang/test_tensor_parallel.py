"""One server over several processes, and over several nodes: the same tokens, and one death for all."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest
from running_server import settings_for

from penstock.backends.engines.served.base.launched import LaunchedServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from running_server import RunningServer

    from penstock.backends.engines.served.sglang.environment import SglangEnvironment
    from penstock.backends.engines.served.sglang.settings import SglangSettings

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
WAIT_S = 120.0
PROMPTS = ([5, 6, 7], [100, 3, 44, 9, 12], list(range(10, 80)))


class Reply(msgspec.Struct):
    """What counts of an answer."""

    output_ids: list[int]


@asynccontextmanager
async def ready(*nodes: SglangSettings) -> AsyncGenerator[list[LaunchedServer]]:
    """A server on all its nodes."""
    servers = [await LaunchedServer.launch(node) for node in nodes]
    try:
        await asyncio.gather(*(server.wait_ready() for server in servers))
        yield servers
    finally:
        for server in servers:
            assert await server.end() == []


async def greedy(address: str) -> list[list[int]]:
    """The likeliest tokens after each prompt."""
    answers: list[list[int]] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
        for prompt in PROMPTS:
            sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling}
            async with session.post(f"{address}/generate", json=body) as reply:
                reply.raise_for_status()
                answers.append(msgspec.json.decode(await reply.read(), type=Reply).output_ids)
    return answers


@pytest.fixture
def over_two(environment: SglangEnvironment, tiny_model: Callable[..., Path], tmp_path: Path) -> SglangSettings:
    """A server with two schedulers, each on a core of its own."""
    # One NUMA node has to be told which cores are whose; the stand-in for triton knows nothing of compilation.
    variables = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
    return replace(settings_for(environment, tiny_model(), tmp_path, {"tp_size": 2}), environment=variables)


def test_two_processes_make_the_tokens_of_one(over_two: SglangSettings, server: RunningServer) -> None:
    async def run() -> None:
        async with ready(over_two) as [two]:
            names = {process.name for process in two.processes}
            assert {"scheduler_TP0", "scheduler_TP1"} <= names
            assert await greedy(two.address) == await greedy(server.address)

    asyncio.run(run())


def test_two_nodes_make_the_tokens_of_one_and_die_as_one(
    over_two: SglangSettings, server: RunningServer, unused_port: Callable[[], int]
) -> None:
    meeting_place = f"127.0.0.1:{unused_port()}"
    nodes = [
        replace(
            over_two, num_nodes=2, node_rank=rank, dist_init_address=meeting_place,
            log_path=over_two.log_path.with_name(f"node-{rank}.log"),
        )
        for rank in range(2)
    ]  # fmt: skip

    async def run() -> None:
        async with ready(*nodes) as [first, second]:
            assert (first.port > 0, second.port) == (True, 0)
            assert await greedy(first.address) == await greedy(server.address)
            [scheduler] = [process for process in second.processes if process.name.startswith("scheduler")]
            os.kill(scheduler.pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                assert "scheduler_TP1" in (await second.ended).cause
                assert "scheduler_TP0" in (await first.ended).cause  # its group is broken

    asyncio.run(run())
