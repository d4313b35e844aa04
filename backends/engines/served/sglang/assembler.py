"""The events of ``/generate`` put together into tokens: no I/O, one :class:`Assembler` for each request.

Invariants:

* Tokens and log-probs are kept as far as they agree with each other and with the server's own count; what comes after
  the first disagreement is refused with :class:`BadReply`, and what came before stays.
* Every kept id lies inside the vocabulary and is the id that its log-prob names.
* Version spans add up to the tokens. The server says them only at the end; until then a token counts as made by the
  version that the server named one event *earlier*, so that it is never taken for newer than it is.

What the server does that a reader would not expect, each of it provided for here:

* With ``--incremental-streaming-output`` an event carries only what is new, but the last event of a request that is
  aborted while it is queued or retracted carries the last token again and the log-probs of *all* tokens. It is told
  by its short ``meta_info``: no ``prompt_tokens``.
* A token outside the vocabulary (the sampler met a NaN) ends as a stop at the string ``NaN happened``, with an end
  token in its place.
"""

from __future__ import annotations

import base64
from array import array
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.served.sglang.http import (
    BadReply,
    ConnectFailed,
    CutOff,
    Refused,
    ServerBusy,
    ServerError,
    SglangError,
    TimedOut,
)
from penstock.backends.engines.served.sglang.replies import BusyInStream, NotANumberReply, RefusedInStream, decode_reply
from penstock.messages.base import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backends.engines.served.sglang.replies import FinishReason, MetaInfo, Reply, TokenLogprob

NOT_A_NUMBER_STOP: Final = "NaN happened"


class EndReason(StrEnum):
    """How a generation ended."""

    STOP_TOKEN = "stop_token"
    """The end-of-sequence token, or one of ``stop_token_ids``; it is the last of the tokens."""
    STOP_STRING = "stop_string"
    LENGTH = "length"
    """``max_new_tokens``, or the context of the model, is full."""
    ABORTED = "aborted"
    """Somebody asked for it: an abort, a pause of mode ``abort``, an update that aborts."""
    FAILED = "failed"
    """See ``failure``."""


class Failure(StrEnum):
    """Why a generation failed."""

    NO_CONNECTION = "no_connection"
    """The server could not be reached for as long as it was tried."""
    BUSY = "busy"
    """503 or 504 for as long as it was tried."""
    REFUSED = "refused"
    """The request is wrong for this server; another attempt would be refused as well."""
    SERVER_ERROR = "server_error"
    CUT_OFF = "cut_off"
    """The connection was lost before the end; the server has probably died."""
    TIMED_OUT = "timed_out"
    """The request's deadline passed; it was aborted at the server."""
    BAD_REPLY = "bad_reply"
    """The server's answer contradicts itself."""
    NOT_A_NUMBER = "not_a_number"
    """The model computed a NaN."""


class Chunk(NamedTuple):
    """Tokens that came with one event, before the last one."""

    from_token: int
    tokens: bytes
    """int32 ids ``[T]``."""
    logprobs: bytes
    """float32 ``[T]``."""
    version: str
    """The oldest version that can have made them."""


class VersionTokens(NamedTuple):
    """``num_tokens`` successive tokens that the weights of ``version`` made."""

    version: str
    num_tokens: int


class Generated(Value, frozen=True, kw_only=True):
    """What became of one request: in every case with the tokens that arrived."""

    end: EndReason
    tokens: bytes
    """int32 ids ``[T]``."""
    logprobs: bytes
    """float32 ``[T]``: log-softmax of logits ÷ temperature, over the whole vocabulary."""
    versions: tuple[VersionTokens, ...]
    """Adds up to T."""
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""
    num_retractions: int = 0
    routed_experts: bytes = b""
    """int32, as the server sent them; empty: not asked for, or the request did not end by itself."""
    detail: str = ""
    failure: Failure | None = None


