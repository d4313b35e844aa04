"""The checks of a server, against a small HTTP server that answers what a test wants and when it wants.

The clock of the prober goes on when a test says so, so that no machine is too slow for it: its limits are far beyond
what an answer takes, and a test that wants silence to last that long puts the clock forward.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from penstock.backends.engines.served.base.health import HealthChange, HealthLimits, HealthState
from penstock.backends.engines.served.base.http import ServerHttp
from penstock.backends.engines.served.base.prober import STALL_S, Prober
from penstock.backends.engines.served.sglang.control import SglangControl

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

WAIT_S = 60.0
LIMITS = HealthLimits(suspect_after_s=10.0, dead_after_s=20.0, cold_dead_after_s=20.0)
STEP_S = STALL_S / 4
"""As far as the clock is put forward at once without the loop's seeming to have been held up."""


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class Answers:
    """A server with gates: a path is answered while its gate is open."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
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

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not what():  # noqa: ASYNC110 - other tasks of this loop make it true
                await asyncio.sleep(0)

    async def pass_time(self, max_s: float) -> HealthState | None:
        """Put the clock forward until something changes."""
        end_s = self.clock.time() + max_s
        while self.changes.empty() and self.clock.time() < end_s:
            await self._step()
        return None if self.changes.empty() else self.changes.get_nowait().after

    async def _step(self) -> None:
        """A step of the clock in which every check that is answered at all is answered."""
        asked = self.asked.copy()
        answered = [path for path in SglangControl.questions.values() if self.gates[path].is_set()]
        self.clock.ahead_s += STEP_S
        # Asked twice: the second question comes after the answer to the first.
        await self.until(
            lambda: not self.changes.empty() or all(self.asked[path] > asked[path] + 1 for path in answered)
        )


@asynccontextmanager
async def probed() -> AsyncGenerator[tuple[Answers, Prober]]:
    """A server and its prober, which has just called it healthy."""
    clock = asyncio.get_running_loop()
    assert isinstance(clock, Clock)
    answers = Answers(clock)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answers.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    _, port = runner.addresses[0][:2]
    http = ServerHttp(f"http://127.0.0.1:{port}")
    prober = Prober(SglangControl(http), answers.changes.put_nowait, limits=LIMITS, interval_s=0.002)
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


def play(scene: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=Clock) as runner:
        runner.run(scene())


def test_a_check_that_hangs_is_asked_once_and_holds_up_no_other() -> None:
    async def scene() -> None:
        async with probed() as (answers, _):
            answers.gates["/server_info"].clear()
            before = answers.asked["/server_info"]
            assert await answers.pass_time(WAIT_S) is HealthState.SUSPECT
            assert await answers.pass_time(WAIT_S) is HealthState.DEAD
            assert answers.asked["/server_info"] <= before + 1
            assert answers.asked["/ready"] > answers.asked["/server_info"]

    play(scene)


def test_a_loop_that_was_held_up_kills_no_server() -> None:
    async def scene() -> None:
        async with probed() as (answers, prober):
            answers.gates["/server_info"].clear()
            assert await answers.pass_time(WAIT_S) is HealthState.SUSPECT
            answers.clock.ahead_s += LIMITS.dead_after_s - LIMITS.suspect_after_s + 2 * STALL_S
            answers.gates["/server_info"].set()
            assert await answers.next_state() is HealthState.HEALTHY
            assert prober.state is HealthState.HEALTHY

    play(scene)


def test_requests_without_tokens_are_tried_with_one_of_our_own() -> None:
    async def scene() -> None:
        async with probed() as (answers, prober):
            prober.submitted()
            assert await answers.pass_time(WAIT_S) is HealthState.SUSPECT
            assert await answers.next_state() is HealthState.HEALTHY
            assert answers.asked["/generate"] == 1

    play(scene)


def test_no_request_of_our_own_runs_beside_a_control_call() -> None:
    async def scene() -> None:
        async with probed() as (answers, prober):
            answers.gates["/generate"].clear()
            prober.submitted()
            assert await answers.pass_time(WAIT_S) is HealthState.SUSPECT
            await answers.until(lambda: answers.asked["/generate"] > 0)  # the trial is on its way
            occupied = prober.occupied("release_memory_occupation", WAIT_S)
            entering = asyncio.create_task(occupied.__aenter__())
            await asyncio.sleep(0)
            assert not entering.done()
            answers.gates["/generate"].set()
            await entering
            asked, seen = answers.asked["/generate"], answers.asked["/server_info"]
            await answers.until(lambda: answers.asked["/server_info"] > seen + 3)  # checks go on meanwhile
            assert answers.asked["/generate"] == asked
            await occupied.__aexit__(None, None, None)

    play(scene)


def test_a_server_that_says_it_is_paused_owes_no_tokens() -> None:
    async def scene() -> None:
        async with probed() as (answers, prober):
            answers.ready_status = 503
            seen = answers.asked["/ready"]
            await answers.until(lambda: answers.asked["/ready"] > seen + 2)  # it has heard of it
            prober.submitted()
            assert await answers.pass_time(1.5 * LIMITS.dead_after_s) is None  # unpaused it would not live this long
            assert prober.state is HealthState.HEALTHY
            assert not answers.asked["/generate"]

    play(scene)


def test_a_token_ends_a_suspicion_at_once() -> None:
    async def scene() -> None:
        async with probed() as (answers, prober):
            answers.gates["/server_info"].clear()
            assert await answers.pass_time(WAIT_S) is HealthState.SUSPECT
            prober.token()
            assert prober.state is HealthState.HEALTHY

    play(scene)
