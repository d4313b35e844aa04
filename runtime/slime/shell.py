"""What a shell makes of the variables, arrays, loops and sourced files of a launch script, without running anything.

Of commands only those are followed that print or assign (``echo``, ``printf``, ``seq``, ``dirname``, ``basename``,
``pwd``, ``cd``, ``source``). What another one would print, and what only the environment knows, stays in a value as it
is written, and the value says so (:attr:`Field.unread`).

Invariants:

* A condition that nobody can decide here is taken to hold, and what is set under it says so.
* Loops, texts and sourced files are bounded, so that no script makes the reader run on.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.errors import UserFault
from penstock.runtime.slime.arithmetic import evaluate
from penstock.runtime.slime.expansion import Expander, Field
from penstock.runtime.slime.shell_lexer import Word
from penstock.runtime.slime.shell_parser import AndOr, Arithmetic, Block, If, Loop, Simple, is_declaration, parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.slime.shell_parser import Assignment, Node

MAX_STEPS: Final = 10_000
"""Commands that one script may take, those of its loops counted each time."""
MAX_DEPTH: Final = 16
"""Files that source one another."""
_NUMBERS: Final = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


class Launch(NamedTuple):
    """A command with its words, as they would be handed to it."""

    words: tuple[Field, ...]
    line: int
    file: str
    surroundings: str = ""
    """What stands before the program (the environment that Ray is told), and the names of all variables."""


class Shell(Expander):
    """The state of one script: variables, the folder it is in, what it has begun."""

    def __init__(self, script: Path, programs: tuple[str, ...]) -> None:
        """``programs``: names of the files whose commands are kept."""
        super().__init__(script)
        self._programs = programs
        self.launches: list[Launch] = []
        self.problems: list[Field] = []
        """What could not be followed, each with its place."""
        self._num_steps = 0
        self._depth = 0
        self._supposed: tuple[str, ...] = ()
        """Conditions that are taken to hold."""
        self._printed: list[str] | None = None
        """Within ``$(…)``; None where something is run there that is not followed."""

    def run(self, text: str, path: Path) -> None:
        """Go through a script, or one that it sources.

        Raises:
            UserFault: it cannot be read, or does not end.
        """
        outer, self.file = self.file, path
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UserFault(f"{path}: scripts source one another more than {MAX_DEPTH} deep")
        self._all(parse(text, str(path)))
        self._depth -= 1
        self.file = outer

    def _all(self, nodes: Sequence[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            status = self._one(node)
        return status

    def _one(self, node: Node) -> bool | None:
        """Whether it succeeds; None: nobody knows."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS:
            raise UserFault(f"{self.file}:{node.line}: more than {MAX_STEPS:,} steps; is there a loop without an end?")
        match node:
            case Simple():
                return self._simple(node)
            case Arithmetic():
                value = evaluate(node.text, self.numbers)
                return None if value is None else value != 0
            case AndOr():
                return self._and_or(node)
            case If():
                return self._if(node)
            case Loop():
                return self._loop(node)
            case Block():
                if node.kind == "group":
                    return self._all(node.body)
                self._suppose(node.body, f"{node.kind} at line {node.line} of {self.file.name}")
                return True

    def _suppose(self, nodes: Sequence[Node], condition: str) -> None:
        """Go through commands of which nobody knows whether they are run."""
        self._supposed = (*self._supposed, condition)
        self._all(nodes)
        self._supposed = self._supposed[:-1]

    def _and_or(self, node: AndOr) -> bool | None:
        if node.others[0][0] == "!":
            status = self._one(node.first)
            return None if status is None else not status
        status = self._one(node.first)
        for operator, other in node.others:
            if operator == "|":
                self._printed = None  # what one command makes of the output of another is not followed
                status = self._one(other)
            elif status is None:
                self._suppose((other,), f"the condition in line {node.line} of {self.file.name}")
            elif status == (operator == "&&"):
                status = self._one(other)
        return status if node.others[-1][0] != "|" else None

    def _if(self, node: If) -> bool | None:
        for index, (condition, body) in enumerate(node.branches):
            status = self._all(condition)
            if status:
                return self._all(body)
            if status is None:
                # the first branch goes last, so that what it sets stands
                for _, other in reversed(node.branches[index:]):
                    self._suppose(other, f"the condition in line {node.line} of {self.file.name}")
                return True
        return True

    def _loop(self, node: Loop) -> bool | None:
        if node.words is not None:
            for field in itertools.chain.from_iterable(self.fields(word) for word in node.words):
                self.set(node.name, field)
                self._all(node.body)
            return True
        start, test, step = [*(node.header or "").split(";"), "", "", ""][:3] if node.header else ("", "", "")
        if not node.header or evaluate(start, self.numbers) is None or evaluate(test, self.numbers) is None:
            self._suppose(node.body, f"the loop in line {node.line} of {self.file.name}")
            return True
        while evaluate(test, self.numbers):
            self._all(node.body)
            evaluate(step, self.numbers)
            self._one(Arithmetic("1", node.line))  # counts, where the body is empty
        return True

    # --- one command --------------------------------------------------------------------------------------------

    def _simple(self, node: Simple) -> bool | None:
        for assignment in node.assignments:
            self._assign(assignment)
        words = [field for word in node.words for field in self.fields(word)]
        if not words:
            return True
        name = words[0].text
        starts = [index for index, field in enumerate(words) if PurePosixPath(field.text).name in self._programs]
        if starts and name not in ("echo", "printf", "pkill"):
            around = (*(field.text for field in words[: starts[0]]), *self.variables)
            self.launches.append(Launch(tuple(words[starts[0] :]), node.line, self.file.name, " ".join(around)))
            return True
        if name.startswith("--") and self.launches:
            text = "the line before lacks its backslash: bash takes this for another command; read as part of the first"
            self.problems.append(Field(text, (), node.line, self.file.name))
            self.launches[-1] = self.launches[-1]._replace(words=(*self.launches[-1].words, *words))
            return True
        texts = [field.text for field in words[1:]]
        is_known = not any(field.unread for field in words)
        match name:
            case "source" | ".":
                self._source(words[1:], node.line)
            case "test" | "[" | "[[":
                return self._test([each for each in texts if each not in ("]", "]]")]) if is_known else None
            case "printf" if texts[:1] == ["-v"] and len(texts) > 2:
                self.set(texts[1], Field(_formatted(texts[2:]), tuple(u for field in words for u in field.unread)))
            case "cd":
                self.folder = self.folder / (texts[-1] if texts else "~")
            case "true" | ":" | "set" | "shopt" | "exit" | "wait" | "unset":
                return True
            case "false":
                return False
            case _ if is_declaration(name):
                return True
            case _:
                return self._print(name, texts) if is_known else self._print("", texts)
        return True

    def _print(self, name: str, texts: list[str]) -> bool | None:
        if self._printed is None:
            return True
        given = [text for text in texts if text != "--"]
        match name:
            case "echo":
                self._printed.append(" ".join(given[1:] if given[:1] in (["-n"], ["-e"]) else given))
            case "printf":
                self._printed.append(_formatted(given))
            case "pwd":
                self._printed.append(str(self.folder))
            case "dirname" if given:
                self._printed.append(str(PurePosixPath(given[0]).parent))
            case "basename" if given:
                self._printed.append(PurePosixPath(given[0]).name.removesuffix(given[1] if len(given) > 1 else ""))
            case "seq" if (numbers := _sequence(given)) is not None:
                self._printed.append("\n".join(map(str, numbers)))
            case _:
                self._printed = None
        return True

    def captured(self, text: str, line: int) -> str | None:
        """What commands would print; None where one is not followed. Their assignments are their own.

        Raises:
            UserFault: they cannot be read.
        """
        kept = dict(self.variables), self.folder, self._printed
        self._printed = []
        try:
            self._all(parse(text, self.file.name, first_line=line))
            return self._all_printed()
        finally:
            self.variables, self.folder, self._printed = kept

    def _all_printed(self) -> str | None:
        return None if self._printed is None else "\n".join(self._printed).rstrip("\n")

    def _assign(self, assignment: Assignment) -> None:
        value = assignment.value
        if isinstance(value, Word):
            field = self.quoted(value)
            fields = [field]
        else:
            fields = [field for word in value for field in self.fields(word)]
        fields = [field.supposing(self._supposed) for field in fields]
        before = self.variables.get(assignment.name, [])
        if assignment.element is not None:
            place = evaluate(assignment.element, self.numbers)
            array = list(before) if isinstance(before, list) else [before]
            if place is not None and 0 <= place <= len(array):
                array[place : place + 1] = fields
                self.set(assignment.name, array)
        elif isinstance(value, Word) and not isinstance(before, list):
            text = before.text if assignment.adds else ""
            self.set(assignment.name, fields[0]._replace(text=text + fields[0].text))
        elif isinstance(value, Word):
            self.set(assignment.name, fields[0])
        else:
            self.set(assignment.name, [*before, *fields] if assignment.adds and isinstance(before, list) else fields)

    def _source(self, words: Sequence[Field], line: int) -> None:
        if not words:
            return
        field = words[0]
        path = None if field.unread else self.found(field.text)
        if path is None:
            text = f"sources {field.text}, which is not here: its flags are missing"
            self.problems.append(Field(text, (), line, self.file.name))
            return
        try:
            self.run(path.read_text(), path)
        except (OSError, UnicodeDecodeError) as error:
            raise UserFault(f"{path} (sourced in {self.file}:{line}) cannot be read: {error}") from None

    def _test(self, words: list[str]) -> bool | None:
        match words:
            case ["!", *others]:
                status = self._test(others)
                return None if status is None else not status
            case ["-z", text]:
                return not text
            case ["-n", text] | [text]:
                return bool(text)
            case [left, "=" | "==", right]:
                return left == right
            case [left, "!=", right]:
                return left != right
            case [left, comparison, right] if comparison in _NUMBERS:
                value = evaluate(f"({left}) {_NUMBERS[comparison]} ({right})", self.numbers)
                return None if value is None else value != 0
            case _:
                return None


def _sequence(texts: list[str]) -> range | None:
    """What ``seq`` counts: to a number, from one to another, or in steps."""
    if not 1 <= len(texts) <= 3 or not all(re.fullmatch(r"-?\d{1,6}", text) for text in texts):
        return None
    numbers = [int(text) for text in texts]
    first, step = numbers[0] if len(numbers) > 1 else 1, numbers[1] if len(numbers) > 2 else 1
    return range(first, numbers[-1] + (1 if step > 0 else -1), step) if step else None


def _formatted(texts: list[str]) -> str:
    """As ``printf`` does, of which ``%s`` and ``%d`` are enough here."""
    if not texts:
        return ""
    values = iter(texts[1:])
    found = re.sub(r"%[sd]", lambda _: next(values, ""), texts[0])
    return found.replace("\\n", "\n").rstrip("\n")
