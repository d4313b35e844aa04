"""Words of a shell script with their quotes, variables and substitutions resolved, as bash splits them."""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.errors import UserFault
from penstock.runtime.slime.arithmetic import evaluate
from penstock.runtime.slime.shell_lexer import Word, closing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_CHARACTERS: Final = 1_000_000
"""Of one value, and elements of one array."""
_NAME: Final = re.compile(r"[A-Za-z_]\w*|[@*#?$!0-9]")
_PARAMETER: Final = re.compile(r"(#?)([A-Za-z_]\w*|[@*#0-9])(?:\[([^\]]*)\])?(.*)", re.DOTALL)


class Field(NamedTuple):
    """A word as a command would get it."""

    text: str
    unread: tuple[str, ...] = ()
    """What of it is not known here; its text then has that as it is written."""
    line: int = 0
    file: str = ""

    def supposing(self, conditions: tuple[str, ...]) -> Field:
        """The same under conditions that nobody can decide here."""
        return self._replace(unread=(*self.unread, *(f"{each} is taken to hold" for each in conditions)))


class Expander(ABC):
    """Variables, and words with these put in."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.file = script
        """The one that is being read."""
        self.folder = Path.cwd()
        self.variables: dict[str, Field | list[Field]] = {}
        self.numbers: MutableMapping[str, int] = _Numbers(self)

    @abstractmethod
    def captured(self, text: str, line: int) -> str | None:
        """What commands would print; None: that is not known here."""

    def set(self, name: str, value: Field | list[Field]) -> None:
        """
        Raises:
            UserFault: it has become too long.
        """
        if len(value if isinstance(value, list) else value.text) > MAX_CHARACTERS:
            raise UserFault(f"{self.file}: the value of {name} has more than {MAX_CHARACTERS:,} characters or elements")
        self.variables[name] = value

    def found(self, name: str) -> Path | None:
        """The file that the script means."""
        return find_file(name, (self.folder, self.file.parent), self.script)

    def quoted(self, word: Word) -> Field:
        """As one text, whatever blanks its variables have."""
        fields = list(_Word(self, word, splits=False).fields())
        unread = tuple(unread for field in fields for unread in field.unread)
        return Field(" ".join(field.text for field in fields), unread, word.line, self.file.name)

    def fields(self, word: Word) -> list[Field]:
        """As a command gets it: none, one or several."""
        return list(_Word(self, word, splits=True).fields())

    def parameter(self, text: str, line: int) -> list[Field] | None:
        """What ``${text}`` stands for; elements of an array where all are asked for. None: not followed."""
        found = _PARAMETER.fullmatch(text)
        if found is None:
            return None
        length, name, index, rest = found.groups()
        values = self._values(name, index, line)
        if length:
            size = len(values) if index in ("@", "*") else sum(len(field.text) for field in values)
            return [Field(str(size))]
        is_set, is_empty = bool(values), not any(field.text for field in values)
        operator = rest[:2] if rest[:2] in (":-", ":=", ":?", ":+", "##", "%%") else rest[:1]
        word = rest[len(operator) :]
        match operator:
            case "":
                if values or index in ("@", "*") or name in ("@", "*", "#"):
                    return values
                return [Field(f"${{{text}}}", (f"${name} is set nowhere in the script",))]
            case ":-" | "-" | ":=" | "=":
                if is_set and not (operator[0] == ":" and is_empty):
                    return values
                default = self.quoted(Word(word, line))
                if operator in (":=", "="):
                    self.set(name, default)
                return [default]
            case ":?" | "?":
                return values or [Field(f"${{{name}}}", (f"${name} is set nowhere in the script",))]
            case ":+" | "+":
                return [self.quoted(Word(word, line))] if not is_empty else [Field("")]
            case "%" | "%%" | "#" | "##" if is_set:
                return [field._replace(text=_cut(field.text, word, operator)) for field in values]
            case _:
                return None

    def _values(self, name: str, index: str | None, line: int) -> list[Field]:
        if name == "BASH_SOURCE":
            return [Field(str(self.file))]
        if name == "0":
            return [Field(str(self.script))]
        value = self.variables.get(name)
        if value is None:
            return []
        if isinstance(value, Field):
            return [value]
        if index == "*":
            separator = self.variables.get("IFS", Field(" "))
            join = separator.text[:1] if isinstance(separator, Field) else " "
            unread = tuple(unread for field in value for unread in field.unread)
            return [Field(join.join(field.text for field in value), unread, line, self.file.name)]
        if index == "@":
            return value
        place = evaluate(index or "0", self.numbers)
        return value[place : place + 1] if place is not None and place >= 0 else []


class _Numbers(MutableMapping[str, int]):
    """Variables as arithmetic sees them. One that is not set is not 0 here: the environment may set it."""

    def __init__(self, shell: Expander) -> None:
        self._shell = shell

    def __getitem__(self, name: str) -> int:
        value = self._shell.variables.get(name)
        if not isinstance(value, Field) or value.unread:
            raise KeyError(name)
        return int(value.text)

    def __setitem__(self, name: str, number: int) -> None:
        self._shell.set(name, Field(str(number)))

    def __delitem__(self, name: str) -> None:
        del self._shell.variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shell.variables)

    def __len__(self) -> int:
        return len(self._shell.variables)


class _Word:
    """One word on its way to fields."""

    def __init__(self, shell: Expander, word: Word, *, splits: bool) -> None:
        self._shell = shell
        self._word = word
        self._splits = splits
        self._done: list[Field] = []
        self._text: str | None = None
        self._unread: tuple[str, ...] = ()
        self._place = (word.line, shell.file.name)

    def fields(self) -> Iterator[Field]:
        """In their order."""
        raw, at = self._word.raw, 0
        while at < len(raw):
            if raw[at] == "'":
                end = raw.index("'", at + 1)
                self._add(raw[at + 1 : end])
                at = end + 1
            elif raw[at] == '"':
                at = self._in_quotes(at + 1)
            else:
                at = self._step(at, is_quoted=False)
        self._end()
        yield from self._done

    def _in_quotes(self, at: int) -> int:
        raw = self._word.raw
        if raw[at : at + 1] == '"':
            self._add("")  # an empty word is a word
        while raw[at] != '"':
            at = self._step(at, is_quoted=True)
        return at + 1

    def _step(self, at: int, *, is_quoted: bool) -> int:
        raw = self._word.raw
        if raw[at] == "\\":
            next_one = raw[at + 1 : at + 2]
            self._add(next_one if not is_quoted or next_one in '$`"\\' else raw[at : at + 2])
            return at + 2
        if raw[at] == "`" and (end := raw.find("`", at + 1)) > 0:
            self._put(self._command(raw[at + 1 : end], raw[at : end + 1]), is_quoted)
            return end + 1
        if raw[at] == "$":
            return self._dollar(at, is_quoted)
        if raw.startswith(("<(", ">("), at):
            self._put([Field(raw[at:], (f"{raw[at:]} is run by the shell",))], True)
            return len(raw)
        self._add(raw[at])
        return at + 1

    def _dollar(self, at: int, is_quoted: bool) -> int:
        raw, line = self._word.raw, self._word.line
        if raw.startswith("$((", at) and (end := closing(raw, at + 3, "))")) > 0:
            whole = raw[at:end]
            value = evaluate(raw[at + 3 : end - 2], self._shell.numbers)
            self._put([Field(whole, (f"{whole} has no value here",)) if value is None else Field(str(value))], True)
        elif raw.startswith("$(", at):
            end = closing(raw, at + 2, ")")
            self._put(self._command(raw[at + 2 : end - 1], raw[at:end]), is_quoted)
        elif raw.startswith("${", at):
            end = closing(raw, at + 2, "}")
            found = self._shell.parameter(raw[at + 2 : end - 1], line)
            unknown = Field(raw[at:end], (f"{raw[at:end]} is not followed",))
            self._put([unknown] if found is None else found, is_quoted)
        elif name := _NAME.match(raw, at + 1):
            end = name.end()
            found = self._shell.parameter(name[0], line) or []
            is_known = name[0] in self._shell.variables
            self._put(found if is_known else [field._replace(text=raw[at:end]) for field in found], is_quoted)
        else:
            self._add("$")
            end = at + 1
        return end

    def _command(self, text: str, whole: str) -> list[Field]:
        printed = self._shell.captured(text, self._word.line)
        return [Field(whole, (f"{whole} is run by the shell",)) if printed is None else Field(printed)]

    def _put(self, values: list[Field], is_quoted: bool) -> None:
        """Put values here, split at blanks unless they are quoted; each element of an array is a field of its own."""
        for index, field in enumerate(values):
            if index:
                self._end()
            if field.line:
                self._place = (field.line, field.file)
            self._unread = (*self._unread, *field.unread)
            if is_quoted or not self._splits or field.unread:
                self._add(field.text)
                continue
            pieces = field.text.split()
            for number, piece in enumerate(pieces):
                if number or (field.text[:1].isspace() and self._text is not None):
                    self._end()
                self._add(piece)
            if pieces and field.text[-1:].isspace():
                self._end()

    def _add(self, text: str) -> None:
        self._text = (self._text or "") + text

    def _end(self) -> None:
        if self._text is not None:
            line, file = self._place
            self._done.append(Field(self._text, tuple(dict.fromkeys(self._unread)), line, file))
        self._text, self._unread = None, ()


def find_file(name: str, bases: Sequence[Path], script: Path) -> Path | None:
    """The file that a script means: as it is written, from one of the folders; or, where the script was written for
    another machine, with as much of its path as there is in a folder around the script."""
    for base in bases:
        if (path := base / name).is_file():
            return path
    parts = Path(name).parts
    for start in range(1, len(parts)):
        for base in script.resolve().parents[:8]:
            if (path := base.joinpath(*parts[start:])).is_file():
                return path
    return None


def _cut(text: str, pattern: str, operator: str) -> str:
    """Without the shortest (``%``, ``#``) or longest (``%%``, ``##``) end or beginning that fits."""
    lengths = range(len(text) + 1) if len(operator) == 1 else range(len(text), -1, -1)
    for length in lengths:
        part = text[len(text) - length :] if operator[0] == "%" else text[:length]
        if fnmatch.fnmatchcase(part, pattern):
            return text[: len(text) - length] if operator[0] == "%" else text[length:]
    return text
