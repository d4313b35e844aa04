"""What engines count of the work that a response took them: what they found in their cache, and what was drafted.

Invariants:

* A figure that an engine does not tell is None, never 0; sums are of those that tell it.
* Accepted tokens are among the drafted ones, cached ones among those that were read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.base import Value

if TYPE_CHECKING:
    from collections.abc import Iterable


class EngineCounts(Value, frozen=True, array_like=True):
    """Of all requests for a response at the engine that finished it; turns of an episode are requests of their own."""

    num_read_tokens: int
    """Tokens that stood before what the requests made: prompts, and what was there when one went on."""
    num_cached_tokens: int | None = None
    """Of these, tokens whose keys and values were in the engine's prefix cache."""
    num_drafted_tokens: int | None = None
    """Tokens that speculative decoding proposed."""
    num_accepted_tokens: int | None = None
    """Of these, tokens that the model would have drawn itself, and so were kept."""


def in_words(counts: EngineCounts | None) -> str:
    """For people; empty where nothing is told."""
    if counts is None:
        return ""
    pairs = (
        (counts.num_cached_tokens, counts.num_read_tokens, "read tokens from the cache"),
        (counts.num_accepted_tokens, counts.num_drafted_tokens, "drafted tokens kept"),
    )
    return ", ".join(f"{part:,} of {whole:,} {what}" for part, whole, what in pairs if part is not None and whole)


def added(counts: Iterable[EngineCounts | None]) -> EngineCounts | None:
    """Of several requests; None: no engine has told anything."""
    told = [each for each in counts if each is not None]
    if not told:
        return None
    return EngineCounts(
        sum(each.num_read_tokens for each in told),
        _sum(each.num_cached_tokens for each in told),
        _sum(each.num_drafted_tokens for each in told),
        _sum(each.num_accepted_tokens for each in told),
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
