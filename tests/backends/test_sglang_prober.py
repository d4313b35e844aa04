"""The checks of a server, against a small HTTP server that answers what a test wants and when it wants."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from penstock.backends.engines.sglang.health import HealthChange, HealthLimits, HealthState
from penstock.backends.engines.sglang.http import SglangHttp
from penstock.backends.engines.sglang.prober import STALL_S, Prober

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

WAIT_S = 30.0
LIMITS = HealthLimits(suspect_after_s=0.2, dead_after_s=1.0, cold_dead_after_s=1.0)


class Answers:
    """A server with gates: a path is answered while its gate is open."""

    def __init__(self) -> None:
        self.gates = {path: asyncio.Event() for path in ("/ready", "/server_info", "/generate")}
        for gate in self.gates.values():
            gate.set()
        self.ready_status = 200
        self.asked: Counter[str] = Counter()
        self.changes: asyncio.Queue[HealthChange] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked[request.path] += 1
        await self.gates[request.path].wait()
        return web.Response(status=self.ready_status if request.path == "/ready" else 200)

    async def next_state(self) -> HealthState:
        async with asyncio.timeout(WAIT_S):
            return (await self.changes.get()).after


@asynccontextmanager
async def probed(limits: HealthLimits = LIMITS) -> AsyncGenerator[tuple[Answers, Prober]]:
    """A server and its prober, which has just called it healthy."""
    answers = Answers()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answers.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    _, port = runner.addresses[0][:2]
    http = SglangHttp(f"http://127.0.0.1:{port}")
    prober = Prober(http, answers.changes.put_nowait, limits=limits, interval_s=0.05)
    prober.start()
    try:
        assert await answers.next_state() is HealthState.HEALTHY
        yield answers, prober
    finally:
        await prober.close()
        await http.close()
        for gate in answers.gates.values():
            gate.set()
        await runner.cleanup()


def test_a_check_that_hangs_is_asked_once_and_holds_up_no_other() -> None:
    async def run() -> None:
        async with probed() as (answers, _):
            answers.gates["/server_info"].clear()
            before = answers.asked["/server_info"]
            assert await answers.next_state() is HealthState.SUSPECT
            assert await answers.next_state() is HealthState.DEAD
            assert answers.asked["/server_info"] <= before + 1
            assert answers.asked["/ready"] > answers.asked["/server_info"]

    asyncio.run(run())


def test_a_loop_that_was_held_up_kills_no_server() -> None:
    async def run() -> None:
        async with probed() as (answers, prober):
            answers.gates["/server_info"].clear()
            assert await answers.next_state() is HealthState.SUSPECT
            time.sleep(LIMITS.dead_after_s + STALL_S + 0.5)  # noqa: ASYNC251 - this is what is tested
            answers.gates["/server_info"].set()
            assert await answers.next_state() is HealthState.HEALTHY
            assert prober.state is HealthState.HEALTHY

    asyncio.run(run())


def test_requests_without_tokens_are_tried_with_one_of_our_own() -> None:
    async def run() -> None:
        async with probed() as (answers, prober):
            prober.submitted()
            assert await answers.next_state() is HealthState.SUSPECT
            assert await answers.next_state() is HealthState.HEALTHY
            assert answers.asked["/generate"] == 1

    asyncio.run(run())


def test_no_request_of_our_own_runs_beside_a_control_call() -> None:
    async def run() -> None:
        async with probed(HealthLimits(suspect_after_s=0.2, dead_after_s=WAIT_S, cold_dead_after_s=WAIT_S)) as made:
            answers, prober = made
            answers.gates["/generate"].clear()
            prober.submitted()
            assert await answers.next_state() is HealthState.SUSPECT
            async with asyncio.timeout(WAIT_S):
                while not answers.asked["/generate"]:  # noqa: ASYNC110 - the trial is on its way
                    await asyncio.sleep(0)
            occupied = prober.occupied("release_memory_occupation", WAIT_S)
            entering = asyncio.create_task(occupied.__aenter__())
            await asyncio.sleep(0)
            assert not entering.done()
            answers.gates["/generate"].set()
            await entering
            asked = answers.asked["/generate"]
            for _ in range(3):
                seen = answers.asked["/server_info"]
                async with asyncio.timeout(WAIT_S):
                    while answers.asked["/server_info"] == seen:  # noqa: ASYNC110 - checks go on meanwhile
                        await asyncio.sleep(0)
            assert answers.asked["/generate"] == asked
            await occupied.__aexit__(None, None, None)

    asyncio.run(run())


def test_a_server_that_says_it_is_paused_owes_no_tokens() -> None:
    async def run() -> None:
        async with probed() as (answers, prober):
            answers.ready_status = 503
            seen = answers.asked["/ready"]
            async with asyncio.timeout(WAIT_S):
                while answers.asked["/ready"] < seen + 2:  # noqa: ASYNC110 - it has heard of it
                    await asyncio.sleep(0)
            prober.submitted()
            await asyncio.sleep(LIMITS.dead_after_s * 1.5)  # unpaused it would not live this long without a token
            assert prober.state is HealthState.HEALTHY
            assert not answers.asked["/generate"]

    asyncio.run(run())


def test_a_token_ends_a_suspicion_at_once() -> None:
    async def run() -> None:
        async with probed() as (answers, prober):
            answers.gates["/server_info"].clear()
            assert await answers.next_state() is HealthState.SUSPECT
            prober.token()
            assert prober.state is HealthState.HEALTHY

    asyncio.run(run())
