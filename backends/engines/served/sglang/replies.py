"""What ``/generate`` answers, decoded: whole answers and the events of a stream have the same shape.

What the server does that a reader would not expect:

* A streamed request that is refused is answered 200 and an event with ``error``.
* The end of a stream makes the server abort the request's id once more, 2 s later, whoever has it by then.
* A log-prob that is no number is sent as null; the last id of the vocabulary is reported as 0 among those of a prompt.
* ``meta_info`` is short, without ``prompt_tokens``, for a request that was aborted while it was queued or retracted.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.backends.engines.served.base.http import BadReply, Refused, ServerBusy, ServerError, quoted
from penstock.messages.base import UNREADABLE


class FinishReason(msgspec.Struct, gc=False):
    """Why a request ended; null until then."""

    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class Span(msgspec.Struct, gc=False):
    """Output tokens from ``start`` to before ``end``."""

    version: str
    start: int
    end: int


TokenLogprob = tuple[float | None, int, str | None]
"""Null where there is no number; the text was not asked for."""


class MetaInfo(msgspec.Struct, gc=False):
    """The fields of ``meta_info`` that are read; a short one lacks most."""

    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_num_correct_drafts: int | None = None
    """Of the proposed ones, without the token that each verification draws besides."""
    num_retractions: int = 0
    weight_version: str = ""
    weight_versions: list[Span] | None = None
    input_token_logprobs: list[TokenLogprob] = []
    input_token_ids_logprobs: list[list[TokenLogprob] | None] = []
    """Of the ids that were asked for after each input token but the last; null before the first."""
    input_top_logprobs: list[list[TokenLogprob] | None] = []
    """The likeliest tokens in the place of each input token, the likeliest first; null in the first place."""
    output_token_logprobs: list[TokenLogprob] = []
    output_token_sampling_mask: list[list[int]] = []
    """What each output token was drawn from; of a request that asked for it, and not in a short one."""
    output_token_sampling_logprobs: list[float | None] = []
    """Of the output tokens over these."""
    routed_experts: str | None = None
    """Base64 of int32 ``[N, layers, k]`` for prompt and response but the last token; of a request that asked for it and
    has ended."""


class _StreamError(msgspec.Struct, gc=False):
    message: str
    code: int = 400


class Reply(msgspec.Struct, gc=False):
    """One event of a stream, or a whole answer."""

    output_ids: list[int] = []
    meta_info: MetaInfo | None = None
    error: _StreamError | None = None


_DECODER: Final = msgspec.json.Decoder(Reply)


class RefusedInStream(Refused):
    """Refused after the stream had begun: the server aborts this request id once more, 2 s after the stream's end."""


class BusyInStream(ServerBusy):
    """The same for a request that met a full queue."""


def decode_reply(payload: bytes) -> tuple[Reply, MetaInfo]:
    """One event or answer.

    Raises:
        BadReply: it is not one.
        CallError: it says that the request failed.
    """
    try:
        reply = _DECODER.decode(payload)
    except UNREADABLE as error:
        raise BadReply(f"cannot read an answer to /generate ({error}): {quoted(payload)}") from error
    if reply.error is not None:
        code, message = reply.error.code, f"the server answered: {reply.error.message}"
        if code in (503, 504):
            raise BusyInStream(message, code)
        if 400 <= code < 500:
            raise RefusedInStream(message, code)
        raise ServerError(message, code)
    if reply.meta_info is None:
        raise BadReply(f"an answer to /generate without meta_info: {quoted(payload)}")
    return reply, reply.meta_info
