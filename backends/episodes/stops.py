"""Stop strings of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.arrays import tokens_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.data.tokenizer import TextTokenizer
    from penstock.messages.samples import Part


class StopWatch:
    """Says with how many tokens a turn has one of the strings: with the first that completes it. Special tokens have no
    text."""

    def __init__(self, strings: Sequence[str], tokenizer: TextTokenizer) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    def __call__(self, new: Part) -> int | None:
        """See :attr:`~penstock.backends.episodes.protocol.TurnRequest.stops_at`."""
        num_before = len(self._ids)
        self._ids += tokens_view(new.tokens).tolist()
        if not self._has_stop(len(self._ids)):
            return None
        low, high = num_before, len(self._ids)  # it has none with `low` tokens, and one with `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._has_stop(middle) else (middle, high)
        return high

    def _has_stop(self, num_tokens: int) -> bool:
        text = self._tokenizer.decode(self._ids[:num_tokens])
        return any(string in text for string in self._strings)


def before_stop(text: str, strings: Sequence[str]) -> str:
    """The text up to the first of the strings."""
    places = [place for string in strings if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else text


def settled_text(text: str, openings: Sequence[str]) -> str:
    """The beginning of a growing text that can be passed on: without what may be the beginning of one of ``openings``,
    or of a character."""
    text = before_stop(text, openings).rstrip("\ufffd")
    for opening in openings:
        for length in range(min(len(opening) - 1, len(text)), 0, -1):
            if text.endswith(opening[:length]):
                text = text[:-length]
                break
    return text
