"""The commands of a shell script: lists, ``if``, ``for``, ``while``, ``case``, functions. :mod:`.shell` follows them.

Invariant: what has no end is an error with file and line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from penstock.messages.errors import UserFault
from penstock.runtime.slime.shell_lexer import ASSIGNS, Lexer, Word

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.runtime.slime.shell_lexer import Token

_ENDS: Final = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_CLOSES: Final = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "{": "}", "(": ")"}


class Assignment(NamedTuple):
    """``name=value``, ``name+=(…)``, ``name[0]=value``."""

    name: str
    value: Word | tuple[Word, ...]
    """Several: an array."""
    adds: bool
    element: str | None


class Simple(NamedTuple):
    """Assignments, and a command where there is one."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int


class Arithmetic(NamedTuple):
    """``((…))``"""

    text: str
    line: int


class AndOr(NamedTuple):
    """``a && b || c``; of a pipeline the parts are joined by ``|``."""

    first: Node
    others: tuple[tuple[str, Node], ...]
    line: int


class If(NamedTuple):
    """With the ``else`` as a last branch without conditions."""

    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    line: int


class Loop(NamedTuple):
    """Of words, or of ``((a; b; c))``; of another kind (``while``) where it has neither."""

    name: str
    words: tuple[Word, ...] | None
    header: str | None
    body: tuple[Node, ...]
    line: int


class Block(NamedTuple):
    """Several commands: a group, the body of a function that is called later, one choice of a ``case``."""

    kind: Literal["group", "function", "choice"]
    body: tuple[Node, ...]
    line: int


Node = Simple | Arithmetic | AndOr | If | Loop | Block


def parse(text: str, name: str, *, first_line: int = 1) -> tuple[Node, ...]:
    """The commands of a script.

    Args:
        text: the script.
        name: of its file, for messages.
        first_line: the number of its first line.

    Raises:
        UserFault: it is no script that can be read.
    """
    return _Parser(Lexer(text, name, first_line).tokens(), name).whole()


