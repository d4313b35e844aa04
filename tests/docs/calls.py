"""Calls of ``penstock`` in shell text, held against the commands and options that there are."""

from __future__ import annotations

import re
import shlex
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import typer

from penstock import benchmarks
from penstock.runtime.cli.app import app
from penstock.runtime.cli.benches import benchmark_docs

OPERATORS = ("&&", "||", "|", ";", ">", "&")
HELP = {"--help", "-h"}
_OPTIONAL = re.compile(r"(?<= )\[|\](?= |$)")
"""``[RUN]``: what may be left out is given."""


class Call(NamedTuple):
    """One call as the command line understood it."""

    command: str
    """``data check``."""
    words: tuple[str, ...]
    """All of them, without ``penstock`` itself."""
    params: dict[str, Any]


def calls_in(text: str) -> list[tuple[str, ...]]:
    """The words after ``penstock`` of each call in a piece of shell, also of those that ``sh -c`` is given, and of
    those that ``docker run`` gives an image of this name."""
    found: list[tuple[str, ...]] = []
    begun = ""
    for line in text.replace("\\\n", " ").splitlines():
        begun += f"{line}\n"
        try:
            words = shlex.split(_OPTIONAL.sub("", begun), comments=True)
        except ValueError:
            continue  # a quotation goes on in the next line
        begun = ""
        for index, word in enumerate(words):
            is_called = index == 0 or words[index - 1] in OPERATORS or words[:2] == ["docker", "run"]
            if word == "penstock" and is_called:
                found.append(tuple(takewhile(lambda each: each not in OPERATORS, words[index + 1 :])))
            elif "penstock " in word:
                found += calls_in(word)
    assert not begun, f"a quotation is not closed: {begun}"
    return found


def parse(words: tuple[str, ...], *, is_whole: bool = True) -> Call:
    """What the command line makes of these words; nothing is carried out.

    Args:
        words: after ``penstock``.
        is_whole: it could be given as it stands; False for a mention that may leave out what is always needed.

    Raises:
        ValueError: there is no such command, option or benchmark.
        UserFault: there is no such scenario.
        Exception: click's own, of whatever else is wrong with a whole one.
    """
    command: Any = _root()
    names: list[str] = []
    rest = list(words)
    while rest and not rest[0].startswith("-") and hasattr(command, "commands"):
        names.append(rest.pop(0))
        if names[-1] not in command.commands:
            raise ValueError(f"penstock {' '.join(words)}: there is no command {' '.join(names)}")
        command = command.commands[names[-1]]
    unknown = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)} - _options(command)
    if names[:1] == ["bench"]:
        unknown &= _unknown_to_benchmark(rest)
    if unknown:
        raise ValueError(f"penstock {' '.join(words)}: there is no option {', '.join(sorted(unknown))}")
    rest = [word for word in rest if word not in HELP]
    context = command.make_context(" ".join(names), rest, resilient_parsing=not is_whole)
    return Call(" ".join(names), words, context.params)


@cache
def _root() -> Any:  # noqa: ANN401  # typer's own copy of click has no public name
    return typer.main.get_command(app)


def commands() -> list[Any]:
    """Every command that there is, with its ``epilog``."""
    found = [_root()]
    for command in found:
        found += getattr(command, "commands", {}).values()
    return found


def _options(command: Any) -> set[str]:  # noqa: ANN401
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | HELP


def _unknown_to_benchmark(rest: list[str]) -> set[str]:
    """The options of a benchmark are its own; what it is not known to have is looked for in its text."""
    if not rest or rest[0].startswith("-"):
        return set(rest)
    if rest[0] not in benchmark_docs():
        raise ValueError(f"penstock bench {' '.join(rest)}: there is no such benchmark")
    stem = Path(benchmarks.__path__[0]) / rest[0]
    files = stem.rglob("*.py") if stem.is_dir() else [stem.with_suffix(".py")]
    text = "".join(file.read_text() for file in [*files, Path(benchmarks.__path__[0]) / "_harness.py"])
    return {word for word in rest if word.startswith("--") and f'"{word}"' not in text} - HELP
