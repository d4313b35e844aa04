"""Asks a server how it is, and feeds the answers to its :mod:`~penstock.backends.engines.served.base.health`.

Invariants:

* The checks are independent of each other: one that hangs holds up no other.
* At most one of each kind is on its way, and one that is given up is asked again only after ``CHECK_TIMEOUT_S``: the
  server keeps a question whose asker has gone, and has to answer all of them in the end.
* A request of our own is sent only when requests in flight make no progress, never while generation is paused, and
  never while a control call runs: some of them kill a server that is not idle.
* The process table is read with each check, when the server is ours.

| wait | ends with | at the latest |
|---|---|---|
| a check | its answer | ``CHECK_TIMEOUT_S`` |
| between checks | ``close`` | ``interval_s`` |
| ``occupied`` | the end of a request of our own | ``TRIAL_TIMEOUT_S`` and the abort of it |
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.health import (
    Answered,
    Asked,
    Check,
    Ended,
    Fact,
    Failed,
    Health,
    HealthChange,
    HealthLimits,
    HealthState,
    InFlight,
    Occupied,
    Overslept,
    Paused,
    Progress,
    Ready,
    Released,
    Stopped,
    Tick,
)
from penstock.backends.engines.served.base.http import CallError, ConnectFailed, CutOff, TimedOut

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from penstock.backends.engines.served.base.dialect import Control
    from penstock.backends.engines.served.base.launched import LaunchedServer, ServerEnd

INTERVAL_S: Final = 5.0
CHECK_TIMEOUT_S: Final = 30.0
TRIAL_TIMEOUT_S: Final = 20.0
ABORT_TIMEOUT_S: Final = 5.0
STALL_S: Final = 1.0
"""A timer that is later than this tells of a loop that was held up, or of a process that was stopped."""


class Prober:
    """The checks of one server. Everything runs on the event loop that ``start`` was called on."""

    def __init__(
        self,
        control: Control,
        on_change: Callable[[HealthChange], None],
        *,
        limits: HealthLimits,
        interval_s: float = INTERVAL_S,
        server: LaunchedServer | None = None,
    ) -> None:
        """Does nothing before ``start``.

        Args:
            control: of a server that is ready.
            on_change: called with every change of state, on the loop.
            limits: how long silence is borne.
            interval_s: between an answer and the next question.
            server: when it is ours: its processes and its end are watched.
        """
        self._loop = asyncio.get_running_loop()
        self.health = Health(limits, self._loop.time(), control.questions)
        self._control = control
        self._on_change = on_change
        self._interval_s = interval_s
        self._server = server
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._token_s: float | None = None
        """When a token arrived of which the health does not know yet."""
        self._num_in_flight = 0
        self._calls: list[Occupied] = []
        self._trial: asyncio.Task[None] | None = None

    @property
    def state(self) -> HealthState:
        """Of the server."""
        return self.health.state

    def start(self) -> None:
        """The server is ready; ask from here on."""
        if self._server is not None:
            self._server.ended.add_done_callback(self._server_ended)
        self._feed(Ready())
        self._tasks = [self._loop.create_task(self._ask_again(check)) for check in Check]

    async def close(self) -> None:
        """Ask no more."""
        if self._server is not None:
            self._server.ended.remove_done_callback(self._server_ended)
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._tasks, *([self._trial] if self._trial is not None else [])]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()

    def token(self) -> None:
        """Tokens have arrived from this server, or a whole answer. Cheap: called for every piece of every stream."""
        self._token_s = self._loop.time()
        if self.health.state is not HealthState.HEALTHY:
            self._feed(Tick())

    def submitted(self) -> None:
        """One more request is in flight."""
        self._num_in_flight += 1
        self._feed(InFlight(self._num_in_flight))

    def finished(self) -> None:
        """One request is in flight no more, however it ended."""
        self._num_in_flight -= 1
        self._feed(InFlight(self._num_in_flight))

    @contextlib.asynccontextmanager
    async def occupied(self, call: str, timeout_s: float) -> AsyncGenerator[None]:
        """Around a control call that may block the scheduler, such as an update of weights; may be nested.

        Silence is not held against the server meanwhile, and no request of the prober's own runs.

        Args:
            call: its name, for the story.
            timeout_s: its deadline.
        """
        mark = Occupied(call, self._loop.time() + timeout_s)
        self._calls.append(mark)
        try:
            if self._trial is not None:
                await asyncio.wait({self._trial})
            self._feed(max(self._calls, key=_until_s))
            yield
        finally:
            self._calls.remove(mark)
            self._feed(max(self._calls, key=_until_s, default=Released()))

    async def _ask_again(self, check: Check) -> None:
        while True:
            self._look_at_processes()
            await self._ask(check)
            if check is Check.SCHEDULER and self._wants_trial():
                self._trial = self._loop.create_task(self._try_request())
            await asyncio.sleep(self._interval_s)

    async def _ask(self, check: Check) -> None:
        self._feed(Asked(check))
        is_paused = False
        try:
            is_paused = await self._control.ask(check, CHECK_TIMEOUT_S)
        except TimedOut:
            self._feed(Failed(check, f"asked again after {CHECK_TIMEOUT_S:g} s"))
            return
        except (ConnectFailed, CutOff) as error:
            self._feed(Failed(check, str(error)))
            return
        except CallError:  # an answer all the same
            pass
        self._feed(Answered(check))
        if check is Check.FRONT:
            self._feed(Paused(is_paused))

    def _wants_trial(self) -> bool:
        return self._trial is None and not self._calls and self.health.misses_tokens(self._loop.time())

    async def _try_request(self) -> None:
        """A request of our own: where it is answered, those in flight are slow and not lost."""
        rid = f"penstock-trial-{secrets.token_hex(8)}"
        try:
            await self._control.try_request(rid, TRIAL_TIMEOUT_S)
            self._feed(Progress())
        except TimedOut:
            with contextlib.suppress(CallError):
                await self._control.abort(rid, ABORT_TIMEOUT_S)
        except CallError:
            pass  # the checks find out what is the matter
        finally:
            self._trial = None

    def _look_at_processes(self) -> None:
        if self._server is not None:
            self._feed(Stopped(self._server.stopped()))

    def _server_ended(self, ended: asyncio.Future[ServerEnd]) -> None:
        if not ended.cancelled():
            self._feed(Ended(ended.result().cause))

    def _feed(self, fact: Fact) -> None:
        now_s = self._loop.time()
        facts: list[tuple[Fact, float]] = [(fact, now_s)]
        if self._timer is not None:
            self._timer.cancel()
            if now_s > self._timer.when() + STALL_S:
                facts.insert(0, (Overslept(), now_s))  # answers may lie unread: this loop was silent, not the server
        if self._token_s is not None:
            facts.insert(0, (Progress(), self._token_s))
            self._token_s = None
        for each, at_s in facts:
            change = self.health.feed(each, at_s)
            if change is not None:
                self._on_change(change)
        next_s = self.health.next_s()
        self._timer = None if next_s is None else self._loop.call_at(next_s, self._feed, Tick())


def _until_s(call: Occupied) -> float:
    return call.until_s
