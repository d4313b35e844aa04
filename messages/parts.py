"""Stretches of one response and the versions that made them: joined, and cut. Spans without tokens are left out."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final

from penstock.messages.arrays import LOGPROB_BYTES, TOKEN_BYTES
from penstock.messages.engine_counts import added
from penstock.messages.kept_tokens import joined_kept
from penstock.messages.samples import Part, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NOTHING: Final = Part()


def add_span(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append a span to those of a growing response; neighbours of one version are one."""
    if spans and spans[-1].version == span.version:
        spans[-1] = VersionSpan(span.version, spans[-1].num_tokens + span.num_tokens)
    elif span.num_tokens:
        spans.append(span)


def joined_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The same tokens, with neighbours of one version as one span."""
    joined: list[VersionSpan] = []
    for span in spans:
        add_span(joined, span)
    return tuple(joined)


def spans_between(spans: Iterable[VersionSpan], begin: int, end: int) -> tuple[VersionSpan, ...]:
    """Those of the tokens ``begin`` … ``end − 1``."""
    found: list[VersionSpan] = []
    start = 0
    for span in spans:
        stop = start + span.num_tokens
        length = (stop if stop < end else end) - (start if start > begin else begin)
        if length > 0:
            found.append(VersionSpan(span.version, length))
        start = stop
    return tuple(found)


def join(chunks: Sequence[Part]) -> Part:
    """Successive stretches of one response as one part."""
    if len(chunks) == 2 and chunks[0] == NOTHING:  # most responses are begun once, and to put one together takes long
        return chunks[1]
    is_masked = any(chunk.loss_mask for chunk in chunks)
    begins = accumulate((chunk.num_tokens for chunk in chunks), initial=0)
    return Part(
        tokens=b"".join(chunk.tokens for chunk in chunks),
        logprobs=b"".join(chunk.logprobs for chunk in chunks),
        spans=joined_spans(span for chunk in chunks for span in chunk.spans),
        loss_mask=b"".join(chunk.loss_mask or b"\1" * chunk.num_tokens for chunk in chunks) if is_masked else b"",
        context_tokens=chunks[0].context_tokens if chunks else b"",
        experts=chunks[-1].experts if chunks else None,
        save_point=next((chunk.save_point for chunk in reversed(chunks) if chunk.save_point is not None), None),
        counts=added(chunk.counts for chunk in chunks),
        media=tuple(each.moved(begin) for chunk, begin in zip(chunks, begins, strict=False) for each in chunk.media),
        kept=joined_kept((chunk.kept, chunk.num_tokens) for chunk in chunks),
    )


def cut(part: Part, begin: int, end: int | None = None) -> Part:
    """Tokens ``begin`` … ``end − 1`` of a part. Only all of it keeps the choice of experts, what a teacher said and
    what the engine counted; what stands before a later token is not repeated as its context."""
    if not begin and end is None:
        return part
    stop = part.num_tokens if end is None else min(end, part.num_tokens)
    return Part(
        tokens=part.tokens[begin * TOKEN_BYTES : stop * TOKEN_BYTES],
        logprobs=part.logprobs[begin * LOGPROB_BYTES : stop * LOGPROB_BYTES],
        spans=spans_between(part.spans, begin, stop),
        loss_mask=part.loss_mask[begin:stop],
        context_tokens=b"" if begin else part.context_tokens,
        save_point=None if begin else part.save_point,
        media=tuple(each.moved(-begin) for each in part.media if (not begin or each.at >= begin) and each.at < stop),
        kept=None if part.kept is None else part.kept.between(begin, stop),
    )
