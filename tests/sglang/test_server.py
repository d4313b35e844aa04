"""The life of a real server: its processes, its death, and how each of its parts shows that it hangs."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, ParamSpec

import aiohttp
import pytest
from running_server import settings_for

from penstock.backends.engines.served.base.health import HealthChange, HealthLimits, HealthState
from penstock.backends.engines.served.base.http import ServerHttp
from penstock.backends.engines.served.base.launched import LaunchedServer, ServerStartError
from penstock.backends.engines.served.base.prober import Prober
from penstock.backends.engines.served.base.processes import Watch
from penstock.backends.engines.served.sglang.control import SglangControl
from penstock.backends.processes.process_facts import is_running, marked_processes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
    from pathlib import Path

    from running_server import RunningServer

    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = pytest.mark.sglang
Parameters = ParamSpec("Parameters")

WAIT_S = 60.0
LIMITS = HealthLimits(suspect_after_s=1.0, dead_after_s=6.0, cold_dead_after_s=6.0, stopped_dead_after_s=3.0)
"""Short, so that what must not be killed has every chance to be."""
WORKER = """
import asyncio, json, sys
from pathlib import Path
from penstock.backends.engines.served.base.launched import LaunchedServer
from penstock.backends.engines.served.sglang.settings import SglangSettings

async def main():
    fields = json.loads(sys.argv[1])
    paths = {name: Path(fields.pop(name)) for name in ("python", "model_folder", "log_path")}
    settings = SglangSettings(**fields, **paths)
    server = await LaunchedServer.launch(settings, report=lambda news: print(news, flush=True))
    await server.wait_ready()
    print("ready", flush=True)
    await server.ended

asyncio.run(main())
"""


def in_loop(test: Callable[Parameters, Coroutine[None, None, None]]) -> Callable[Parameters, None]:
    """A test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@contextmanager
def stopped(server: RunningServer, name: str) -> Generator[None]:
    """One of its processes is stopped meanwhile."""
    [pid] = [process.pid for process in server.handle.processes if process.name == name]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Probed:
    """A prober and the changes that it has told of."""

    def __init__(self, session: aiohttp.ClientSession, server: RunningServer, *, sees_processes: bool) -> None:
        self.session = session
        self.address = server.address
        self.headers = {"Authorization": f"Bearer {server.admin_api_key}"}
        self.changes: asyncio.Queue[HealthChange] = asyncio.Queue()
        self.http = ServerHttp(server.address, admin_api_key=server.admin_api_key)
        self.prober = Prober(
            SglangControl(self.http), self.changes.put_nowait, limits=LIMITS, interval_s=0.2,
            server=server.handle if sees_processes else None,
        )  # fmt: skip

    async def next_state(self) -> HealthState:
        async with asyncio.timeout(WAIT_S):
            return (await self.changes.get()).after

    def states_so_far(self) -> list[HealthState]:
        return [self.changes.get_nowait().after for _ in range(self.changes.qsize())]

    async def call(self, path: str, body: dict[str, object]) -> bytes:
        """One control call or a whole answer."""
        async with self.session.post(self.address + path, json=body, headers=self.headers) as reply:
            reply.raise_for_status()
            return await reply.read()

    async def generate(self, max_new_tokens: int) -> None:
        """A request whose tokens are told to the prober as they come."""
        body = {
            "input_ids": [5, 6, 7], "stream": True,
            "sampling_params": {"max_new_tokens": max_new_tokens, "ignore_eos": True},
        }  # fmt: skip
        self.prober.submitted()
        try:
            async with self.session.post(self.address + "/generate", json=body) as reply:
                async for _ in reply.content:
                    self.prober.token()
        finally:
            self.prober.finished()


