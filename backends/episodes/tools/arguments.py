"""What a model gives to a tool, checked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.backends.episodes.interfaces import ToolError

if TYPE_CHECKING:
    from penstock.backends.episodes.interfaces import JsonObject


def text_argument(arguments: JsonObject, name: str, *, max_chars: int) -> str:
    """The one argument of a tool that takes a text.

    Raises:
        ToolError: it is missing, is no text, is too long, or there are others.
    """
    unknown = sorted(set(arguments) - {name})
    if unknown:
        raise ToolError(f"unknown argument {unknown[0]!r}; the only one is {name!r}")
    if name not in arguments:
        raise ToolError(f"the argument {name!r} is missing")
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolError(f"{name!r} must be a string, got {json.dumps(value)[:80]}")
    if len(value) > max_chars:
        raise ToolError(f"{name!r} must have at most {max_chars} characters, got {len(value)}")
    if not value.strip():
        raise ToolError(f"{name!r} is empty")
    return value


def text_schema(name: str, description: str) -> JsonObject:
    """JSON schema of the arguments of such a tool."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": description}},
        "required": [name],
        "additionalProperties": False,
    }
