"""Requests to SGLang's ``/generate``: how they are worded, and how log-probs of given tokens are asked for.

Invariants:

* All sampling parameters are sent, so that no default of the server or of its model counts.
* A request that was refused within its stream is sent again only after the server has aborted its id once more.

| waits for | who ends it |
|---|---|
| ``score`` and ``probe`` for their answer | the server, or their deadline |
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.engines.served.base.calls import GenerateCall
from penstock.backends.engines.served.base.generator import Generator, RetryPolicy, ScoredText
from penstock.backends.engines.served.base.http import BadReply, CallError, CutOff, Refused, ServerBusy, TimedOut
from penstock.backends.engines.served.sglang.assembler import SglangAssembler
from penstock.backends.engines.served.sglang.control import SglangControl
from penstock.backends.engines.served.sglang.media import are_placed, as_written, media_fields
from penstock.backends.engines.served.sglang.replies import BusyInStream, RefusedInStream, decode_reply
from penstock.messages.arrays import TOKEN_BYTES, pack_floats, pack_tokens
from penstock.messages.top_logprobs import TopLogprobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from penstock.backends.engines.served.base.calls import Chunk, Generated
    from penstock.backends.engines.served.base.http import ServerHttp
    from penstock.backends.engines.served.sglang.media_fetch import MediaFetcher
    from penstock.backends.engines.served.sglang.replies import MetaInfo

LINGER_S: Final = 2.5
"""The server aborts a request id 2 s after a stream under it has ended; another under the same id has to wait."""
DUPLICATE: Final = "Duplicate request ID"
ROUTING_HEADER: Final = "X-SMG-Routing-Key"
ADAPTER: Final = "lora_path"
"""The server's word for the name of an adapter that is loaded."""
ROUTED_EXPERTS: Final = "return_routed_experts"
SAMPLING_MASK: Final = "return_sampling_mask"


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
    json_schema: str | msgspec.UnsetType = msgspec.UNSET
    regex: str | msgspec.UnsetType = msgspec.UNSET
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
    top_logprobs_num: int = 0
    lora_path: str | msgspec.UnsetType = msgspec.UNSET

    @staticmethod
    def of(
        ids: list[int],
        *,
        rid: str,
        extra_key: str,
        first: int,
        token_ids_logprob: list[int] | None = None,
        num_top: int = 0,
        adapter: str = "",
    ) -> _ScoreBody:
        """Makes nothing; scores the ids from place ``first`` on, or the given ids at each of these places, and names
        the ``num_top`` likeliest ids there."""
        nothing = GenerateCall(rid=rid, input_ids=b"", max_new_tokens=0, extra_key=extra_key, deadline_s=0.0)
        return _ScoreBody(
            rid=rid,
            input_ids=ids,
            sampling_params=_sampling(nothing, 1),
            extra_key=extra_key,
            stream=False,
            logprob_start_len=first - 1,  # the first entry is that of a token whose log-prob nobody computes
            token_ids_logprob=token_ids_logprob,
            top_logprobs_num=num_top,
            lora_path=adapter or msgspec.UNSET,
        )


_ENCODER: Final = msgspec.json.Encoder()


