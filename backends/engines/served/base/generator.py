"""Generation on a server: token ids in, token ids and log-probs out, one request for each sample.

Invariants:

* ``generate`` ends in exactly one :class:`Generated` with every token that arrived, whatever happens to the server or
  the connection. It raises only for a request that must not be sent, and when it is cancelled.
* Every id is checked against the size of the embedding before it is sent: one outside it kills the server.
* A request is sent again only if the server cannot have begun it: it was not reached, or said 503 or 504. Before the
  second time the old one is aborted, under the same request id, so that the server itself refuses to run both.
* No request is left behind on the server: past its deadline, cancelled, or no longer understood, it is aborted.

| waits for | who ends it |
|---|---|
| ``generate`` for events | the server, the call's deadline, cancellation |
| ``generate`` past its deadline, for the answer to its abort | the server, or ``ABORT_GRACE_S`` |
| ``generate`` between two attempts | the back-off, cancellation |
| ``score`` and ``probe`` for their answer | the server, or their deadline |
| ``close`` for aborts on their way | the server, or ``ABORT_TIMEOUT_S`` |
"""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.served.base.http import (
    BadReply,
    CallError,
    ConnectFailed,
    CutOff,
    ServerBusy,
    TimedOut,
)
from penstock.messages.arrays import tokens_view
from penstock.messages.base import Value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from penstock.backends.engines.served.base.assembler import Assembler
    from penstock.backends.engines.served.base.calls import Chunk, GenerateCall, Generated
    from penstock.backends.engines.served.base.dialect import Control
    from penstock.backends.engines.served.base.http import EventStream, ServerHttp
    from penstock.messages.top_logprobs import TopLogprobs

ABORT_TIMEOUT_S: Final = 5.0
ABORT_GRACE_S: Final = 2.0
"""For the tokens that an aborted request still owes. A paused server may answer only when it goes on."""
STREAM_END_S: Final = 1.0
"""For the end of a stream whose last event was read; then its connection is closed instead of used again."""


class BadTokenError(Exception):
    """A token id lies outside the model's embedding; it was not sent, since it would end the server."""


class DrawnImageError(BadTokenError):
    """The token that stands for an image is where none was put; it was not sent, since a server would look for one more
    image and see others in the places of those that there are."""

    def __init__(self, token: int, place: int) -> None:
        """``place``: of the first one, among those of the request."""
        super().__init__(token, place)
        self.token = token
        self.place = place

    def __str__(self) -> str:
        return (
            f"token {self.place} is the one that stands for an image ({self.token}), and no image was put there; a "
            "server that goes on behind it would look for one more"
        )


class RetryPolicy(Value, frozen=True, kw_only=True):
    """How long, and how often, a server that does not answer is tried again."""

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    give_up_after_s: float = 60.0
    """Since the first attempt; the deadline of the request counts as well."""


class ScoredText(NamedTuple):
    """What a server finds of some tokens, at temperature 1."""

    logprobs: bytes
    """float32 ``[T]``"""
    top: TopLogprobs | None = None
    """The likeliest in the place of each, where they were asked for."""


