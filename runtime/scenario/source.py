"""Where each value of a scenario was written, so that an error can name file and line.

YAML is read by the 1.2 core schema: ``1e-3`` is a number, ``no`` and ``2026-01-02`` are strings, and only ``true``
and ``false`` are booleans. Tags, anchors and repeated keys are errors: a scenario is plain data. TOML is read as the
YAML that says the same.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.runtime.scenario.keys import dotted, show

if TYPE_CHECKING:
    from pathlib import Path

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]
KeyPath = tuple[str | int, ...]

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 16
TOO_DEEP = f"nested more than {MAX_DEPTH} deep"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written, for people, and the folder that a relative path in it starts from."""

    text: str
    folder: Path


class Source:
    """The plain data of a scenario, and the place of every value in it."""

    def __init__(self, data: dict[str, Plain], places: dict[KeyPath, Place], *, is_begun: bool = False) -> None:
        """``is_begun``: it is that of a run which was accepted."""
        self.data = data
        self.is_begun = is_begun
        self._places = places

    def place(self, path: KeyPath) -> Place:
        """Of the value at ``path``, or of the innermost block around it that was written."""
        while path not in self._places:
            path = path[:-1]
        return self._places[path]

    def override(self, text: str, folder: Path) -> None:
        """Set one value from ``key.path=value``; the value is read as YAML.

        Raises:
            UserFault: no ``=``, an empty key, a value that is not YAML, or a path through something that is
                no block.
        """
        place = Place(f"override '{text}'", folder)
        key, separator, value = text.partition("=")
        path: KeyPath = tuple(key.strip().split("."))
        if not separator or not all(path):
            raise UserFault(f"{place.text}: expected KEY=VALUE in one word, such as staleness.max_staleness=4")
        block = self.data
        for depth, name in enumerate(path[:-1], start=1):
            inner = block.setdefault(str(name), {})
            if inner is None:  # `warm_start: null` in the file, `warm_start.path=…` on the command line
                inner = block[str(name)] = {}
            if not isinstance(inner, dict):
                raise UserFault(f"{place.text}: {dotted(path[:depth])} is no block, it is {show(inner)}")
            self._places.setdefault(path[:depth], place)
            block = inner
        reader = _Reader(place.text, folder, line_numbers=False)
        block[str(path[-1])] = reader.read(value, path)
        self._places = {at: p for at, p in self._places.items() if at[: len(path)] != path} | reader.places


