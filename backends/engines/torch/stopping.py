"""What ends a response besides the model's end token and the length limit: strings.

Invariant: a response ends with the token that completes a stop string; text and tokens are never cut apart.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer


class EndReason(Enum):
    """Why the engine ended a request."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORTED = "aborted"
    INTERRUPTED = "interrupted"


class StopStrings:
    """The strings of a scenario with the tokenizer that makes text of token ids."""

    def __init__(self, strings: Iterable[str], tokenizer: Tokenizer) -> None:
        """Raises:
        ValueError: a string is empty; every response would end at once.
        """
        self.strings = tuple(strings)
        if "" in self.strings:
            raise ValueError("sampling.stop must not contain an empty string")
        self.tokenizer = tokenizer
        self.tail_chars = max(len(string) for string in self.strings) - 1


class StopStringWatch:
    """Follows one response and says when it has one of the strings. Special tokens count as their text."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tail = ""

    def push(self, token: int) -> bool:
        """Take the next token; True when the text up to here contains a stop string."""
        chunk = self._stream.step(self._stops.tokenizer, token)
        if not chunk:
            return False
        text = self._tail + chunk
        tail_chars = self._stops.tail_chars
        self._tail = text[-tail_chars:] if tail_chars else ""
        return any(string in text for string in self._stops.strings)
