"""The arguments of a launch script: flags with their values, in the order in which they stand.

Only what a shell does with plain scripts is done: comments, quotes, continued lines, arrays, ``X=…`` and ``${X:-…}``.
Nothing is run. What comes of commands (``$(…)``) or of the environment stays as it is written, and is said.
"""

from __future__ import annotations

import math
import re
import shlex
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.runtime.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

_ASSIGNMENT: Final = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=([^(\s]\S*|\"[^\"]*\"|'[^']*')\s*$", re.MULTILINE)
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_PROGRAMS: Final = ("train.py", "train_async.py")
_PRODUCT: Final = re.compile(r"\$\(\(\s*(\d+(?:\s*\*\s*\d+)*)\s*\)\)")
_FLAG: Final = re.compile(r"--([A-Za-z][\w-]*)(=?)(.*)", re.DOTALL)
_ARRAY: Final = re.compile(r"\$\{\w+\[[@*]\]\}")


class Flag(NamedTuple):
    """One ``--flag`` and what stands behind it."""

    name: str
    """Without the dashes."""
    values: tuple[str, ...]
    line: int


class LaunchScript(NamedTuple):
    """What a script gives to the training program."""

    flags: tuple[Flag, ...]
    program: str
    """``train.py`` or ``train_async.py``; empty where none is named."""


def read_script(path: Path) -> LaunchScript:
    """
    Raises:
        UserError: the file cannot be read, is no shell script, or has no flags.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    variables: dict[str, str] = {}
    for name, value in _ASSIGNMENT.findall(text):
        variables[name] = _resolved(value.strip("\"'"), variables)
    flags: list[Flag] = []
    program = ""
    for line, words in _statements(text, path):
        own = _own_words(words)
        program = next((name for name in _PROGRAMS for word in own if word.endswith(name)), program)
        flags += _flags(own, variables, line)
    if not flags:
        raise UserError(f"{path}: there is not one --flag in it; expected a script that starts slime's train.py")
    return LaunchScript(tuple(flags), program)


def _statements(text: str, path: Path) -> list[tuple[int, list[str]]]:
    """Each logical line with the number of its first one; the elements of an array are lines of their own."""
    statements: list[tuple[int, list[str]]] = []
    parts: list[str] = []
    first = 1
    for number, line in enumerate(text.splitlines(), start=1):
        if not parts:
            first = number
        is_continued = line.rstrip().endswith("\\")
        parts.append(line.rstrip().removesuffix("\\"))
        if is_continued:
            continue
        whole = " ".join(parts)
        try:
            words = shlex.split(whole, comments=True)
        except ValueError:
            continue  # a quoted text goes on on the next line
        parts = []
        if words:
            statements.append((first, words))
    if parts:
        raise UserError(f"{path}:{first}: a quotation or a continued line that begins here never ends")
    return statements


def _own_words(words: list[str]) -> list[str]:
    """What goes to the training program, and not to Ray or another command: elements of arrays, what stands behind
    ``--`` or behind the program's name."""
    if words[0].startswith("--") or "=(" in words[0] or words[0] == "(":
        return words
    if "--" in words:
        return words[words.index("--") + 1 :]
    return words if any(word.endswith(_PROGRAMS) for word in words) else []


def _flags(words: list[str], variables: dict[str, str], line: int) -> list[Flag]:
    flags: list[Flag] = []
    for word in map(_array_opened, words):
        if not word or _ARRAY.fullmatch(word):
            continue
        if found := _FLAG.fullmatch(word):
            name, has_value, value = found.groups()
            flags.append(Flag(name, (_resolved(value, variables),) if has_value else (), line))
        elif flags:
            flags[-1] = flags[-1]._replace(values=(*flags[-1].values, _resolved(word, variables)))
    return [_calculated(flag) for flag in flags]


def _array_opened(word: str) -> str:
    """Without the brackets of an array that begins or ends with this word."""
    _, is_first, rest = word.partition("=(")
    word = rest if is_first else word.removeprefix("(")
    return word.removesuffix(")") if "(" not in word and not word.endswith("))") else word


def _calculated(flag: Flag) -> Flag:
    """``$(( 2 * 1024 ))`` as the product that it is."""
    found = _PRODUCT.fullmatch(" ".join(flag.values))
    if found is None:
        return flag
    return flag._replace(values=(str(math.prod(int(factor) for factor in found[1].split("*"))),))


def _resolved(word: str, variables: dict[str, str], depth: int = 4) -> str:
    def value(match: re.Match[str]) -> str:
        name, default, bare = match.groups()
        return variables.get(name or bare, default if default is not None else match[0])

    found = _VARIABLE.sub(value, word)
    return found if found == word or not depth else _resolved(found, variables, depth - 1)
