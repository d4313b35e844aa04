"""Text of strangers, kept from becoming control tokens of a model.

A tokenizer finds ``<|im_end|>`` wherever it stands. In a message that is put into a chat template it would end the
message's turn, and what follows could speak in anybody's name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backends.data.row import Message

JsonT = TypeVar("JsonT")
_MARK: Final = re.compile(r"[<\[]\S+[>\]]")
"""Tokens of this form mark something for the model, also where its tokenizer does not call them special."""


class ControlTokens:
    """Those of one tokenizer."""

    def __init__(self, added: Iterable[tuple[str, bool]]) -> None:
        """``added``: tokens beside the vocabulary, and whether the tokenizer calls them special."""
        known = list(added)
        self._special = _pattern_of(token for token, is_special in known if is_special)
        self._special_or_mark = _pattern_of(
            token for token, is_special in known if is_special or _MARK.fullmatch(token)
        )

    def inert(self, text: str, *, keeps_marks: bool = False) -> str:
        """The text with a space put into whatever would become a control token: the ends of turns and texts, and marks
        such as ``<tool_call>``.

        ``keeps_marks``: only into what the tokenizer calls special. For what the model itself has said, where
        ``<tool_call>`` is what it looks like.
        """
        pattern = self._special if keeps_marks else self._special_or_mark
        while pattern is not None:  # what stood around a token may be one, once the space is there
            text, num_found = pattern.subn(lambda found: f"{found.group()[0]} {found.group()[1:]}", text)
            if not num_found:
                break
        return text

    def inert_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages whose turns the template alone begins and ends. What the assistant says stays: special tokens may be
        a part of how its model calls tools."""
        return [
            message if message.get("role") == "assistant" else self.inert_json(message, keeps_marks=True)
            for message in messages
        ]

    def inert_json(self, value: JsonT, *, keeps_marks: bool = False) -> JsonT:
        """As :meth:`inert`, every text in a value of JSON, names too: templates write out whatever there is.

        Raises:
            RecursionError: it is nested too deeply.
        """
        found: object = value
        if isinstance(value, str):
            found = self.inert(value, keeps_marks=keeps_marks)
        elif isinstance(value, list):
            found = [self.inert_json(each, keeps_marks=keeps_marks) for each in cast("list[object]", value)]
        elif isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            found = {
                self.inert(name, keeps_marks=keeps_marks): self.inert_json(each, keeps_marks=keeps_marks)
                for name, each in fields.items()
            }
        return cast("JsonT", found)


def _pattern_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