@asynccontextmanager
async def probed(server: RunningServer, *, sees_processes: bool = False) -> AsyncGenerator[Probed]:
    """A server that is watched, by its answers alone or by its processes as well."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
        made = Probed(session, server, sees_processes=sees_processes)
        made.prober.start()
        try:
            assert await made.next_state() is HealthState.HEALTHY
            await made.generate(4)
            yield made
        finally:
            await made.prober.close()
            await made.http.close()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("main", "main process does not answer /ready"),
        ("scheduler", "scheduler does not answer /server_info"),
        ("detokenizer", "no token arrives though 1 request is in flight"),
    ],
)
@in_loop
async def test_each_part_that_hangs_is_found_by_its_silence(server: RunningServer, name: str, cause: str) -> None:
    async with probed(server) as watched:
        with stopped(server, name):
            request = asyncio.create_task(watched.generate(400))
            assert await watched.next_state() is HealthState.SUSPECT
            assert await watched.next_state() is HealthState.DEAD
            assert cause in watched.prober.health.cause
        with suppress(aiohttp.ClientError):  # on waking, the main process may close a connection as idle for too long
            await request
        await watched.generate(4)  # the server goes on as if nothing had been, for the next test


@in_loop
async def test_a_part_that_was_stopped_for_a_moment_is_healthy_again(server: RunningServer) -> None:
    async with probed(server) as watched:
        with stopped(server, "scheduler"):
            assert await watched.next_state() is HealthState.SUSPECT
        assert await watched.next_state() is HealthState.HEALTHY


@in_loop
async def test_a_stopped_process_of_ours_is_seen_without_a_request(server: RunningServer) -> None:
    async with probed(server, sees_processes=True) as watched:
        with stopped(server, "detokenizer"):
            assert await watched.next_state() is HealthState.SUSPECT
            assert await watched.next_state() is HealthState.DEAD
            assert watched.prober.health.cause == "a signal has stopped its detokenizer process"


@in_loop
async def test_a_paused_server_with_requests_is_not_killed(server: RunningServer) -> None:
    async with probed(server) as watched:
        request = asyncio.create_task(watched.generate(400))
        async with watched.prober.occupied("pause_generation", WAIT_S):
            await watched.call("/pause_generation", {"mode": "retract"})
        await asyncio.sleep(LIMITS.dead_after_s + LIMITS.suspect_after_s)  # this long it would not live unpaused
        async with watched.prober.occupied("continue_generation", WAIT_S):
            await watched.call("/continue_generation", {})
        await request
        assert HealthState.DEAD not in watched.states_so_far()
        assert watched.prober.state is HealthState.HEALTHY


@in_loop
async def test_a_server_that_works_as_hard_as_it_can_is_not_killed(server: RunningServer) -> None:
    async with probed(server) as watched:
        await asyncio.gather(*(watched.generate(150) for _ in range(32)))  # 16 run, the others wait
        assert HealthState.DEAD not in watched.states_so_far()
        assert watched.prober.state is HealthState.HEALTHY


@in_loop
async def test_a_slow_request_of_others_is_told_from_a_lost_one_by_a_request_of_our_own(server: RunningServer) -> None:
    async with probed(server) as watched:
        watched.prober.submitted()  # of which no token ever comes, though the way is free
        assert await watched.next_state() is HealthState.SUSPECT
        assert await watched.next_state() is HealthState.HEALTHY
        watched.prober.finished()


@in_loop
async def test_an_option_that_sglang_refuses_is_quoted(
    environment: SglangEnvironment, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    plain = settings_for(environment, tiny_model(), tmp_path)
    handle = await LaunchedServer.launch(replace(plain, options=(*plain.options, "--no-such-option")))
    with pytest.raises(ServerStartError, match="exit code 2; it said: unrecognized arguments: --no-such-option"):
        await handle.wait_ready()


# Once it is ready its processes end with their parent as well, so that what is asked here is asked at the first moment;
# a whole run of tests/sglang/test_sglang_runs.py leaves no process either.
@pytest.mark.parametrize(
    "moment", ["default HuggingFace chat template", pytest.param("ready", marks=pytest.mark.slow)]
)  # fmt: skip
def test_a_killed_worker_leaves_no_process(
    environment: SglangEnvironment, tiny_model: Callable[..., Path], tmp_path: Path, moment: str
) -> None:
    """At the first moment SGLang's processes are there, and do not yet end with their parent as they do later."""
    given = replace(settings_for(environment, tiny_model(), tmp_path), owner=secrets.token_hex(8))
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(asdict(given), default=str)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None
        assert any(moment in line for line in worker.stdout)
        processes = left_of(given.owner)
        assert len(processes) >= 4  # the guardian, and main, scheduler and detokenizer at least
        worker.kill()
        asyncio.run(all_ended(processes))
        assert not left_of(given.owner)
    finally:
        worker.kill()
        worker.communicate()


def left_of(owner: str) -> dict[int, int]:
    return marked_processes([f"PENSTOCK_SERVER_OWNER={owner}".encode()])


async def all_ended(processes: dict[int, int]) -> None:
    """Until each of these has ended, by the kernel's word."""
    async with asyncio.timeout(WAIT_S):
        for pid, start_ticks in processes.items():
            ended = asyncio.Event()
            if is_running(pid, start_ticks):
                with suppress(ProcessLookupError):
                    Watch(pid, ended.set)
                    await ended.wait()
