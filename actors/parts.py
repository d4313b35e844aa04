"""Stretches of one response: joined, and cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.arrays import LOGPROB_BYTES, TOKEN_BYTES
from penstock.messages.samples import Part, VersionSpan

if TYPE_CHECKING:
    from collections.abc import Sequence


def join(chunks: Sequence[Part]) -> Part:
    """Successive stretches of one response as one part."""
    spans: list[VersionSpan] = []
    for span in (span for chunk in chunks for span in chunk.spans):
        if spans and spans[-1].version == span.version:
            spans[-1] = VersionSpan(span.version, spans[-1].num_tokens + span.num_tokens)
        else:
            spans.append(span)
    is_masked = any(chunk.loss_mask for chunk in chunks)
    return Part(
        tokens=b"".join(chunk.tokens for chunk in chunks),
        logprobs=b"".join(chunk.logprobs for chunk in chunks),
        spans=tuple(spans),
        loss_mask=b"".join(chunk.loss_mask or b"\1" * chunk.num_tokens for chunk in chunks) if is_masked else b"",
        context_tokens=chunks[0].context_tokens if chunks else b"",
        experts=chunks[-1].experts if chunks else None,
        save_point=next((chunk.save_point for chunk in reversed(chunks) if chunk.save_point is not None), None),
    )


def head(part: Part, num_tokens: int) -> Part:
    """The part up to this token, without the choice of experts."""
    spans: list[VersionSpan] = []
    left = num_tokens
    for span in part.spans:
        if left > 0:
            spans.append(VersionSpan(span.version, min(span.num_tokens, left)))
        left -= span.num_tokens
    return Part(
        tokens=part.tokens[: num_tokens * TOKEN_BYTES],
        logprobs=part.logprobs[: num_tokens * LOGPROB_BYTES],
        spans=tuple(spans),
        loss_mask=part.loss_mask[:num_tokens],
        context_tokens=part.context_tokens,
        save_point=part.save_point,
    )


def tail(part: Part, from_token: int) -> Part:
    """The part from this token on; what stands before it is not repeated as context, but all of it keeps its own."""
    if not from_token:
        return part
    spans: list[VersionSpan] = []
    end = 0
    for span in part.spans:
        end += span.num_tokens
        if end > from_token:
            spans.append(VersionSpan(span.version, min(span.num_tokens, end - from_token)))
    return Part(
        tokens=part.tokens[from_token * TOKEN_BYTES :],
        logprobs=part.logprobs[from_token * LOGPROB_BYTES :],
        spans=tuple(spans),
        loss_mask=part.loss_mask[from_token:],
    )
