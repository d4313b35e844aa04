"""The events of ``/generate`` put together into tokens: no I/O, one :class:`SglangAssembler` for each request.

Invariants:

* Every kept id is the id that its log-prob names.
* The server says version spans only at the end; until then a token counts as made by the version that the server named
  one event *earlier*, so that it is never taken for newer than it is.

What the server does that a reader would not expect, each of it provided for here:

* With ``--incremental-streaming-output`` an event carries only what is new, but the last event of a request that is
  aborted while it is queued or retracted carries the last token again and the log-probs of *all* tokens. It is told
  by its short ``meta_info``: no ``prompt_tokens``.
* A token outside the vocabulary (the sampler met a NaN) ends as a stop at the string ``NaN happened``, with an end
  token in its place.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.assembler import Assembler, cut_versions
from penstock.backends.engines.served.base.calls import EndReason, Failure, VersionTokens
from penstock.backends.engines.served.base.http import BadReply
from penstock.backends.engines.served.sglang.media import check_count
from penstock.backends.engines.served.sglang.replies import BusyInStream, RefusedInStream, decode_reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.served.base.calls import Chunk
    from penstock.backends.engines.served.sglang.replies import FinishReason, MetaInfo, Reply, TokenLogprob

NOT_A_NUMBER_STOP: Final = "NaN happened"


class SglangAssembler(Assembler):
    """The tokens of one request, event by event."""

    def __init__(
        self,
        *,
        incremental: bool,
        vocab_size: int,
        stop: Sequence[str] = (),
        with_kept: bool = False,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """``with_kept``: the server is to say what each token was drawn from. ``num_prompt_tokens``: that the server
        has to count, where it has made some itself."""
        super().__init__(vocab_size=vocab_size)
        self._with_kept = with_kept
        self._num_prompt_tokens = num_prompt_tokens
        self._incremental = incremental
        self._stop = stop
        self._version = ""

    def take(self, payload: bytes) -> Chunk | None:
        """One event; its tokens, unless it has none or is the last.

        Raises:
            CallError: the event says that the request failed, or makes no sense.
        """
        reply, meta = decode_reply(payload)
        if self._num_prompt_tokens is not None and meta.prompt_tokens is not None:
            check_count(self._num_prompt_tokens, meta.prompt_tokens)
        have = len(self._tokens)
        ids, entries = self._new_part(reply, meta, have)
        version, self._version = self._version or meta.weight_version, meta.weight_version
        # A short meta_info says nothing of the cache.
        self._cached_tokens = _larger(self._cached_tokens, meta.cached_tokens)
        self._drafted_tokens = _larger(self._drafted_tokens, meta.spec_num_proposed_drafts)
        self._accepted_tokens = _larger(self._accepted_tokens, meta.spec_num_correct_drafts)
        self._num_retractions = max(self._num_retractions, meta.num_retractions)
        if self._with_kept:
            entries = self._over_kept(meta, ids, entries, have)
        self._keep(ids, entries, version)
        if meta.completion_tokens is not None and meta.completion_tokens != len(self._tokens):
            raise BadReply(f"{len(self._tokens)} tokens came where the server counts {meta.completion_tokens}")
        if meta.finish_reason is not None:
            self._finish(meta, meta.finish_reason)
            return None
        if not ids:
            return None
        return self._chunk(have, version)

    def _new_part(self, reply: Reply, meta: MetaInfo, have: int) -> tuple[list[int], list[TokenLogprob]]:
        """Ids and log-probs beyond those that came before."""
        ids, entries = reply.output_ids, meta.output_token_logprobs
        if self._incremental and meta.prompt_tokens is not None:  # None: aborted while it was queued or retracted
            return ids, entries
        if self._incremental:
            count = meta.completion_tokens or 0
            entries = entries[len(entries) - count :] if count <= len(entries) else entries
            ids = [entry[1] for entry in entries]
        if len(ids) < have or (have and ids[have - 1] != self._tokens[-1]):
            raise BadReply(f"an event names other tokens than those before it ({len(ids)}, after {have})")
        return ids[have:], entries[have:]

    def _over_kept(
        self, meta: MetaInfo, ids: Sequence[int], entries: Sequence[TokenLogprob], have: int
    ) -> list[TokenLogprob]:
        """Take what the new tokens were drawn from; their entries with log-probs over that. A short ``meta_info`` adds
        nothing to either list."""
        begin = 0 if self._incremental else have
        logprobs = meta.output_token_sampling_logprobs[begin:]
        self._note_kept(ids, meta.output_token_sampling_mask[begin:])
        if len(logprobs) != len(entries):
            raise BadReply(f"{len(entries)} tokens came with {len(logprobs)} log-probs over what they were drawn from")
        return [(logprob, token, text) for logprob, (_, token, text) in zip(logprobs, entries, strict=True)]

    def _keep(self, ids: list[int], entries: list[TokenLogprob], version: str) -> None:
        named = [entry[1] for entry in entries]
        if named != ids:
            raise BadReply(f"{len(ids)} tokens came with log-probs of {len(named)} tokens, or of other ones")
        self._append(ids, [entry[0] for entry in entries], version)

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
        spans = cut_versions(
            (VersionTokens(s.version, s.end - s.start) for s in meta.weight_versions), len(self._tokens)
        )
        covered = sum(span.num_tokens for span in spans)
        if covered != len(self._tokens):
            raise BadReply(f"the version spans cover {covered} of {len(self._tokens)} tokens")
        return spans


def _larger(known: int | None, said: int | None) -> int | None:
    return said if known is None else known if said is None else max(known, said)