def read_source(file: Path, what: str = "scenario") -> Source:
    """Read a scenario file, or another of its kind.

    Args:
        file: to read.
        what: it is, for messages.

    Raises:
        UserFault: it cannot be read, or is not the YAML of one mapping.
    """
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UserFault(f"{file}: larger than {MAX_FILE_BYTES} bytes, so this is no {what}")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserFault(f"{file}: cannot read this {what}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise UserFault(f"{file}: not UTF-8 text (byte {error.start}), so this is no {what}") from None
    is_toml = file.suffix == ".toml"
    if is_toml:
        try:
            text = plain_text(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise UserFault(f"{file}: not valid TOML: {error}") from None
        except RecursionError:
            raise UserFault(f"{file}: {TOO_DEEP}") from None
    reader = _Reader(str(file), file.resolve().parent, line_numbers=not is_toml)
    data = reader.read(text, ())
    if not isinstance(data, dict):
        kinds = "blocks (run:, data:, …)" if what == "scenario" else "keys"
        raise UserFault(f"{file}:1: a {what} is a mapping of {kinds}, found {show(data)}")
    return Source(data, reader.places, is_begun=(file.parent / LEDGER_FILE).is_file())


def plain_text(data: object, *, width: int = 100) -> str:
    """Plain data as YAML that reads back as the same."""
    return yaml.dump(data, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=width)


class _CoreLoader(yaml.SafeLoader):
    """Resolves plain scalars by YAML 1.2's core schema instead of 1.1's."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # PyYAML's own protocol


class _CoreDumper(yaml.SafeDumper):
    """Puts texts between quotes that either schema takes for something else, such as ``1e5`` and ``09``."""


_NULL, _BOOL, _INT, _FLOAT, _STR = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str"))
for _tag, _pattern in (
    (_NULL, r"(?:~|null|Null|NULL|)$"),
    (_BOOL, r"(?:true|True|TRUE|false|False|FALSE)$"),
    (_INT, r"[-+]?[0-9]{1,18}$"),
    (_FLOAT, r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$"),
):
    for _kind in (_CoreLoader, _CoreDumper):
        _kind.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]  # the stubs leave it untyped
            _tag, re.compile(_pattern), None
        )


def _story(error: yaml.MarkedYAMLError, text: str) -> str:
    """What is wrong, in what, and what mostly lies behind it."""
    story = error.problem or error.context or "it cannot be read"
    begun = error.context_mark
    if error.context and error.problem and begun is not None and "\n" in text.strip():
        story += f" ({error.context} that begins in line {begun.line + 1})"
    hints = {
        "'\\t'": "indent with blanks, not with tabs",
        "<block end>": "lines of one block begin in the same column",
        "unknown escape character": "in double quotes a backslash begins an escape: use single quotes",
        "another document": "a file holds one scenario, without a second ---",
        "mapping values are not allowed": "put a text with ': ' in it between quotes",
    }
    hint = next((hint for sign, hint in hints.items() if sign in story), "")
    return f"{story}; {hint}" if hint else story


_NO_ANCHORS = (
    "anchors and aliases are not used in scenarios: write the keys out where they belong, or set what varies on the "
    "command line (KEY=VALUE)"
)


class _Reader:
    """Turns YAML text into plain data and notes the place of every value."""

    def __init__(self, name: str, folder: Path, *, line_numbers: bool) -> None:
        self.places: dict[KeyPath, Place] = {}
        self._name = name
        self._folder = folder
        self._line_numbers = line_numbers

    def read(self, text: str, path: KeyPath) -> Plain:
        try:
            node: yaml.Node | None = yaml.compose(text, _CoreLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise UserFault(f"{self._at(mark)}: not valid YAML: {_story(error, text)}") from None
        except yaml.reader.ReaderError as error:
            at = f"{self._name}:{text.count(chr(10), 0, error.position) + 1}" if self._line_numbers else self._name
            raise UserFault(f"{at}: not valid YAML: {error.reason}") from None
        except RecursionError:
            raise UserFault(f"{self._name}: {TOO_DEEP}") from None
        if node is None:
            self.places[path] = Place(self._name, self._folder)
            return None
        return self._plain(node, path, set())

    def _plain(self, node: yaml.Node, path: KeyPath, seen: set[int]) -> Plain:
        if id(node) in seen:
            raise UserFault(f"{self._at(node.start_mark)}: {_NO_ANCHORS}")
        seen.add(id(node))
        if len(path) > MAX_DEPTH:
            raise UserFault(f"{self._at(node.start_mark)}: {TOO_DEEP}")
        self.places.setdefault(path, Place(self._at(node.start_mark), self._folder))
        match node:
            case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                return self._mapping(node, path, seen)
            case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                return [self._plain(item, (*path, index), seen) for index, item in enumerate(node.value)]
            case yaml.ScalarNode():
                return self._scalar(node)
            case _:
                raise UserFault(f"{self._at(node.start_mark)}: YAML tags such as {node.tag} are not used here")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, seen: set[int]) -> dict[str, Plain]:
        mapping: dict[str, Plain] = {}
        for key_node, value_node in node.value:
            at = self._at(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserFault(f"{at}: a key must be a word, found a list or a block")
            key = str(key_node.value)
            if key == "<<":
                raise UserFault(f"{at}: {_NO_ANCHORS}")
            if key in mapping:
                raise UserFault(f"{at}: {dotted((*path, key))}: this key was given before")
            self.places[(*path, key)] = Place(at, self._folder)
            mapping[key] = self._plain(value_node, (*path, key), seen)
        return mapping

    def _scalar(self, node: yaml.ScalarNode) -> Plain:
        value = str(node.value)
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return value.lower() == "true"
        if node.tag == _INT:
            return int(value)
        if node.tag == _FLOAT:
            if math.isinf(number := float(value)):
                raise UserFault(f"{self._at(node.start_mark)}: {value} is too large a number")
            return number
        if node.tag == _STR:
            return value
        raise UserFault(f"{self._at(node.start_mark)}: YAML tags such as {node.tag} are not used here")

    def _at(self, mark: yaml.Mark | None) -> str:
        return f"{self._name}:{mark.line + 1}" if self._line_numbers and mark is not None else self._name
