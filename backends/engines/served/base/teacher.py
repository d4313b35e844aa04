"""A teacher on a server: the log-probs of a prompt, of which nothing is generated.

Invariants:

* Every ``ComputeLogprobs`` is answered by exactly one ``LogprobsComputed``, or the teacher fails: with the reason where
  the sample itself cannot be scored, which touches no other.
* A server of ours that ends, and one that cannot be reached or does not answer in time, ends the teacher with the
  story; its successor starts or reaches one anew.
* Log-probs of a prompt are of temperature 1, whatever the request says; the scenario's rules see to that.

| waits for | who ends it |
|---|---|
| the server to be ready | the server; ``start_timeout_s`` |
| an answer of the server | the server; ``timeout_s`` |
| a server that is busy, or that no connection can be made to | ``RETRY_S``, then the teacher fails |
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final, Generic, assert_never

from penstock.backends.engines.served.base.dialect import EndpointT
from penstock.backends.engines.served.base.generator import BadTokenError, ScoredText
from penstock.backends.engines.served.base.http import CallError, ConnectFailed, Refused, ServerBusy
from penstock.backends.engines.served.base.loop import LoopBackend
from penstock.messages.arrays import TOKEN_BYTES
from penstock.messages.base import Metric
from penstock.messages.commands import ComputeLogprobs, OpenEngine, TeacherCommand
from penstock.messages.local import EngineOpened, LogprobsComputed
from penstock.messages.top_logprobs import TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.backends.engines.served.base.generator import Generator
    from penstock.backends.engines.served.base.launched import LaunchedServer
    from penstock.backends.engines.served.base.opened import Opened
    from penstock.messages.teaching import GivenTokens

RETRY_S: Final = 30.0
RETRY_DELAY_S: Final = 0.5


class TeacherFailedError(RuntimeError):
    """The server of a teacher cannot be used any more."""


class ServedTeacherBackend(LoopBackend[TeacherCommand], Generic[EndpointT]):
    """One teacher behind :class:`penstock.backends.protocol.Backend`."""

    def __init__(
        self,
        open_server: Callable[[], Awaitable[Opened[EndpointT]]],
        *,
        num_slots: int,
        timeout_s: float,
        num_top: int = 0,
    ) -> None:
        """``open_server`` starts or attaches. ``num_slots``: samples at it. ``timeout_s``: for one answer. ``num_top``:
        likeliest tokens that it names in the place of each."""
        super().__init__("served-teacher")
        self._open_server = open_server
        self._num_slots = num_slots
        self._timeout_s = timeout_s
        self._num_top = num_top
        self._tag = secrets.token_hex(4)
        self._opened: Opened[EndpointT] | None = None
        self._num_tokens = self._num_requests = 0

    def gauges(self) -> tuple[Metric, ...]:
        """Samples at the server; tokens that were scored, and requests, since the start."""
        return (
            Metric("teacher/queued", len(self._tasks)),
            Metric("teacher/tokens", self._num_tokens),
            Metric("teacher/passes", self._num_requests),
        )

    def _take(self, command: TeacherCommand) -> None:
        match command:
            case OpenEngine():
                self._spawn(self._open(), "open")
            case ComputeLogprobs():
                self._spawn(self._compute(command), f"score {command.key}")
            case _:
                assert_never(command)

    async def _shut(self, timeout_s: float) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.generator.close()
            await opened.close(timeout_s)

    async def _open(self) -> None:
        self._opened = await self._open_server()
        if self._opened.server is not None:
            self._spawn(self._watch(self._opened.server), "server")
        self._emit(EngineOpened(num_slots=self._num_slots))

    async def _watch(self, server: LaunchedServer) -> None:
        end = await asyncio.shield(server.ended)
        if not end.was_asked:
            raise TeacherFailedError(end.story)

    async def _compute(self, command: ComputeLogprobs) -> None:
        assert self._opened is not None, "a teacher is asked after it has opened"
        scored: list[ScoredText] = []
        for index, text in enumerate(command.texts):
            key = command.key
            rid = f"{self._tag}-{key.group_id}-{key.index}-{command.attempt}-{index}"
            try:
                scored.append(await self._score(self._opened.generator, text, rid))
            except (BadTokenError, Refused) as error:
                self._emit(LogprobsComputed(key=key, attempt=command.attempt, error=str(error)))
                return
        self._num_tokens += sum(text.num_tokens for text in command.texts)
        logprobs = tuple(each.logprobs for each in scored)
        top = tuple(each.top for each in scored if each.top is not None)
        self._emit(LogprobsComputed(key=command.key, attempt=command.attempt, logprobs=logprobs, top=top))

    async def _score(self, generator: Generator, text: GivenTokens, rid: str) -> ScoredText:
        if not text.context:
            raise BadTokenError("nothing stands before the first token, so nothing predicts it")
        if not text.tokens:
            return ScoredText(b"", TopLogprobs(self._num_top, b"", b"") if self._num_top else None)
        until_s = self._loop.time() + RETRY_S
        number = 0
        while True:
            self._num_requests += 1
            try:
                return await generator.score(
                    text.context + text.tokens,
                    rid=f"{rid}-{number}",
                    extra_key="teacher",
                    timeout_s=self._timeout_s,
                    first=len(text.context) // TOKEN_BYTES,
                    num_top=self._num_top,
                )
            except (ConnectFailed, ServerBusy) as error:
                if self._loop.time() >= until_s:
                    raise TeacherFailedError(
                        f"the teacher's server has taken nothing for {RETRY_S:g} s: {error}"
                    ) from error
            except (BadTokenError, Refused):
                raise
            except CallError as error:
                raise TeacherFailedError(f"the teacher's server failed: {error}") from error
            number += 1
            await asyncio.sleep(RETRY_DELAY_S)
