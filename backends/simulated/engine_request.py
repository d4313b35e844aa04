"""One request of a simulated engine: how far it has come, and the arrays of what it made.

Invariants:

* Token ``t`` of any response is ``t % 1000``, so a hole or a repeat shows.
* The spans add up to the tokens there are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from penstock.backends.draws import uniform
from penstock.messages.arrays import LOGPROB_BYTES, TOKEN_BYTES, pack_floats, pack_tokens
from penstock.messages.parts import add_span, spans_between
from penstock.messages.samples import Part, VersionSpan

if TYPE_CHECKING:
    from penstock.backends.simulated.lengths import Planned
    from penstock.messages.commands import Generate

LENGTH, _FAILS, _FAILS_AT, GROUP_LENGTH, NUM_TURNS, TURN_LENGTH, TOOL_WAIT = range(7)
"""Streams of random numbers of one sample."""
SLACK: Final = 1e-6
"""Of a token: what rounding may do to the shared count."""


class SimulatedRequest:
    """One request and how far it has come, in tokens from the start of its response."""

    __slots__ = (
        "admitted", "attempt", "ended", "ends", "fails", "hangs", "is_cut", "key", "last", "made", "next_tokens",
        "num_prefix", "num_prompt_tokens", "num_reported", "seed", "spans", "start", "version",
    )  # fmt: skip

    def __init__(self, command: Generate, plan: Planned, failure_rate: float) -> None:
        prefix = command.prefix
        self.seed = command.seed
        self.ends, self.is_cut = plan
        self.key = command.key
        self.attempt = command.attempt
        self.num_prompt_tokens = len(command.prompt.tokens) // TOKEN_BYTES
        self.num_prefix = 0 if prefix is None else prefix.num_tokens
        self.spans = [] if prefix is None else list(prefix.spans)
        self.made = self.num_reported = self.next_tokens = self.num_prefix
        self.last = max(self.ends[-1], self.num_prefix)
        self.fails = failure_rate > 0 and uniform(command.seed, _FAILS, command.attempt) < failure_rate
        if self.fails:
            share = uniform(command.seed, _FAILS_AT, command.attempt)
            self.last = self.num_prefix + int(share * (self.last - self.num_prefix))
        self.hangs = False
        self.start = self.admitted = 0.0
        self.version = -1
        self.ended = False

    @property
    def context_tokens(self) -> int:
        """That it holds: its prompt, and what was made."""
        return self.num_prompt_tokens + self.made

    @property
    def turn_end(self) -> int:
        """Where the turn ends that it makes tokens of, or its last one."""
        for end in self.ends:  # in order
            if end > self.made:
                return end
        return self.last

    @property
    def awaits_reply(self) -> bool:
        """A turn has ended, and it is not the last."""
        return self.made in self.ends[:-1] and self.made < self.last

    def hear(self, num_tokens: int) -> None:
        """Tools have put so many tokens before the next turn; they have the version of the token before them."""
        add_span(self.spans, VersionSpan(self.spans[-1].version, num_tokens))
        self.made += num_tokens

    def tokens_at(self, count: float) -> int:
        """Tokens that there are at this count; those planned for next are never passed."""
        made = self.num_prefix + max(0, int(count - self.start + SLACK))
        return max(self.made, min(self.next_tokens, made))

    def make(self, num_tokens: int) -> None:
        """There are ``num_tokens`` now; what is new was made by the version that the request runs under."""
        if num_tokens > self.made:
            add_span(self.spans, VersionSpan(self.version, num_tokens - self.made))
            self.made = num_tokens

    def part_from(self, first: int) -> Part:
        """The tokens from ``first`` to what there is."""
        tokens, logprobs = _arrays(first, self.made)
        spans = spans_between(self.spans, first, self.made) if first else tuple(self.spans)
        return Part(tokens=tokens, logprobs=logprobs, spans=spans)


@lru_cache(maxsize=4096)
def _arrays(first: int, last: int) -> tuple[bytes, bytes]:
    """Ids and log-probs of the tokens ``first`` to ``last`` of every response. Responses of one length share them: made
    anew for each, they are most of the memory of a run, and writing it takes longer than anything said about them."""
    tokens, logprobs = _token_table(_rounded(last)), _logprob_table(_rounded(last))
    return (
        tokens[first * TOKEN_BYTES : last * TOKEN_BYTES],
        logprobs[first * LOGPROB_BYTES : last * LOGPROB_BYTES],
    )


@lru_cache(maxsize=32)
def _token_table(size: int) -> bytes:
    """int32 ids ``[size]`` of every response."""
    return pack_tokens(t % 1000 for t in range(size))


@lru_cache(maxsize=32)
def _logprob_table(size: int) -> bytes:
    """float32 ``[size]`` of every response."""
    return pack_floats(-(1 + t % 7) / 10 for t in range(size))


def _rounded(num_tokens: int) -> int:
    """A size that has room, so that there are few tables."""
    return max(1024, 1 << num_tokens.bit_length())
