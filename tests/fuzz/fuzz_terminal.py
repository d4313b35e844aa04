"""A fuzzer for what reaches the terminal and logs: text, and styles of ours, but no control of anybody else's."""

from __future__ import annotations

import io
import logging
import re

from fuzzing import Draw, fuzz, in_time, instrumented
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

with instrumented("penstock.runtime.safe_text", "penstock.runtime.terminal"):
    from penstock.runtime.safe_text import LogFormatter, terminal_lines, terminal_text, without_credentials
    from penstock.runtime.terminal import TerminalConsole

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"  # but for \t and \n
)
OURS = re.compile(r"\x1b\[[0-9;]*m")
WORDS = (
    "\x1b", "\x1b[2J", "\x1b]0;t\x07", "\x1b]52;c;YQ==\x1b\\", "\x1b]8;;http://x\x1b\\", "\x9b", "\x9d", "\x90",
    "\x07", "\x08", "\r", "\n", "\t", "\x00", "\x7f", "\x85", "\u2028", "\u202e", "\u2066", "\ud800", "\udfff", "a",
    " ", "日", "é", "\u0301", "[red]", "[/]", "[link=file:///x]", "[bold", "\\[", "[@click=x]", ":smile:",
    "http://u:p@h/", "https://", "@", "://", "\\x1b", "%s", "%", "…",
)  # fmt: skip
FORMATTER = LogFormatter("%(levelname)s %(message)s")


def printed(draw: Draw, text: str, other: str) -> None:
    table = Table(escape(text), title=escape(other), caption=escape(text), box=None)
    table.add_row(escape(other), Text(text))
    tree = Tree(escape(text))
    tree.add(Text(other, style="bold"))
    marked = f"[bold]{escape(text)}[/] [dim]{escape(other)}[/]"
    everything = (
        marked,
        escape(text),
        Text(other),
        table,
        tree,
        Panel(Text(text), title=escape(other)),
        Rule(escape(other)),
    )
    is_coloured = draw.flag()
    file = io.StringIO()
    width = draw.number(4, 120)
    console = TerminalConsole(
        file=file, width=width, force_terminal=is_coloured, color_system="truecolor" if is_coloured else None
    )
    for each in everything:
        console.print(each, style="red" if draw.flag() else None)
    shown = OURS.sub("", file.getvalue()) if is_coloured else file.getvalue()
    assert not UNSAFE.search(shown), (text, other, shown)
    shown.encode()


def logged(text: str, other: str) -> None:
    try:
        raise ValueError(other)
    except ValueError as error:
        exc_info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("penstock", logging.WARNING, "f.py", 1, "said %s", (text,), exc_info)
    shown = FORMATTER.format(record)
    assert not UNSAFE.search(shown), (text, other, shown)


def check(data: bytes) -> None:
    draw = Draw(data)
    if draw.number(0, 31) == 0:
        long = draw.long_text(WORDS)
        with in_time(repr(long[:60])):
            terminal_text(long)
            terminal_lines(without_credentials(long))
        return
    text, other = (draw.text(WORDS, surrogates=True) for _ in range(2))
    for shown in (terminal_text(text), terminal_lines(text)):
        assert not UNSAFE.search(shown), text
    most = draw.number(1, 30)
    assert len(terminal_text(text, max_chars=most)) <= most
    assert set("\n\t").isdisjoint(terminal_text(text))
    hidden = without_credentials(f"redis://name:Pa55{draw.pick(('', 'word', ':', '%40'))}@host/{terminal_text(text)}")
    assert "Pa55" not in hidden, hidden
    logged(text, other)
    if draw.number(0, 3) == 0:
        printed(draw, text, other)


if __name__ == "__main__":
    fuzz(check)