_FAILURES: Final[dict[type[SglangError], Failure]] = {
    ConnectFailed: Failure.NO_CONNECTION,
    ServerBusy: Failure.BUSY,
    Refused: Failure.REFUSED,
    ServerError: Failure.SERVER_ERROR,
    CutOff: Failure.CUT_OFF,
    TimedOut: Failure.TIMED_OUT,
    NotANumberReply: Failure.NOT_A_NUMBER,
    BadReply: Failure.BAD_REPLY,
}


class Assembler:
    """The tokens of one request, event by event."""

    def __init__(self, *, incremental: bool, vocab_size: int, stop: Sequence[str] = ()) -> None:
        self.is_finished = False
        self._incremental = incremental
        self._vocab_size = vocab_size
        self._stop = stop
        self._tokens = array("i")
        self._logprobs = array("f")
        self._labels: list[VersionTokens] = []
        self._version = ""
        self._exact: tuple[VersionTokens, ...] | None = None
        self._end = EndReason.FAILED
        self._failure: Failure | None = None
        self._detail = ""
        self._cached_tokens = 0
        self._num_retractions = 0
        self._routed_experts = b""

    @property
    def num_tokens(self) -> int:
        """Received so far."""
        return len(self._tokens)

    def take(self, payload: bytes) -> Chunk | None:
        """One event; its tokens, unless it has none or is the last.

        Raises:
            SglangError: the event says that the request failed, or makes no sense.
        """
        reply, meta = decode_reply(payload)
        have = len(self._tokens)
        ids, entries = self._new_part(reply, meta, have)
        version, self._version = self._version or meta.weight_version, meta.weight_version
        # A short meta_info says nothing of the cache.
        self._cached_tokens = max(self._cached_tokens, meta.cached_tokens)
        self._num_retractions = max(self._num_retractions, meta.num_retractions)
        self._append(ids, entries, version)
        if meta.completion_tokens is not None and meta.completion_tokens != len(self._tokens):
            raise BadReply(f"{len(self._tokens)} tokens came where the server counts {meta.completion_tokens}")
        if meta.finish_reason is not None:
            self._finish(meta, meta.finish_reason)
            return None
        if not ids:
            return None
        return Chunk(have, self._tokens[have:].tobytes(), self._logprobs[have:].tobytes(), version)

    def generated(self) -> Generated:
        """What a finished request gave."""
        if not self.is_finished:
            raise ValueError("the request has not finished")
        return self._generated(self._end, self._detail, self._failure)

    def failed(self, error: SglangError) -> Generated:
        """What a request gave that failed on the way."""
        for kind in type(error).__mro__:
            if (failure := _FAILURES.get(kind)) is not None:
                return self._generated(EndReason.FAILED, error.message, failure)
        raise error

    def _new_part(self, reply: Reply, meta: MetaInfo, have: int) -> tuple[list[int], list[TokenLogprob]]:
        """Ids and log-probs beyond those that came before."""
        ids, entries = reply.output_ids, meta.output_token_logprobs
        if self._incremental and not _is_short(meta):
            return ids, entries
        if self._incremental:
            count = meta.completion_tokens or 0
            entries = entries[len(entries) - count :] if count <= len(entries) else entries
            ids = [entry[1] for entry in entries]
        if len(ids) < have or (have and ids[have - 1] != self._tokens[-1]):
            raise BadReply(f"an event names other tokens than those before it ({len(ids)}, after {have})")
        return ids[have:], entries[have:]

    def _append(self, ids: list[int], entries: list[TokenLogprob], version: str) -> None:
        if not ids and not entries:
            return
        named = [entry[1] for entry in entries]
        if named != ids:
            raise BadReply(f"{len(ids)} tokens came with log-probs of {len(named)} tokens, or of other ones")
        if max(ids) >= self._vocab_size or min(ids) < 0:
            raise BadReply(f"a token outside the vocabulary of {self._vocab_size} came back: {max(ids)}, {min(ids)}")
        numbers = [entry[0] for entry in entries if entry[0] is not None]
        if len(numbers) == len(ids):
            self._extend(ids, numbers, version)
            return
        good = next(i for i, entry in enumerate(entries) if entry[0] is None)
        # What follows a token without a probability has no meaning.
        self._extend(ids[:good], numbers[:good], version)
        raise NotANumberReply(f"token {len(self._tokens)} of the response has a log-prob that is no number")

    def _extend(self, ids: list[int], logprobs: list[float], version: str) -> None:
        if not ids:
            return
        self._tokens.extend(ids)
        self._logprobs.extend(logprobs)
        if self._labels and self._labels[-1].version == version:
            self._labels[-1] = VersionTokens(version, self._labels[-1].num_tokens + len(ids))
        else:
            self._labels.append(VersionTokens(version, len(ids)))

    def _finish(self, meta: MetaInfo, reason: FinishReason) -> None:
        self._exact = self._spans(meta)
        if meta.routed_experts:
            try:
                self._routed_experts = base64.b64decode(meta.routed_experts, validate=True)
            except ValueError as error:
                raise BadReply(f"the routed experts of a request cannot be read: {error}") from error
        self._end, self._failure = self._end_of(reason)
        self._detail = reason.message or ""
        if self._failure is Failure.NOT_A_NUMBER:
            # The server put an end token in the place of what it could not sample.
            self._tokens.pop()
            self._logprobs.pop()
            self._detail = "the sampler met a NaN"
        self.is_finished = True

    def _end_of(self, reason: FinishReason) -> tuple[EndReason, Failure | None]:
        match reason.type, reason.matched:
            case "length", _:
                return EndReason.LENGTH, None
            case "stop", str(text):
                if text == NOT_A_NUMBER_STOP and text not in self._stop:
                    return EndReason.FAILED, Failure.NOT_A_NUMBER
                return EndReason.STOP_STRING, None
            case "stop", int() | list():
                return EndReason.STOP_TOKEN, None
            case "abort", _:
                return self._abort_of(reason)
            case _:
                raise BadReply(f"a request finished for a reason that is not known: {reason}")

    def _abort_of(self, reason: FinishReason) -> tuple[EndReason, Failure | None]:
        """An abort with a status is a failure of the server's own making; nobody asked for it."""
        status = reason.status_code
        if status is None or status < 400:
            return EndReason.ABORTED, None
        message = f"the server gave the request up with {status}: {reason.message}"
        if status in (503, 504):
            if not self._tokens:
                raise BusyInStream(message, status)
            return EndReason.FAILED, Failure.BUSY
        if status < 500:
            raise RefusedInStream(message, status)
        return EndReason.FAILED, Failure.SERVER_ERROR

    def _spans(self, meta: MetaInfo) -> tuple[VersionTokens, ...] | None:
        """As the server says them, cut to the tokens that came: of a retracted request it may know of more."""
        if meta.weight_versions is None:
            return None
        spans = _cut((VersionTokens(s.version, s.end - s.start) for s in meta.weight_versions), len(self._tokens))
        covered = sum(span.num_tokens for span in spans)
        if covered != len(self._tokens):
            raise BadReply(f"the version spans cover {covered} of {len(self._tokens)} tokens")
        return spans

    def _generated(self, end: EndReason, detail: str, failure: Failure | None) -> Generated:
        versions = self._labels if self._exact is None else self._exact
        return Generated(
            end=end,
            tokens=self._tokens.tobytes(),
            logprobs=self._logprobs.tobytes(),
            versions=_cut(versions, len(self._tokens)),
            cached_tokens=self._cached_tokens,
            num_retractions=self._num_retractions,
            routed_experts=self._routed_experts,
            detail=detail,
            failure=failure,
        )


def _is_short(meta: MetaInfo) -> bool:
    """Of a request that was aborted while it was queued or retracted."""
    return meta.prompt_tokens is None


def _cut(spans: Iterable[VersionTokens], num_tokens: int) -> tuple[VersionTokens, ...]:
    """The spans of the first so many tokens, without empty ones."""
    kept: list[VersionTokens] = []
    for version, count in spans:
        if (taken := min(count, num_tokens)) > 0:
            kept.append(VersionTokens(version, taken))
            num_tokens -= taken
    return tuple(kept)
