"""What a program gives to a run as values, written into its folder, where its processes and a resumed run find it.

Rows become a file of JSON lines, a function a Python file (:mod:`penstock.backends.processes.user_source`). Both
can be read, and hold what they meant when the run was begun.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import msgspec

from penstock.backends.processes.user_code import UserCodeError
from penstock.backends.processes.user_source import function_source
from penstock.messages.errors import UserFault, first_line

Row: TypeAlias = "Mapping[str, object]"
Rows: TypeAlias = "str | Path | Iterable[Row]"
"""A file or a name that ``data.path`` takes, or the rows themselves: a list of dictionaries, a ``datasets.Dataset``."""
Function: TypeAlias = "str | Callable[..., object]"
"""A name that ``reward.function`` takes, or the function itself."""

INPUTS: Final = "inputs"


class GivenRows(msgspec.Struct, frozen=True):
    """Rows that were written, or named."""

    path: str
    columns: frozenset[str] | None
    """Of all rows; None of a file, into which nobody has looked."""
    has_chats: bool = False
    """A prompt is a list of messages."""

    def settings(self, label_key: object = "label") -> dict[str, object]:
        """How they are read, beside their path; of a file that is for the scenario to say."""
        if self.columns is None:
            return {}
        return {"chat_template": self.has_chats, "label_key": label_key if label_key in self.columns else None}


class GivenFunction(msgspec.Struct, frozen=True):
    """A function that was written, or named."""

    spec: str
    arguments: frozenset[str] = frozenset()
    """That it declares; none of one that was named."""

    def settings(self) -> dict[str, object]:
        """How it is called."""
        given: dict[str, object] = {"function": self.spec}
        return {**given, "per_group": True} if "responses" in self.arguments else given


def write_rows(folder: Path, name: str, rows: Rows, *, prompt_key: str = "prompt") -> GivenRows:
    """Write rows to ``inputs/NAME.jsonl`` in the run's folder, if they are not in a file already.

    Raises:
        UserFault: one of them is no dictionary, or has a value that JSON does not have.
    """
    if isinstance(rows, str | Path):
        return GivenRows(str(rows), None)
    path = _inputs(folder) / f"{name}.jsonl"
    columns: set[str] = set()
    has_chats = False
    with path.open("wb") as file:
        for number, row in enumerate(cast("Iterable[object]", rows)):
            if not isinstance(row, Mapping):
                raise UserFault(
                    f"data: row {number} is {type(row).__name__}, and no dictionary; of a DataFrame, give "
                    "frame.to_dict('records')"
                )
            columns |= {str(key) for key in cast("Row", row)}
            has_chats = has_chats or isinstance(cast("Row", row).get(prompt_key), list | tuple)
            try:
                file.write(msgspec.json.encode(row, enc_hook=_plain) + b"\n")
            except (TypeError, ValueError) as error:
                raise UserFault(
                    f"data: row {number} cannot be written as JSON: {first_line(error)}; images and the like are given "
                    "in a Parquet file, or a folder that datasets has saved (dataset.save_to_disk), by its path"
                ) from None
    return GivenRows(str(path), frozenset(columns), has_chats)


def write_function(folder: Path, name: str, function: Function) -> GivenFunction:
    """Write a function to ``inputs/NAME.py`` in the run's folder, if it is not in a file already.

    Raises:
        UserFault: it cannot be written down.
    """
    if isinstance(function, str):
        return GivenFunction(function)
    if not callable(function):
        raise UserFault(f"{name}: {function!r} is no function, and no name of one such as 'math' or 'mine.py:{name}'")
    try:
        text = function_source(function, name)
        called: Any = cast("Any", function).__call__ if isinstance(function, type) else function
        parameters = inspect.signature(called).parameters
    except UserCodeError as error:
        raise UserFault(str(error)) from None
    except ValueError:  # of what is written in C nobody knows the arguments
        raise UserFault(f"{name}: {function!r} does not say what its arguments are called") from None
    path = _inputs(folder) / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return GivenFunction(f"{path}:{name}", frozenset((*parameters, *("metadata",) * takes_all)))


def as_given(text: str, folder: Path) -> str:
    """An error about what was written here, in the words of who gave it: the run's folder may be gone by then."""

    def named(found: re.Match[str]) -> str:
        what = {"jsonl": "the given rows", "py": "the given function"}[found["kind"]]
        name = "" if found["name"] in ("rows", "reward") else f" '{found['name']}'"
        line = f", line {found['line']}" if found["line"] else ""
        return f"{what}{name}{line}"

    written = re.escape(str(folder / INPUTS))
    return re.sub(rf"{written}/(?P<name>[^/\n]+?)\.(?P<kind>jsonl|py)(:(?P<line>\d+))?", named, text)


def _inputs(folder: Path) -> Path:
    made = folder / INPUTS
    made.mkdir(exist_ok=True)
    return made


def _plain(value: object) -> object:
    """Arrays and numbers of NumPy and torch; whatever else JSON does not have is refused."""
    if isinstance(value, Path):
        return str(value)
    plain = getattr(value, "tolist", None)
    if callable(plain):
        return plain()
    raise TypeError(f"a value is {type(value).__module__}.{type(value).__qualname__}")
