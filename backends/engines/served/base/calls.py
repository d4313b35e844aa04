"""One request to a server, and what became of it, in no server's dialect."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from penstock.messages.base import Value
from penstock.messages.kept_tokens import KeptTokens
from penstock.messages.samples import Media


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
    adapter: str = ""
    """Name of the adapter that it is computed with; empty: none."""
    extra_key: str
    """Requests share a prefix cache only with those of the same key: the version of the weights."""
    priority: int | None = None
    deadline_s: float
    """From the call on, for all attempts together."""
    routing_key: str = ""
    """For a router that keeps a session on one server."""
    media: tuple[Media, ...] = ()
    """What belongs to the prompt and is no text."""
    json_schema: str = ""
    """That the text has to follow; empty: none."""
    regex: str = ""
    """That it has to match as a whole; empty: none."""
    max_kept: int = 0
    """Tokens that are drawn from at most, which the server is to name, with log-probs over them; 0: neither."""
    with_experts: bool = False
    """Whether the server is to say which experts it chose for each token."""


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
    kept: KeptTokens | None = None
    """What they were drawn from, where that was asked for."""


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
    """float32 ``[T]``: log-softmax of logits ÷ temperature, over the whole vocabulary, or over ``kept``."""
    versions: tuple[VersionTokens, ...]
    """Adds up to T."""
    cached_tokens: int | None = None
    """Of the prompt, found in the prefix cache; None, as the next two: the server does not say."""
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    """Of these."""
    kept: KeptTokens | None = None
    """What they were drawn from, where that was asked for."""
    num_retractions: int = 0
    routed_experts: bytes = b""
    """int32, as the server sent them; empty: not asked for, or the request did not end by itself."""
    detail: str = ""
    failure: Failure | None = None
