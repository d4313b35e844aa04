"""The sglang-router package in front of servers: what is asked of it, and what it does with requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from penstock.backends.engines.served.base.http import CutOff, Refused, ServerHttp
from penstock.backends.engines.served.sglang.router import FLAGS, await_router
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    from running_server import RunningServer

    from penstock.backends.engines.served.sglang.environment import SglangEnvironment

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

ROUTER = "sglang-router==0.3.2"
READY_S = 60.0


@pytest.fixture(scope="session")
def router_package(pytestconfig: pytest.Config) -> Path:
    """The router alone; what it imports is in SGLang's environment. A download of 89 MB, once for all sessions."""
    folder = Path(pytestconfig.cache.mkdir("sglang-router-0.3.2"))
    if not (folder / "sglang_router").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), ROUTER]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        if done.returncode:
            pytest.skip(f"cannot be installed here ({' '.join(command)}): {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture
def start_router(
    router_package: Path, environment: SglangEnvironment, tmp_path: Path, unused_port: Callable[[], int]
) -> Generator[Callable[..., str]]:
    """``start_router(worker_url, …, flags=FLAGS)``: the address of a router that has just been started."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*workers: str, flags: tuple[str, ...] = FLAGS) -> str:
        port, metrics_port = unused_port(), unused_port()
        with (tmp_path / f"router-{len(started)}.log").open("wb") as log:
            command = [str(environment.python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
            command += ["--port", str(port), "--prometheus-port", str(metrics_port), "--worker-urls", *workers]
            command += ["--policy", "round_robin", "--health-check-interval-secs", "1", *flags]
            variables = os.environ | {"PYTHONPATH": str(router_package)}
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=variables))
        return f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        process.kill()
        process.wait()


class Worker:
    """Answers a router as a server would, as far as the router asks; counts what it is asked to generate."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.is_paused = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            self.num_requests += 1
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"output_ids": [5]}\n\n')
            assert request.transport is not None
            request.transport.abort()  # it dies in the middle
            return response
        if request.path == "/health":
            return web.Response(status=503 if self.is_paused else 200)
        return web.json_response({"model_path": "tiny", "served_model_name": "tiny", "tp_size": 1, "dp_size": 1})


@contextlib.asynccontextmanager
async def workers(count: int) -> AsyncGenerator[dict[str, Worker]]:
    """So many workers by address."""
    async with contextlib.AsyncExitStack() as stack:
        found: dict[str, Worker] = {}
        for _ in range(count):
            worker, app = Worker(), web.Application()
            app.router.add_route("*", "/{path:.*}", worker.answer)
            runner = web.AppRunner(app, shutdown_timeout=0.0)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            found[f"http://{host}:{port}"] = worker
        yield found


async def asked(router: str, *addresses: str, timeout_s: float = READY_S) -> None:
    http = ServerHttp(router)
    try:
        await await_router(http, addresses, timeout_s=timeout_s)
    finally:
        await http.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(200.0):
            await test()

    asyncio.run(limited())


def test_a_router_is_waited_for_until_it_has_every_server(start_router: Callable[..., str]) -> None:
    async def test() -> None:
        async with workers(2) as found:
            await asked(start_router(*found), *(f"{address}/" for address in found))

    run(test)


def test_a_router_that_lacks_a_server_is_refused_when_the_time_is_over(start_router: Callable[..., str]) -> None:
    async def test() -> None:
        async with workers(2) as found:
            first, second = found
            router = start_router(first)
            await asked(router, first)
            with pytest.raises(UserFault, match=f"not ready after 1 s: it does not know {second}.*--disable-retries"):
                await asked(router, first, second, timeout_s=1.0)

    run(test)


def test_a_router_that_knows_a_server_which_nobody_updates_is_refused_at_once(
    start_router: Callable[..., str],
) -> None:
    async def test() -> None:
        async with workers(2) as found:
            first, second = found
            with pytest.raises(UserFault, match=f"also sends requests to {second}"):
                await asked(start_router(first, second), first)

    run(test)


def test_a_server_that_answers_nothing_but_is_no_router_is_refused_at_once() -> None:
    async def test() -> None:
        async with workers(1) as found:
            with pytest.raises(UserFault, match="is no sglang-router"):
                await asked(*found, *found)

    run(test)


def test_a_paused_server_stays_where_health_is_asked_of_server_info(start_router: Callable[..., str]) -> None:
    async def test() -> None:
        async with workers(1) as found:
            [(address, worker)] = found.items()
            router, usual = start_router(address), start_router(address, flags=("--health-failure-threshold", "1"))
            await asked(router, address)
            await asked(usual, address)
            worker.is_paused = True
            await until_refused(usual, address)
            await asked(router, address, timeout_s=5.0)

    run(test)


async def read_all(http: ServerHttp, body: bytes) -> None:
    async with http.stream("/generate", body, timeout_s=20.0) as events:
        while await events.next() is not None:
            pass


async def until_refused(router: str, address: str) -> None:
    """The router's own check notices within its interval."""
    try:
        async with asyncio.timeout(READY_S):
            while True:
                await asked(router, address, timeout_s=0.5)
    except UserFault as error:
        assert "unhealthy" in str(error) or "503" in str(error), error  # noqa: PT017 - raised in one of many rounds


@pytest.mark.parametrize("flags", [FLAGS, ()], ids=["as asked", "with retries"])
def test_a_stream_that_has_begun_is_never_begun_again(start_router: Callable[..., str], flags: tuple[str, ...]) -> None:
    async def test() -> None:
        async with workers(2) as found:
            router = start_router(*found, flags=flags)
            await asked(router, *found)
            http = ServerHttp(router)
            with pytest.raises((CutOff, aiohttp.ClientError)):
                await read_all(http, b'{"input_ids": [1], "stream": true}')
            await http.close()
            assert sum(worker.num_requests for worker in found.values()) == 1

    run(test)


def test_generation_goes_through_a_router_and_control_does_not(
    start_router: Callable[..., str], server: RunningServer
) -> None:
    async def test() -> None:
        router = start_router(server.address)
        await asked(router, server.address)
        http = ServerHttp(router)
        body = b'{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2, "temperature": 0}, "rid": "through"}'
        assert b'"weight_version"' in await http.call("POST", "/generate", body, timeout_s=60.0)
        for path in ("/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"):
            with pytest.raises(Refused, match="404"):
                await http.call("POST", path, b"{}", timeout_s=10.0)
        await http.close()

    run(test)
