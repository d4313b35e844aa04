"""Tool calls in what the model writes.

Invariants:

* Work is linear in the length of the text, and what is nested too deeply for whoever reads the call next is none: the
  model may write anything, and an engine's whole process waits meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from penstock.messages.base import UNREADABLE
from penstock.messages.json_depth import is_too_deep

if TYPE_CHECKING:
    from collections.abc import Iterator

ToolFormat = Literal["hermes", "json", "none"]

HERMES_OPEN: Final = "<tool_call>"
HERMES_CLOSE: Final = "</tool_call>"


class ParsedCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object."""


class ParsedText(NamedTuple):
    """A response, taken apart."""

    content: str
    calls: tuple[ParsedCall, ...]


class _Written(msgspec.Struct):
    name: str
    arguments: dict[str, object] | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, object] | msgspec.UnsetType = msgspec.UNSET


def parse_tool_calls(text: str, tool_format: ToolFormat) -> ParsedText:
    """The calls in a text, and what stands beside them. What is no well-formed call stays where it is, as text: it is
    for the agent to answer."""
    if tool_format == "hermes":
        return _parse_hermes(text)
    if tool_format == "json":
        call = _call_of(text.strip())
        return ParsedText(text, ()) if call is None else ParsedText("", (call,))
    return ParsedText(text, ())


def opening_of(tool_format: ToolFormat) -> str | None:
    """What a call begins with; None where it can begin with anything, and a stream has to wait for the end."""
    return HERMES_OPEN if tool_format == "hermes" else None


def _parse_hermes(text: str) -> ParsedText:
    calls: list[ParsedCall] = []
    pieces: list[str] = []
    end = 0
    for start, after, call in _hermes_calls(text):
        calls.append(call)
        pieces.append(text[end:start])
        end = after
    if not calls:
        return ParsedText(text, ())
    pieces.append(text[end:])
    return ParsedText("".join(pieces), tuple(calls))


def _hermes_calls(text: str) -> Iterator[tuple[int, int, ParsedCall]]:
    """Each with where it begins and ends."""
    start = text.find(HERMES_OPEN)
    while start >= 0 and (close := text.find(HERMES_CLOSE, start)) >= 0:
        end = close + len(HERMES_CLOSE)
        call = _call_of(text[start + len(HERMES_OPEN) : close].strip())
        if call is not None:
            yield start, end, call
        start = text.find(HERMES_OPEN, end)


def _call_of(text: str) -> ParsedCall | None:
    try:
        written = msgspec.json.decode(text, type=_Written)
        if is_too_deep(text.encode()):
            return None
    except (*UNREADABLE, UnicodeEncodeError):
        return None
    arguments = written.arguments if written.arguments is not msgspec.UNSET else written.parameters
    if not written.name or arguments is msgspec.UNSET:
        return None
    return ParsedCall(written.name, msgspec.json.encode(arguments).decode())
