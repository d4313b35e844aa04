"""Generation on a SGLang server: token ids in, token ids and log-probs out, one request for each sample.

Invariants:

* ``generate`` ends in exactly one :class:`Generated` with every token that arrived, whatever happens to the server or
  the connection. It raises only for a request that must not be sent, and when it is cancelled.
* Every id is checked against the size of the embedding before it is sent: one outside it kills the server.
* A request is sent again only if the server cannot have begun it: it was not reached, or said 503 or 504. Before the
  second time the old one is aborted, under the same request id, so that the server itself refuses to run both.
* No request is left behind on the server: past its deadline, cancelled, or no longer understood, it is aborted.
* All sampling parameters are sent, so that no default of the server or of its model counts.

| waits for | who ends it |
|---|---|
| ``generate`` for events | the server, the call's deadline, cancellation |
| ``generate`` past its deadline, for the answer to its abort | the server, or ``ABORT_GRACE_S`` |
| ``generate`` between two attempts | the back-off, cancellation |
| ``score`` for its answer | the server, or its deadline |
| ``close`` for aborts on their way | the server, or ``ABORT_TIMEOUT_S`` |
"""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.engines.served.sglang.assembler import Assembler, Chunk, Generated
from penstock.backends.engines.served.sglang.control import SglangControl
from penstock.backends.engines.served.sglang.http import (
    BadReply,
    ConnectFailed,
    CutOff,
    Refused,
    ServerBusy,
    SglangError,
    TimedOut,
)
from penstock.backends.engines.served.sglang.replies import BusyInStream, RefusedInStream, decode_reply
from penstock.messages.arrays import pack_floats, tokens_view
from penstock.messages.base import Value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from penstock.backends.engines.served.sglang.http import EventStream, SglangHttp
    from penstock.backends.engines.served.sglang.replies import MetaInfo

ABORT_TIMEOUT_S: Final = 5.0
ABORT_GRACE_S: Final = 2.0
"""For the tokens that an aborted request still owes. A server paused in place answers only when it goes on."""
STREAM_END_S: Final = 1.0
"""For the end of a stream whose last event was read; then its connection is closed instead of used again."""
LINGER_S: Final = 2.5
"""The server aborts a request id 2 s after a stream under it has ended; another under the same id has to wait."""
DUPLICATE: Final = "Duplicate request ID"
ROUTING_HEADER: Final = "X-SMG-Routing-Key"


class BadTokenError(Exception):
    """A token id lies outside the model's embedding; it was not sent, since it would end the server."""


class GenerateCall(Value, frozen=True, kw_only=True):
    """One request."""

    rid: str
    """Unique: the server knows a request by it, and aborts whatever else has the same."""
    input_ids: bytes
    """int32 ``[P]``: prompt, and what was generated before."""
    max_new_tokens: int
    temperature: float = 1.0
    """0: the likeliest token, with the log-probs of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Besides the end-of-sequence tokens of model and tokenizer."""
    ignore_eos: bool = False
    """Goes on past end tokens, those of ``stop_token_ids`` included."""
    seed: int | None = None
    extra_key: str
    """Requests share a prefix cache only with those of the same key: the version of the weights."""
    priority: int | None = None
    deadline_s: float
    """From the call on, for all attempts together."""
    routing_key: str = ""
    """For a router that keeps a session on one server."""
    extras: tuple[tuple[str, msgspec.Raw], ...] = ()
    """Further fields of the request's body, as JSON (``image_data``)."""


class RetryPolicy(Value, frozen=True, kw_only=True):
    """How long, and how often, a server that does not answer is tried again."""

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    give_up_after_s: float = 60.0
    """Since the first attempt; the deadline of the request counts as well."""


class _Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    stream_interval: int
    sampling_seed: int | None = None
    n: int = 1
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    # The text is not read; these spare the detokenizer a pass over it each.
    skip_special_tokens: bool = False
    spaces_between_special_tokens: bool = False
    no_stop_trim: bool = True


