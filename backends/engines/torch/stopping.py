"""What ends a response besides the model's end token and the length limit: strings.

Invariants:

* A response ends with the token that completes a stop string; text and tokens are never cut apart.
* No tokens, in whatever order a model makes them, are an error: bytes that are no text are replacement characters, and
  a token that the tokenizer does not know has no text.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer

REPLACEMENT: Final = "\ufffd"
"""What a tokenizer writes for bytes that are no character, or not yet one."""
MAX_OPEN_TOKENS: Final = 8
"""So many tokens are looked at together for the rest of a character, which has four bytes at most."""


class EndReason(Enum):
    """Why the engine ended a request."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORTED = "aborted"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    """What the model computed for it is no number."""


class StopStrings:
    """The strings of a scenario with the tokenizer that makes text of token ids."""

    def __init__(self, strings: Iterable[str], tokenizer: Tokenizer) -> None:
        """Raises:
        UserFault: a string is empty; every response would end at once.
        """
        self.strings = tuple(strings)
        if "" in self.strings:
            raise UserFault("sampling.stop must not contain an empty string")
        self.tokenizer = tokenizer
        self.tail_chars = max(len(string) for string in self.strings) - 1


class StopStringWatch:
    """Follows one response and says when it has one of the strings. Special tokens count as their text.

    Text is decoded a few tokens at a time: those that came last, after those that settled before them, because a
    tokenizer writes a token otherwise at the beginning than behind another one.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._tokens: list[int] = []
        """Those that settled last, and those whose text is still open."""
        self._num_settled = 0
        self._settled_text = ""
        """Of the settled ones by themselves."""
        self._tail = ""
        """The end of the text of all that settled."""

    def push(self, token: int) -> bool:
        """Take the next token; True when the text up to here contains a stop string."""
        tokenizer = self._stops.tokenizer
        if tokenizer.id_to_token(token) is None:
            return False
        self._tokens.append(token)
        text = tokenizer.decode(self._tokens, skip_special_tokens=False)
        num_kept = _num_common(self._settled_text, text)
        # Where a later byte makes the ones before it another character, the end of what settled is written anew.
        tail = self._tail[: max(0, len(self._tail) - (len(self._settled_text) - num_kept))]
        chunk = text[num_kept:]
        num_open = len(self._tokens) - self._num_settled
        is_open = (not chunk or chunk.endswith(REPLACEMENT)) and num_open < MAX_OPEN_TOKENS
        seen = tail + (chunk.rstrip(REPLACEMENT) if is_open else chunk)
        if any(string in seen for string in self._stops.strings):
            return True
        if not is_open:
            self._settle(seen)
        return False

    def _settle(self, text: str) -> None:
        """Whatever comes next is decoded after the tokens that were open until now."""
        self._tokens = self._tokens[self._num_settled :]
        self._num_settled = len(self._tokens)
        self._settled_text = self._stops.tokenizer.decode(self._tokens, skip_special_tokens=False)
        num_chars = self._stops.tail_chars + len(self._settled_text)
        self._tail = text[-num_chars:] if num_chars else ""


def _num_common(left: str, right: str) -> int:
    """Characters at the beginning of both."""
    if right.startswith(left):
        return len(left)
    return next(place for place, char in enumerate(left) if right[place : place + 1] != char)