class SglangGenerator(Generator):
    """The requests of one engine."""

    path = "/generate"

    def __init__(
        self,
        http: ServerHttp,
        *,
        vocab_size: int,
        incremental: bool,
        stream_interval: int = 64,
        seeded: bool = False,
        priorities: bool = False,
        retry: RetryPolicy | None = None,
        abort_at: Sequence[ServerHttp] = (),
        fetcher: MediaFetcher | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``vocab_size``: rows of the embedding. ``incremental``: the server's ``incremental_streaming_output``.
        ``stream_interval``: tokens between two events. ``seeded``, ``priorities``: whether the server heeds them.
        ``abort_at``: the servers behind a router, which does not pass aborts on. ``fetcher``: of what prompts name by
        its address; None: they name nothing."""
        controls = [SglangControl(server) for server in abort_at or (http,)]
        super().__init__(http, vocab_size=vocab_size, abort_at=controls, retry=retry, clock=clock, sleep=sleep)
        self._incremental = incremental
        self._stream_interval = stream_interval
        self._seeded = seeded
        self._priorities = priorities
        self._fetcher = fetcher

    async def generate(self, call: GenerateCall, on_chunk: Callable[[Chunk], None]) -> Generated:
        """See :class:`~penstock.backends.engines.served.base.generator.Generator`."""
        if self._fetcher is not None and call.media:
            try:
                media = await self._fetcher.fetched(call.media, call.deadline_s)
            except BadReply as error:
                return self._assembler(call).failed(error)
            call = msgspec.structs.replace(call, media=media)
        return await super().generate(call, on_chunk)

    async def score(
        self, tokens: bytes, *, rid: str, extra_key: str, timeout_s: float, first: int = 1, num_top: int = 0
    ) -> ScoredText:
        """See :class:`~penstock.backends.engines.served.base.generator.Generator`."""
        ids = self._checked(tokens)
        body = _ScoreBody.of(ids, rid=rid, extra_key=extra_key, first=first, num_top=num_top)
        meta = await self._score(body, timeout_s)
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
        return ScoredText(pack_floats(logprobs), self._top(meta, len(logprobs), num_top, rid) if num_top else None)

    def _top(self, meta: MetaInfo, num_places: int, k: int, rid: str) -> TopLogprobs:
        rows = meta.input_top_logprobs[1:]
        found = [entry for row in rows for entry in row or ()]
        logprobs = [value for value, _, _ in found if value is not None]
        if [len(row or ()) for row in rows] != [k] * num_places or len(logprobs) != len(found):
            raise BadReply(f"scoring {rid}: the answer does not name the {k} likeliest tokens of {num_places} places")
        if beyond := [token for _, token, _ in found if not 0 <= token < self._vocab_size]:
            raise BadReply(f"scoring {rid}: token id {beyond[0]} is outside the vocabulary of {self._vocab_size}")
        return TopLogprobs(k, pack_tokens([token for _, token, _ in found]), pack_floats(logprobs))

    async def probe(self, tokens: bytes, *, rid: str, extra_key: str, timeout_s: float, adapter: str = "") -> bytes:
        """See :class:`~penstock.backends.engines.served.base.generator.Generator`."""
        ids = self._checked(tokens)
        body = _ScoreBody.of(ids, rid=rid, extra_key=extra_key, first=1, token_ids_logprob=ids, adapter=adapter)
        rows = (await self._score(body, timeout_s)).input_token_ids_logprobs[1:]
        logprobs = [value for row in rows for value, _, _ in row or () if value is not None]
        if [[entry[1] for entry in row or ()] for row in rows] != [ids] * (len(ids) - 1) or (
            len(logprobs) != len(ids) * (len(ids) - 1)
        ):
            raise BadReply(f"scoring {rid}: the answer is not that of {len(ids)} tokens at {len(ids) - 1} places")
        return pack_floats(logprobs)

    async def _score(self, body: _ScoreBody, timeout_s: float) -> MetaInfo:
        try:
            data = await self.http.call("POST", self.path, _ENCODER.encode(body), timeout_s=timeout_s)
        except (CutOff, TimedOut, asyncio.CancelledError):
            self.abort_soon(body.rid)
            raise
        _, meta = decode_reply(data)
        if meta.finish_reason is None or meta.finish_reason.type != "length":
            raise ServerBusy(f"scoring {body.rid} ended as {meta.finish_reason}")
        return meta

    def _encoded(self, call: GenerateCall) -> bytes:
        if call.seed is not None and not self._seeded:
            raise ValueError(f"request {call.rid} has a seed, which this server does not heed")
        if call.priority is not None and not self._priorities:
            raise ValueError(f"request {call.rid} has a priority, which this server does not heed")
        ids = self._checked(call.input_ids)
        body = _ENCODER.encode(
            _Body(
                rid=call.rid,
                input_ids=as_written(ids, call.media) if are_placed(call.media) else ids,
                sampling_params=_sampling(call, self._stream_interval),
                extra_key=call.extra_key,
                priority=call.priority,
            )
        )
        fields = media_fields(call.media)
        if call.adapter:
            fields = ((ADAPTER, msgspec.Raw(_ENCODER.encode(call.adapter))), *fields)
        if call.with_experts:
            fields = ((ROUTED_EXPERTS, msgspec.Raw(b"true")), *fields)
        if call.max_kept:
            fields = ((SAMPLING_MASK, msgspec.Raw(b"true")), *fields)
        more = b"".join(b"," + _ENCODER.encode(name) + b":" + bytes(value) for name, value in fields)
        return body[:-1] + more + b"}"

    def _assembler(self, call: GenerateCall) -> SglangAssembler:
        return SglangAssembler(
            incremental=self._incremental,
            vocab_size=self._vocab_size,
            stop=call.stop,
            with_kept=call.max_kept > 0,
            num_prompt_tokens=len(call.input_ids) // TOKEN_BYTES if are_placed(call.media) else None,
        )

    def _headers(self, call: GenerateCall) -> Mapping[str, str] | None:
        return {ROUTING_HEADER: call.routing_key} if call.routing_key else None

    def _retry_after_s(self, attempt: int, error: CallError) -> float | None:
        # The first attempt may still be ending; that it is there still says that this one was not begun.
        is_duplicate = attempt > 0 and isinstance(error, Refused) and DUPLICATE in error.message
        more_s = 0.0 if is_duplicate else super()._retry_after_s(attempt, error)
        return more_s if more_s is None or not isinstance(error, (BusyInStream, RefusedInStream)) else LINGER_S

    def _names(self, reported: int, sent: int) -> bool:
        """Whether the server means the token that was sent: it reports the last of the vocabulary as 0."""
        return reported == sent or (reported == 0 and sent == self._vocab_size - 1)


def _sampling(call: GenerateCall, stream_interval: int) -> _Sampling:
    return _Sampling(
        max_new_tokens=call.max_new_tokens,
        temperature=call.temperature,
        top_p=call.top_p,
        # A server names what it drew from only where top_k bounds that.
        top_k=min(call.top_k or call.max_kept, call.max_kept) if call.max_kept else call.top_k or -1,
        min_p=call.min_p,
        stop=call.stop,
        stop_token_ids=call.stop_token_ids,
        ignore_eos=call.ignore_eos,
        stream_interval=stream_interval,
        sampling_seed=call.seed,
        json_schema=call.json_schema or msgspec.UNSET,
        regex=call.regex or msgspec.UNSET,
    )
