"""Tool calls in what the model writes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

ToolFormat = Literal["hermes", "json", "none"]

HERMES_OPEN: Final = "<tool_call>"
_HERMES: Final = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


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
    for found, call in _hermes_calls(text):
        calls.append(call)
        pieces.append(text[end : found.start()])
        end = found.end()
    if not calls:
        return ParsedText(text, ())
    pieces.append(text[end:])
    return ParsedText("".join(pieces), tuple(calls))


def _hermes_calls(text: str) -> Iterator[tuple[re.Match[str], ParsedCall]]:
    for found in _HERMES.finditer(text):
        call = _call_of(found[1])
        if call is not None:
            yield found, call


def _call_of(text: str) -> ParsedCall | None:
    try:
        written = msgspec.json.decode(text, type=_Written)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
    arguments = written.arguments if written.arguments is not msgspec.UNSET else written.parameters
    if not written.name or arguments is msgspec.UNSET:
        return None
    return ParsedCall(written.name, msgspec.json.encode(arguments).decode())