class Generator(ABC):
    """The requests of one engine. A dialect says how they are worded."""

    path: str
    """Where requests go."""

    def __init__(
        self,
        http: ServerHttp,
        *,
        vocab_size: int,
        abort_at: Sequence[Control],
        retry: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``vocab_size``: rows of the embedding. ``abort_at``: every server that may have a request."""
        self.http = http
        self._vocab_size = vocab_size
        self._abort_at = tuple(abort_at)
        self._retry = retry or RetryPolicy()
        self._clock = clock
        self._sleep = sleep
        self._aborts: set[asyncio.Task[None]] = set()

    @abstractmethod
    def _encoded(self, call: GenerateCall) -> bytes:
        """The body of a request that is answered by a stream. Raises what ``generate`` raises."""

    @abstractmethod
    def _assembler(self, call: GenerateCall) -> Assembler:
        """What reads the answer to it."""

    def _headers(self, call: GenerateCall) -> Mapping[str, str] | None:
        """Of the request, besides those of every request."""
        return None

    def _retry_after_s(self, attempt: int, error: CallError) -> float | None:
        """What the server needs before the same request, besides the back-off; None: it is not sent again."""
        return 0.0 if isinstance(error, (ConnectFailed, ServerBusy)) else None

    @abstractmethod
    async def score(
        self, tokens: bytes, *, rid: str, extra_key: str, timeout_s: float, first: int = 1, num_top: int = 0
    ) -> ScoredText:
        """Log-probs of tokens ``[T]`` at temperature 1, from place ``first`` on, each given all before it, and the
        ``num_top`` likeliest tokens of each of these places. Not answered while generation is paused.

        Raises:
            BadTokenError: an id lies outside the embedding.
            CallError: the call failed, or the answer is for other tokens.
        """

    @abstractmethod
    async def probe(self, tokens: bytes, *, rid: str, extra_key: str, timeout_s: float, adapter: str = "") -> bytes:
        """Log-probs float32 ``[T − 1, T]`` at temperature 1 of every one of the tokens ``[T]`` after tokens 0 … t, with
        the adapter of this name, if one is named.

        Raises:
            BadTokenError, CallError: as :meth:`score`.
        """

    async def generate(self, call: GenerateCall, on_chunk: Callable[[Chunk], None]) -> Generated:
        """Carry a request out. ``on_chunk`` gets the tokens of every event but the last, in order, without gaps.

        Raises:
            BadTokenError: an id lies outside the embedding.
            ValueError: the request asks for what this server does not heed.
        """
        body = self._encoded(call)
        try:
            return await self._tried(call, body, on_chunk)
        except BaseException:
            self.abort_soon(call.rid)
            raise

    async def abort(self, rid: str, timeout_s: float = ABORT_TIMEOUT_S) -> None:
        """End a request at the server; its ``generate`` then returns with what there is. Unknown ids do no harm.

        Raises:
            CallError: a server could not be told.
        """
        calls = (control.abort(rid, timeout_s) for control in self._abort_at)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def abort_soon(self, rid: str) -> None:
        """Abort in the background: the caller cannot wait, and nothing depends on it."""
        if self.http.is_closed:
            return
        task = asyncio.get_running_loop().create_task(self._abort_quietly(rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Wait for aborts on their way."""
        if self._aborts:
            await asyncio.wait(tuple(self._aborts), timeout=ABORT_TIMEOUT_S)

    async def _abort_quietly(self, rid: str) -> None:
        with suppress(CallError):
            await self.abort(rid, ABORT_TIMEOUT_S)

    async def _tried(self, call: GenerateCall, body: bytes, on_chunk: Callable[[Chunk], None]) -> Generated:
        """As often as is safe and there is time for."""
        begun = self._clock()
        deadline = begun + call.deadline_s
        retry_until = min(deadline, begun + self._retry.give_up_after_s)
        for attempt in itertools.count():
            reply = self._assembler(call)
            try:
                return await self._attempt(call, body, reply, on_chunk, deadline)
            except CallError as error:
                delay_s = self._delay_s(call.rid, attempt, error)
                if delay_s is None or reply.num_tokens or self._clock() + delay_s >= retry_until:
                    if isinstance(error, (CutOff, TimedOut, BadReply)):
                        self.abort_soon(call.rid)
                    return reply.failed(error)
                if not isinstance(error, ConnectFailed):
                    await self._abort_quietly(call.rid)
                await self._sleep(delay_s)
        raise AssertionError("attempts are endless")

    async def _attempt(
        self, call: GenerateCall, body: bytes, reply: Assembler, on_chunk: Callable[[Chunk], None], deadline: float
    ) -> Generated:
        headers = self._headers(call)
        remaining_s = max(0.0, deadline - self._clock())
        async with self.http.stream(self.path, body, timeout_s=remaining_s, headers=headers) as events:
            if await _read(events, reply, on_chunk, max(0.0, deadline - self._clock())):
                return reply.generated()
            late = TimedOut(f"request {call.rid} did not end within {call.deadline_s:g} s")
            with suppress(CallError):
                await self.abort(call.rid)
                await _read(events, reply, _ignore, ABORT_GRACE_S)
            return reply.failed(late)

    def _delay_s(self, rid: str, attempt: int, error: CallError) -> float | None:
        """Until the next attempt; None: there is none."""
        more_s = self._retry_after_s(attempt, error)
        if more_s is None:
            return None
        delay_s = min(self._retry.max_delay_s, self._retry.first_delay_s * 2.0 ** min(attempt, 30))
        # Spread, so that the requests of one engine do not come back all at once.
        delay_s *= 0.5 + 0.5 * zlib.crc32(f"{rid}/{attempt}".encode()) / 2**32
        return delay_s + more_s

    def _checked(self, tokens: bytes) -> list[int]:
        ids = tokens_view(tokens).tolist()
        if not ids:
            raise BadTokenError("a request needs at least one token")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise BadTokenError(
                f"token id {bad} at position {ids.index(bad)} is outside the {self._vocab_size} known ones"
            )
        return ids


async def _read(events: EventStream, reply: Assembler, on_chunk: Callable[[Chunk], None], timeout_s: float) -> bool:
    """Read to the end, or for so long; whether the request has finished."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while (payloads := await events.next()) is not None:
                for payload in payloads:
                    if (chunk := reply.take(payload)) is not None:
                        on_chunk(chunk)
                if reply.is_finished:
                    limit.reschedule(asyncio.get_running_loop().time() + STREAM_END_S)
    except TimeoutError:
        return reply.is_finished
    except CallError:
        if not reply.is_finished:
            raise
        return True
    if not reply.is_finished:
        raise CutOff("the stream ended without saying how the request did")
    return True


def _ignore(_: Chunk) -> None:
    """What comes after a deadline is in the end's tokens only."""
