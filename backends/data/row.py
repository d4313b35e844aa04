"""One row as its source gives it, and what is taken out of it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from penstock.backends.data.problems import DataError, RowProblem
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from penstock.backends.data.options import DataOptions

MAX_SHOWN_CHARACTERS: Final = 60
MAX_SHOWN_COLUMNS: Final = 12
MAX_RETRIES: Final = 1000
"""That a row may ask for: a sample that fails so often will not come right, so a higher number is a mistake."""


class RawRow(NamedTuple):
    """A row that could be read."""

    place: str
    columns: Mapping[str, object]
    metadata: Mapping[str, object] = {}
    """What reward functions get in any case, besides the columns that the scenario names."""


class BadColumnError(UserFault):
    """A column that is missing or not what it should be; ``kind`` is for counting."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def at(self, place: str) -> RowProblem:
        """The same with its place."""
        return RowProblem(place, self.kind, self.message)


Message = dict[str, object]


def prompt_of(row: RawRow, key: str, *, chat_template: bool, option: str) -> str | list[Message]:
    """The prompt of a row: a text, or chat messages.

    ``option`` is the key of the scenario that names the column, for messages.

    Raises:
        BadColumnError: it is missing, empty, or neither.
    """
    value = _column(row, key, f"Set {option} to the column with the prompt")
    if isinstance(value, str):
        if not value.strip():
            raise BadColumnError(f"{key!r} is empty", f"{key!r} is empty")
        return value
    if not isinstance(value, list):
        raise BadColumnError(
            f"{key!r} has the wrong type", f"{key!r} is {shown(value)}; expected a text or a list of chat messages"
        )
    if not chat_template:
        raise BadColumnError(
            f"{key!r} is a list of messages",
            f"{key!r} is a list of chat messages, which need a template: set data.chat_template: true, or give a text",
        )
    return _checked_messages(cast("list[object]", value), key)


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """The messages after a system message, where they do not begin with one of their own."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def tools_of(row: RawRow, key: str) -> list[Message]:
    """The schemas of the tools of a row, as chat templates take them; empty where it has none.

    Raises:
        BadColumnError: the column is missing, or is no list of schemas.
    """
    value = _column(row, key, "Set data.tools_key to the column with the tools, or to null if the rows have none")
    if value is None or value == "":
        return []
    if isinstance(value, str):
        try:
            value = cast("object", msgspec.json.decode(value.encode()))
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BadColumnError(
                f"{key!r} is no JSON", f"{key!r} is {shown(value)}, which is no JSON: {error}"
            ) from None
    if not isinstance(value, list):
        raise BadColumnError(f"{key!r} has the wrong type", f"{key!r} is {shown(value)}; expected a list of tools")
    tools: list[Message] = []
    for index, item in enumerate(cast("list[object]", value)):
        schema = _as_message(item)
        function = schema.get("function", schema)
        name = _as_message(function).get("name")
        if not isinstance(name, str) or not name:
            raise BadColumnError(
                f"{key!r} has a malformed tool",
                f"tool {index} of {key!r} is {shown(item)}; expected an object with 'name' (and 'description', "
                "'parameters'), by itself or under 'function'",
            )
        tools.append(schema if "function" in schema else {"type": "function", "function": schema})
    return tools


def text_of(row: RawRow, key: str, advice: str) -> str:
    """A column that must be a text with something in it.

    Raises:
        BadColumnError: it is missing, empty, or of another type.
    """
    value = _column(row, key, advice)
    if not isinstance(value, str):
        raise BadColumnError(f"{key!r} has the wrong type", f"{key!r} is {shown(value)}; expected a text")
    if not value.strip():
        raise BadColumnError(f"{key!r} is empty", f"{key!r} is empty")
    return value


def label_of(row: RawRow, key: str) -> str:
    """The label as a text; numbers, lists and objects as JSON writes them.

    Raises:
        BadColumnError: it is missing or has no such form.
    """
    value = _column(row, key, "Set data.label_key to the column with the answer, or to null if the reward needs none")
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | list | dict):
        try:
            return msgspec.json.encode(value).decode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadColumnError(f"{key!r} has no form in JSON", f"{key!r} has no form in JSON: {error}") from None
    raise BadColumnError(
        f"{key!r} has the wrong type", f"{key!r} is {shown(value)}; expected a text, a number, a list or an object"
    )


def metadata_of(row: RawRow, keys: Sequence[str], constant: Mapping[str, object] | None = None) -> bytes:
    """The further columns as a JSON object, after ``constant`` ones; empty when there are none.

    Raises:
        BadColumnError: one is missing or has no form in JSON.
    """
    values = {**(constant or {}), **row.metadata}
    for key in keys:
        values[key] = _column(row, key, "data.metadata_keys names it")
    if not values:
        return b""
    try:
        return msgspec.json.encode(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadColumnError("metadata has no form in JSON", f"metadata has no form in JSON: {error}") from None


def num_retries_of(row: RawRow, options: DataOptions) -> int | None:
    """How often a sample of the row is issued again; None where the row, or the scenario, says nothing of it.

    Raises:
        BadColumnError: it says something else than a number of times.
    """
    key = options.num_retries_key
    if key is None:
        return None
    value = {**options.metadata, **row.metadata}.get(key)
    if key in options.metadata_keys:
        value = _column(row, key, "data.metadata_keys names it")
    if problem := retries_problem(value):
        raise BadColumnError(f"{key!r} is no number of retries", f"{key!r} {problem} (data.num_retries_key names it)")
    return value if isinstance(value, int) else None


def retries_problem(value: object) -> str | None:
    """What is wrong with it as a number of retries; empty ones are none at all, and right."""
    if value is None or value == "":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_RETRIES:
        return None
    return f"is {shown(value)}; expected a whole number from 0 to {MAX_RETRIES}, or nothing"


def known_tokens(ids: list[int] | str) -> list[int]:
    """The ids that the tokenizer gave.

    Raises:
        BadColumnError: it gave a reason instead.
    """
    if isinstance(ids, str):
        raise BadColumnError(
            "the tokenizer refuses the text",
            f"the tokenizer refuses the text ({ids}); it may hold a character that the model does not know",
        )
    return ids


def shown(value: object) -> str:
    """What was found, for a message: its JSON type and its beginning."""
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
    if value is None:
        return name
    text = repr(value)
    return f"{name} ({text[:MAX_SHOWN_CHARACTERS]}{'…' if len(text) > MAX_SHOWN_CHARACTERS else ''})"


def missing_column(key: str, present: Sequence[str], advice: str) -> BadColumnError:
    """The error for a column that is not there."""
    columns = ", ".join(repr(name) for name in present[:MAX_SHOWN_COLUMNS])
    more = ", …" if len(present) > MAX_SHOWN_COLUMNS else ""
    near = difflib.get_close_matches(key, present, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    found = f"columns here are {columns}{more}" if present else "the row is empty"
    return BadColumnError(f"{key!r} is missing", f"{key!r} is missing; {found}{hint}. {advice}")


def wanted_columns(place: Path, columns: Sequence[str], optional: Sequence[str], present: Sequence[str]) -> list[str]:
    """What to read of a source that knows its columns: ``columns``, and those of ``optional`` that it has.

    Raises:
        DataError: it lacks one of ``columns``, or has several of a name.
    """
    for column in columns:
        if _outer(column, present) not in present:
            advice = (
                "The scenario names it under data.prompt_key, data.label_key or data.metadata_keys; what an object in "
                "a column holds is column.key"
            )
            raise DataError(f"{place}: {missing_column(column, present, advice).message}")
    outer = [_outer(name, present) for name in (*columns, *optional)]
    wanted = list(dict.fromkeys(name for name in outer if name in present))
    for name in wanted:
        if (number := present.count(name)) > 1:
            raise DataError(f"{place}: {number} columns are called {name!r}, and only one could count; leave one")
    return wanted


def value_of(row: RawRow, key: str) -> object:
    """Of the column, or of ``column.key`` in the object that it holds; None where there is none."""
    value: object = row.columns
    for name in (key,) if key in row.columns else key.split("."):
        value = cast("Mapping[str, object]", value).get(name) if isinstance(value, dict) else None
    return value


def _outer(key: str, present: Collection[str]) -> str:
    """The column that holds it."""
    return key if key in present else key.partition(".")[0]


def _column(row: RawRow, key: str, advice: str) -> object:
    outer = _outer(key, row.columns)
    if outer not in row.columns:
        raise missing_column(key, [str(name) for name in row.columns], advice)
    value = row.columns[outer]
    for name in filter(None, key[len(outer) + 1 :].split(".")):
        inner = _as_message(value)
        if name not in inner:
            raise BadColumnError(
                f"{key!r} is missing", f"{key!r} is missing: there is no {name!r} in {shown(value)}. {advice}"
            )
        value = inner[name]
    return value


def _as_message(value: object) -> Message:
    return cast("Message", value) if isinstance(value, dict) else {}


def _checked_messages(messages: list[object], key: str) -> list[Message]:
    if not messages:
        raise BadColumnError(f"{key!r} is empty", f"{key!r} is an empty list of messages")
    checked: list[Message] = []
    for index, value in enumerate(messages):
        message = _as_message(value)
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise BadColumnError(
                f"{key!r} has a malformed message",
                f"message {index} of {key!r} is {shown(value)}; expected an object with 'role' and 'content'",
            )
        checked.append(message)
    if checked[-1]["role"] == "assistant":
        raise BadColumnError(
            f"{key!r} ends with the assistant",
            f"the last message of {key!r} is the assistant's own, so there is nothing left to answer; end with the "
            "user's",
        )
    return checked
