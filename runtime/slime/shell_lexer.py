"""The words and operators of a shell script; :mod:`.shell_parser` makes commands of them.

Invariant: each word knows its line, and a quotation or a bracket that never ends is an error with file and line.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from penstock.messages.errors import UserFault

ASSIGNS: Final = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=", re.DOTALL)
_HERE: Final = re.compile(r"<<(-?)\s*(['\"\\]?)(\w+)['\"]?")
_OPERATORS: Final = ("&&", "||", ";;", ";", "&", "|", "(", ")")
_REDIRECTION: Final = re.compile(r"\d*(?:<<<|&>>?|>>|>\||[<>]&?)")
_ENDS_WORD: Final = frozenset(" \t\n;&|<>()")


class Word(NamedTuple):
    """As it is written, with its quotes."""

    raw: str
    line: int


class Token(NamedTuple):
    """A word, the beginning of an array with its elements, or what stands between words."""

    kind: Literal["word", "array", "arithmetic", "operator", "redirection", "end"]
    text: str
    line: int
    words: tuple[Word, ...] = ()


def closing(text: str, start: int, end: str) -> int:
    """Behind the ``)``, ``}`` or ``))`` that closes what begins at ``start``, quotes respected; -1: nothing does."""
    opens, place = {")": "(", "}": "{", "))": "("}[end], start
    depth = 0
    while place < len(text):
        character = text[place]
        if depth == 0 and text.startswith(end, place):
            return place + len(end)
        if character == "\\":
            place += 1
        elif character in "'\"`":
            place = _quoted(text, place) - 1
            if place < 0:
                return -1
        elif character == opens:
            depth += 1
        elif character == end[0]:
            depth -= 1
        place += 1
    return -1


def _quoted(text: str, start: int) -> int:
    """Behind the quotation that begins at ``start``; 0: it never ends."""
    quote, place = text[start], start + 1
    while place < len(text):
        if text[place] == quote:
            return place + 1
        if quote != "'" and text[place] == "\\":
            place += 1
        elif quote == '"' and text.startswith(("$(", "${"), place):
            place = closing(text, place + 2, ")" if text[place + 1] == "(" else "}") - 1
            if place < 0:
                return 0
        place += 1
    return 0


class Lexer:
    """Reads a script once."""

    def __init__(self, text: str, name: str, first_line: int) -> None:
        self._text = text
        self._name = name
        self._at = 0
        self._line = first_line
        self._here: list[tuple[str, bool]] = []
        """Here-documents that begin with the next line: how each ends, and whether tabs before that are left out."""

    def tokens(self) -> list[Token]:
        """All of them, with one of the kind ``end`` after them."""
        found: list[Token] = []
        while (token := self._next()) is not None:
            found.append(token)
        return [*found, Token("end", "", self._line)]

    def _next(self) -> Token | None:
        self._skip_blanks()
        text, at, line = self._text, self._at, self._line
        if at >= len(text):
            return None
        if text[at] == "\n":
            self._advance(at + 1)
            self._skip_here_documents()
            return Token("operator", ";", line)
        if text.startswith("((", at) and (end := closing(text, at + 2, "))")) > 0:
            self._advance(end)
            return Token("arithmetic", text[at + 2 : end - 2], line)
        if here := _HERE.match(text, at):
            self._here.append((here[3], bool(here[1])))
            self._advance(here.end())
            return self._next()
        if (redirection := _REDIRECTION.match(text, at)) and not text.startswith(("<(", ">("), at):
            self._advance(redirection.end())
            return Token("redirection", redirection[0], line)
        for operator in _OPERATORS:
            if text.startswith(operator, at):
                self._advance(at + len(operator))
                return Token("operator", operator, line)
        return self._word()

    def _word(self) -> Token:
        text, start, line = self._text, self._at, self._line
        if (assigns := ASSIGNS.match(text, start)) and text.startswith("(", assigns.end()):
            self._advance(assigns.end() + 1)
            return Token("array", assigns[0], line, self._elements(line))
        at = start
        while at < len(text) and (text[at] not in _ENDS_WORD or text.startswith(("<(", ">("), at)):
            at = self._after(at, line)
        self._advance(at)
        return Token("word", text[start:at].replace("\\\n", ""), line)

    def _after(self, at: int, line: int) -> int:
        """Behind the character, the quotation or the substitution that begins here."""
        text = self._text
        if text[at] == "\\":
            return min(at + 2, len(text))
        if text[at] in "'\"`":
            end = _quoted(text, at)
        elif text.startswith("$((", at):
            end = closing(text, at + 3, "))")
            end = end if end > 0 else closing(text, at + 2, ")")
        elif text.startswith(("$(", "${", "<(", ">("), at):
            end = closing(text, at + 2, "}" if text[at + 1] == "{" else ")")
        else:
            return at + 1
        if end <= 0:
            raise UserFault(f"{self._name}:{line}: a quotation or a bracket that begins here never ends")
        return end

    def _elements(self, line: int) -> tuple[Word, ...]:
        words: list[Word] = []
        while (token := self._next()) is not None:
            if token.kind == "word":
                words.append(Word(token.text, token.line))
            elif token.text == ")":
                return tuple(words)
        raise UserFault(f"{self._name}:{line}: an array that begins here never ends")

    def _skip_blanks(self) -> None:
        text = self._text
        while self._at < len(text):
            if text[self._at] in " \t\r":
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self._advance(self._at + 2)
                if self._at >= len(text):
                    raise UserFault(
                        f"{self._name}:{self._line - 1}: a line that goes on at the end of the file never ends"
                    )
            elif text[self._at] == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            else:
                return

    def _skip_here_documents(self) -> None:
        for ends_with, strips_tabs in self._here:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                found = self._text[self._at : end]
                self._advance(min(end + 1, len(self._text)))
                if (found.lstrip("\t") if strips_tabs else found) == ends_with:
                    break
        self._here.clear()

    def _advance(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to
