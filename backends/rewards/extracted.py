"""An answer that was extracted from a response, as it travels and is written down."""

from __future__ import annotations

import hashlib

from penstock.messages.samples import MAX_ANSWER_CHARACTERS


def bounded_answer(text: str) -> str:
    """No longer than it may be, different where the answers are, and valid Unicode."""
    encoded = text.strip().encode("utf-8", "replace")
    if len(answer := encoded.decode()) <= MAX_ANSWER_CHARACTERS:
        return answer
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return f"{answer[: MAX_ANSWER_CHARACTERS - len(digest) - 1]}…{digest}"
