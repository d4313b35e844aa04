"""The events of one response put together into tokens: no I/O, one :class:`Assembler` for each request.

Invariants:

* Tokens and log-probs are kept as far as they agree with each other and with the server's own count; what comes after
  the first disagreement is refused with :class:`BadReply`, and what came before stays.
* Every kept id lies inside the vocabulary and has a log-prob that is a number.
* Version spans add up to the tokens.
* Every token is among those that it was drawn from, where these were asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.calls import Chunk, EndReason, Failure, Generated, VersionTokens
from penstock.backends.engines.served.base.http import (
    BadReply,
    CallError,
    ConnectFailed,
    CutOff,
    Refused,
    ServerBusy,
    ServerError,
    TimedOut,
)
from penstock.messages.kept_tokens import MAX_COUNT, KeptTokens, joined_kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class NotANumberReply(BadReply):
    """A log-prob that is no number."""


_FAILURES: Final[dict[type[CallError], Failure]] = {
    ConnectFailed: Failure.NO_CONNECTION,
    ServerBusy: Failure.BUSY,
    Refused: Failure.REFUSED,
    ServerError: Failure.SERVER_ERROR,
    CutOff: Failure.CUT_OFF,
    TimedOut: Failure.TIMED_OUT,
    NotANumberReply: Failure.NOT_A_NUMBER,
    BadReply: Failure.BAD_REPLY,
}


class Assembler(ABC):
    """The tokens of one request, event by event. A dialect says in :meth:`take` what an event means."""

    def __init__(self, *, vocab_size: int) -> None:
        self.is_finished = False
        self._vocab_size = vocab_size
        self._tokens = array("i")
        self._logprobs = array("f")
        self._labels: list[VersionTokens] = []
        self._exact: tuple[VersionTokens, ...] | None = None
        """The server's own account of versions, when it gives one in the end."""
        self._end = EndReason.FAILED
        self._failure: Failure | None = None
        self._detail = ""
        self._cached_tokens: int | None = None
        self._drafted_tokens: int | None = None
        self._accepted_tokens: int | None = None
        self._num_retractions = 0
        self._routed_experts = b""
        self._kept: KeptTokens | None = None
        """Of the tokens, and of some behind them where one has no log-prob."""

    @property
    def num_tokens(self) -> int:
        """Received so far."""
        return len(self._tokens)

    @abstractmethod
    def take(self, payload: bytes) -> Chunk | None:
        """One event; its tokens, unless it has none or is the last.

        Raises:
            CallError: the event says that the request failed, or makes no sense.
        """

    def generated(self) -> Generated:
        """What a finished request gave."""
        if not self.is_finished:
            raise ValueError("the request has not finished")
        return self._generated(self._end, self._detail, self._failure)

    def failed(self, error: CallError) -> Generated:
        """What a request gave that failed on the way."""
        for kind in type(error).__mro__:
            if (failure := _FAILURES.get(kind)) is not None:
                return self._generated(EndReason.FAILED, error.message, failure)
        raise error

    def _append(self, ids: Sequence[int], logprobs: Sequence[float | None], version: str) -> None:
        """Keep these tokens, as many of them as have a log-prob."""
        if not ids:
            return
        if max(ids) >= self._vocab_size or min(ids) < 0:
            raise BadReply(f"a token outside the vocabulary of {self._vocab_size} came back: {max(ids)}, {min(ids)}")
        numbers = [logprob for logprob in logprobs if logprob is not None]
        if len(numbers) == len(ids):
            self._extend(ids, numbers, version)
            return
        good = next(i for i, logprob in enumerate(logprobs) if logprob is None)
        # What follows a token without a probability has no meaning.
        self._extend(ids[:good], numbers[:good], version)
        raise NotANumberReply(f"token {len(self._tokens)} of the response has a log-prob that is no number")

    def _note_kept(self, ids: Sequence[int], sets: Sequence[Sequence[int]]) -> None:
        """What the next tokens were drawn from; before they are appended.

        Raises:
            BadReply: it cannot be.
        """
        if len(sets) != len(ids):
            raise BadReply(f"{len(ids)} tokens came, and what {len(sets)} were drawn from (return_sampling_mask)")
        for token, own in zip(ids, sets, strict=True):
            if token not in own or min(own) < 0 or max(own) >= self._vocab_size or len(own) > MAX_COUNT:
                raise BadReply(f"token {token} is not among the {len(own)} that it was drawn from, or these cannot be")
        counts, kept = array("H", map(len, sets)), array("i", chain.from_iterable(sets))
        self._kept = joined_kept(
            [(self._kept, len(self._tokens)), (KeptTokens(counts.tobytes(), kept.tobytes()), len(ids))]
        )

    def _kept_from(self, begin: int) -> KeptTokens | None:
        return None if self._kept is None else self._kept.between(begin, len(self._tokens))

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float], version: str) -> None:
        if not ids:
            return
        self._tokens.extend(ids)
        self._logprobs.extend(logprobs)
        if self._labels and self._labels[-1].version == version:
            self._labels[-1] = VersionTokens(version, self._labels[-1].num_tokens + len(ids))
        else:
            self._labels.append(VersionTokens(version, len(ids)))

    def _chunk(self, have: int, version: str) -> Chunk:
        """The tokens beyond those that came before."""
        tokens, logprobs = self._tokens[have:].tobytes(), self._logprobs[have:].tobytes()
        return Chunk(have, tokens, logprobs, version, self._kept_from(have))

    def _generated(self, end: EndReason, detail: str, failure: Failure | None) -> Generated:
        versions = self._labels if self._exact is None else self._exact
        return Generated(
            end=end,
            tokens=self._tokens.tobytes(),
            logprobs=self._logprobs.tobytes(),
            versions=cut_versions(versions, len(self._tokens)),
            cached_tokens=self._cached_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            kept=self._kept_from(0),
            num_retractions=self._num_retractions,
            routed_experts=self._routed_experts,
            detail=detail,
            failure=failure,
        )


def cut_versions(spans: Iterable[VersionTokens], num_tokens: int) -> tuple[VersionTokens, ...]:
    """The spans of the first so many tokens, without empty ones."""
    kept: list[VersionTokens] = []
    for version, count in spans:
        if (taken := min(count, num_tokens)) > 0:
            kept.append(VersionTokens(version, taken))
            num_tokens -= taken
    return tuple(kept)