class _Body(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    rid: str
    input_ids: list[int]
    sampling_params: _Sampling
    extra_key: str
    priority: int | None = None
    stream: bool = True
    return_logprob: bool = True
    logprob_start_len: int = -1


class _ScoreBody(_Body, frozen=True, kw_only=True, gc=False):
    token_ids_logprob: list[int] | None = None

    @staticmethod
    def of(
        ids: list[int], *, rid: str, extra_key: str, first: int, token_ids_logprob: list[int] | None = None
    ) -> _ScoreBody:
        """Makes nothing; scores the ids from place ``first`` on, or the given ids at each of these places."""
        nothing = GenerateCall(rid=rid, input_ids=b"", max_new_tokens=0, extra_key=extra_key, deadline_s=0.0)
        return _ScoreBody(
            rid=rid,
            input_ids=ids,
            sampling_params=_sampling(nothing, 1),
            extra_key=extra_key,
            stream=False,
            logprob_start_len=first - 1,  # the first entry is that of a token whose log-prob nobody computes
            token_ids_logprob=token_ids_logprob,
        )


_ENCODER: Final = msgspec.json.Encoder()


class SglangGenerator:
    """The requests of one engine."""

    def __init__(
        self,
        http: SglangHttp,
        *,
        vocab_size: int,
        incremental: bool,
        stream_interval: int = 64,
        seeded: bool = False,
        priorities: bool = False,
        retry: RetryPolicy | None = None,
        abort_at: Sequence[SglangHttp] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``vocab_size``: rows of the embedding. ``incremental``: the server's ``incremental_streaming_output``.
        ``stream_interval``: tokens between two events. ``seeded``, ``priorities``: whether the server heeds them.
        ``abort_at``: the servers behind a router, which does not pass aborts on."""
        self._http = http
        self._vocab_size = vocab_size
        self._incremental = incremental
        self._stream_interval = stream_interval
        self._seeded = seeded
        self._priorities = priorities
        self._retry = retry or RetryPolicy()
        self._abort_at = tuple(SglangControl(server) for server in abort_at or (http,))
        self._clock = clock
        self._sleep = sleep
        self._aborts: set[asyncio.Task[None]] = set()

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

    async def score(self, tokens: bytes, *, rid: str, extra_key: str, timeout_s: float, first: int = 1) -> bytes:
        """Log-probs float32 ``[T − first]`` of tokens ``[T]`` at temperature 1, from place ``first`` on, each given all
        before it. Not answered while generation is paused.

        Raises:
            BadTokenError: an id lies outside the embedding.
            SglangError: the call failed, or the answer is for other tokens.
        """
        ids = self._checked(tokens)
        meta = await self._score(_ScoreBody.of(ids, rid=rid, extra_key=extra_key, first=first), timeout_s)
        entries = meta.input_token_logprobs
        asked = ids[first - 1 :]
        if len(entries) != len(asked) or not all(
            self._names(e[1], sent) for e, sent in zip(entries, asked, strict=True)
        ):
            raise BadReply(
                f"scoring {rid}: asked for {len(asked)} tokens, the answer is for {len(entries)} or other ones"
            )
        logprobs = [entry[0] for entry in entries[1:] if entry[0] is not None]
        if len(logprobs) != len(asked) - 1:
            raise BadReply(f"scoring {rid}: {len(asked) - 1 - len(logprobs)} log-probs are no numbers")
        return pack_floats(logprobs)

    async def probe(self, tokens: bytes, *, rid: str, extra_key: str, timeout_s: float) -> bytes:
        """Log-probs float32 ``[T − 1, T]`` at temperature 1 of every one of the tokens ``[T]`` after tokens 0 … t.

        Raises:
            BadTokenError, SglangError: as :meth:`score`.
        """
        ids = self._checked(tokens)
        body = _ScoreBody.of(ids, rid=rid, extra_key=extra_key, first=1, token_ids_logprob=ids)
        rows = (await self._score(body, timeout_s)).input_token_ids_logprobs[1:]
        logprobs = [value for row in rows for value, _, _ in row or () if value is not None]
        if [[entry[1] for entry in row or ()] for row in rows] != [ids] * (len(ids) - 1) or (
            len(logprobs) != len(ids) * (len(ids) - 1)
        ):
            raise BadReply(f"scoring {rid}: the answer is not that of {len(ids)} tokens at {len(ids) - 1} places")
        return pack_floats(logprobs)

    async def _score(self, body: _ScoreBody, timeout_s: float) -> MetaInfo:
        try:
            data = await self._http.call("POST", "/generate", _ENCODER.encode(body), timeout_s=timeout_s)
        except (CutOff, TimedOut, asyncio.CancelledError):
            self.abort_soon(body.rid)
            raise
        _, meta = decode_reply(data)
        if meta.finish_reason is None or meta.finish_reason.type != "length":
            raise ServerBusy(f"scoring {body.rid} ended as {meta.finish_reason}")
        return meta

    async def abort(self, rid: str, timeout_s: float = ABORT_TIMEOUT_S) -> None:
        """End a request at the server; its ``generate`` then returns with what there is. Unknown ids do no harm.

        Raises:
            SglangError: a server could not be told.
        """
        calls = (control.abort(rid, timeout_s) for control in self._abort_at)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def abort_soon(self, rid: str) -> None:
        """Abort in the background: the caller cannot wait, and nothing depends on it."""
        if self._http.is_closed:
            return
        task = asyncio.get_running_loop().create_task(self._abort_quietly(rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def close(self) -> None:
        """Wait for aborts on their way."""
        if self._aborts:
            await asyncio.wait(tuple(self._aborts), timeout=ABORT_TIMEOUT_S)

    async def _abort_quietly(self, rid: str) -> None:
        with suppress(SglangError):
            await self.abort(rid)

    async def _tried(self, call: GenerateCall, body: bytes, on_chunk: Callable[[Chunk], None]) -> Generated:
        """As often as is safe and there is time for."""
        begun = self._clock()
        deadline = begun + call.deadline_s
        retry_until = min(deadline, begun + self._retry.give_up_after_s)
        for attempt in itertools.count():
            reply = Assembler(incremental=self._incremental, vocab_size=self._vocab_size, stop=call.stop)
            try:
                return await self._attempt(call, body, reply, on_chunk, deadline)
            except SglangError as error:
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
        headers = {ROUTING_HEADER: call.routing_key} if call.routing_key else None
        remaining_s = max(0.0, deadline - self._clock())
        async with self._http.stream("/generate", body, timeout_s=remaining_s, headers=headers) as events:
            if await _read(events, reply, on_chunk, max(0.0, deadline - self._clock())):
                return reply.generated()
            late = TimedOut(f"request {call.rid} did not end within {call.deadline_s:g} s")
            with suppress(SglangError):
                await self.abort(call.rid)
                await _read(events, reply, _ignore, ABORT_GRACE_S)
            return reply.failed(late)

    def _delay_s(self, rid: str, attempt: int, error: SglangError) -> float | None:
        """Until the next attempt; None: there is none."""
        again = isinstance(error, (ConnectFailed, ServerBusy))
        # The first attempt may still be ending; that it is there still says that this one was not begun.
        again = again or (attempt > 0 and isinstance(error, Refused) and DUPLICATE in error.message)
        if not again:
            return None
        delay_s = min(self._retry.max_delay_s, self._retry.first_delay_s * 2.0 ** min(attempt, 30))
        # Spread, so that the requests of one engine do not come back all at once.
        delay_s *= 0.5 + 0.5 * zlib.crc32(f"{rid}/{attempt}".encode()) / 2**32
        return delay_s + LINGER_S if isinstance(error, (BusyInStream, RefusedInStream)) else delay_s

    def _encoded(self, call: GenerateCall) -> bytes:
        if call.seed is not None and not self._seeded:
            raise ValueError(f"request {call.rid} has a seed, which this server does not heed")
        if call.priority is not None and not self._priorities:
            raise ValueError(f"request {call.rid} has a priority, which this server does not heed")
        body = _ENCODER.encode(
            _Body(
                rid=call.rid,
                input_ids=self._checked(call.input_ids),
                sampling_params=_sampling(call, self._stream_interval),
                extra_key=call.extra_key,
                priority=call.priority,
            )
        )
        if not call.extras:
            return body
        if taken := {name for name, _ in call.extras} & set(_Body.__struct_fields__):
            raise ValueError(f"request {call.rid}: {', '.join(sorted(taken))} cannot be given as an extra field")
        more = b",".join(_ENCODER.encode(name) + b":" + bytes(value) for name, value in call.extras)
        return body[:-1] + b"," + more + b"}"

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

    def _names(self, reported: int, sent: int) -> bool:
        """Whether the server means the token that was sent: it reports the last of the vocabulary as 0."""
        return reported == sent or (reported == 0 and sent == self._vocab_size - 1)


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
    except SglangError:
        if not reply.is_finished:
            raise
        return True
    if not reply.is_finished:
        raise CutOff("the stream ended without saying how the request did")
    return True


def _sampling(call: GenerateCall, stream_interval: int) -> _Sampling:
    return _Sampling(
        max_new_tokens=call.max_new_tokens,
        temperature=call.temperature,
        top_p=call.top_p,
        top_k=call.top_k or -1,
        min_p=call.min_p,
        stop=call.stop,
        stop_token_ids=call.stop_token_ids,
        ignore_eos=call.ignore_eos,
        stream_interval=stream_interval,
        sampling_seed=call.seed,
    )


def _ignore(_: Chunk) -> None:
    """What comes after a deadline is in the end's tokens only."""