class _Parser:
    def __init__(self, tokens: list[Token], name: str) -> None:
        self._tokens = tokens
        self._name = name
        self._at = 0

    def whole(self) -> tuple[Node, ...]:
        """Everything."""
        nodes = self._commands(())
        if not self._is_at_end():
            self._refuse(self._token.line, f"'{self._token.text}' has nothing that it belongs to")
        return nodes

    @property
    def _token(self) -> Token:
        return self._tokens[self._at]

    def _is_at_end(self) -> bool:
        return self._tokens[self._at].kind == "end"

    def _refuse(self, line: int, text: str) -> None:
        raise UserFault(f"{self._name}:{line}: {text}")

    def _take(self, text: str, opened: str, line: int) -> None:
        """The next token, which must be this one."""
        if self._token.text != text or self._is_at_end():
            self._refuse(line, f"'{opened}' begins here and never ends; expected '{text}'")
        self._at += 1

    def _skip(self, *texts: str) -> None:
        while self._token.kind == "operator" and self._token.text in texts:
            self._at += 1

    def _commands(self, until: Collection[str]) -> tuple[Node, ...]:
        nodes: list[Node] = []
        while True:
            self._skip(";", "&")
            if self._is_at_end() or self._token.text in until or self._token.text == ")":
                return tuple(nodes)
            if self._token.text in _ENDS or self._token.text in ("&&", "||", "|", ";;"):
                self._refuse(self._token.line, f"'{self._token.text}' has nothing that it belongs to")
            nodes.append(self._and_or())

    def _and_or(self) -> Node:
        line, first = self._token.line, self._command()
        others: list[tuple[str, Node]] = []
        while self._token.kind == "operator" and self._token.text in ("&&", "||", "|"):
            operator = self._token.text
            self._at += 1
            self._skip(";")  # a line may end behind it
            others.append((operator, self._command()))
        return AndOr(first, tuple(others), line) if others else first

    def _command(self) -> Node:
        token = self._token
        if token.kind == "arithmetic":
            self._at += 1
            return Arithmetic(token.text, token.line)
        node = self._compound(token)
        if node is None:
            return self._simple()
        while self._token.kind == "redirection":
            self._at += 2
        return node

    def _compound(self, token: Token) -> Node | None:
        if token.text not in ("if", "for", "while", "until", "select", "case", "{", "(", "function", "!"):
            is_function = token.kind == "word" and [each.text for each in self._tokens[self._at + 1 :][:2]] == [
                "(",
                ")",
            ]
            return self._function() if is_function else None
        if token.text == "function":
            return self._function()
        self._at += 1
        match token.text:
            case "if":
                return self._if(token.line)
            case "case":
                return self._case(token.line)
            case "{" | "(":
                return Block("group", self._body(_CLOSES[token.text], token), token.line)
            case "!":
                negated = self._command()
                return AndOr(negated, (("!", negated),), token.line)
            case _:
                return self._loop(token)

    def _body(self, ends: str, token: Token) -> tuple[Node, ...]:
        body = self._commands((ends,))
        self._take(ends, token.text, token.line)
        return body

    def _if(self, line: int) -> If:
        branches: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
        while True:
            condition = self._commands(("then",))
            self._take("then", "if", line)
            branches.append((condition, self._commands(("elif", "else", "fi"))))
            if self._token.text == "elif":
                self._at += 1
                continue
            if self._token.text == "else":
                self._at += 1
                branches.append(((), self._commands(("fi",))))
            self._take("fi", "if", line)
            return If(tuple(branches), line)

    def _loop(self, token: Token) -> Loop:
        name, words, header = "", None, None
        if token.text in ("for", "select") and self._token.kind == "arithmetic":
            header = self._token.text
            self._at += 1
        elif token.text in ("for", "select"):
            name = self._token.text
            self._at += 1
            if self._token.text == "in":
                self._at += 1
                given: list[Word] = []
                while self._token.kind == "word":
                    given.append(Word(self._token.text, self._token.line))
                    self._at += 1
                words = tuple(given)
        else:
            self._commands(("do",))
        self._skip(";")
        self._take("do", token.text, token.line)
        return Loop(name, words, header, self._body("done", token), token.line)

    def _case(self, line: int) -> Block:
        """All choices, of which nobody knows which is taken."""
        choices: list[Node] = []
        while self._token.text != "in" and not self._is_at_end():
            self._at += 1
        self._take("in", "case", line)
        while True:
            self._skip(";", ";;")
            if self._token.text == "esac" or self._is_at_end():
                self._take("esac", "case", line)
                return Block("choice", tuple(choices), line)
            while self._token.text != ")" and not self._is_at_end():
                self._at += 1
            self._take(")", "case", line)
            choices += self._commands((";;", "esac"))

    def _function(self) -> Block:
        line = self._token.line
        while self._token.text not in ("{", "(") or self._tokens[self._at + 1].text == ")":
            if self._is_at_end():
                self._refuse(line, "a function begins here and has no body")
            self._at += 1
        opened = self._token
        self._at += 1
        if opened.text == "(" and self._tokens[self._at].text == ")":
            self._at += 1
        return Block("function", self._body(_CLOSES[opened.text], opened), line)

    def _simple(self) -> Simple:
        line = self._token.line
        assignments: list[Assignment] = []
        words: list[Word] = []
        while self._token.kind in ("word", "array", "redirection"):
            token = self._token
            self._at += 1
            if token.kind == "redirection":
                self._at += self._token.kind == "word"
            elif token.kind == "array":
                assigns = ASSIGNS.match(token.text)
                assert assigns is not None  # the lexer has seen it
                assignments.append(Assignment(assigns[1], token.words, bool(assigns[3]), None))
            elif (assigns := ASSIGNS.match(token.text)) and (not words or is_declaration(words[0].raw)):
                value = Word(token.text[assigns.end() :], token.line)
                assignments.append(Assignment(assigns[1], value, bool(assigns[3]), assigns[2]))
            else:
                words.append(Word(token.text, token.line))
        return Simple(tuple(assignments), tuple(words), line)


def is_declaration(command: str) -> bool:
    """Whether what stands behind the command is assigned."""
    return command in ("export", "declare", "local", "readonly", "typeset")
