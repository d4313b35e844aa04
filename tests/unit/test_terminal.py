"""Nothing that a stranger wrote reaches the terminal as more than text."""

from __future__ import annotations

import ast
import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.markup import escape
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from penstock.runtime.safe_text import LogFormatter, terminal_lines
from penstock.runtime.terminal import TerminalConsole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

HOUSE = Path(__file__).parents[2]
HOSTILE = "a\x1b]0;mine\x07b\x9b2Jc\rd\u202ee\x08\ud800"
SPELLED = ["\\x1b]0;mine", "\\x9b2J"]


def printed(renderable: RenderableType, *, width: int = 200) -> str:
    file = io.StringIO()
    TerminalConsole(file=file, width=width).print(renderable)
    return file.getvalue()


def table() -> Table:
    made = Table(escape(HOSTILE), title=escape(HOSTILE))
    made.add_row(escape(HOSTILE))
    made.add_row(Text(HOSTILE))
    return made


@pytest.mark.parametrize(
    "renderable",
    [
        escape(HOSTILE),
        Text(HOSTILE),
        Text.assemble("x", (HOSTILE, "bold")),
        Panel(escape(HOSTILE)),
        Panel(Text(HOSTILE), title=escape(HOSTILE)),
        Rule(HOSTILE),
        table(),
    ],
    ids=["string", "text", "assembled", "panel", "title", "rule", "table"],
)
def test_no_renderable_brings_a_control_to_the_terminal(renderable: RenderableType) -> None:
    shown = printed(renderable)
    assert shown == terminal_lines(shown)
    assert all(spelled in shown for spelled in SPELLED)


def test_styles_and_lines_of_our_own_stay() -> None:
    file = io.StringIO()
    TerminalConsole(file=file, width=40, force_terminal=True, color_system="standard").print("[red]one[/]\ntwo :x:")
    assert file.getvalue() == "\x1b[31mone\x1b[0m\ntwo :x:\n"


@settings(deadline=None)
@given(st.text(st.characters()), st.integers(4, 60))
def test_no_text_brings_a_control_to_the_terminal(text: str, width: int) -> None:
    made = Table(escape(text), box=None)
    made.add_row(escape(text), Text(text))
    shown = printed(made, width=width)
    assert shown == terminal_lines(shown)
    shown.encode()


def test_a_log_has_no_control_of_a_terminal() -> None:
    record = logging.LogRecord("x", logging.WARNING, "f", 1, "said %s", (HOSTILE,), None)
    shown = LogFormatter("%(message)s").format(record)
    assert shown == "said " + terminal_lines(HOSTILE)


# --- every sink -------------------------------------------------------------------------------------------------------

MACHINES_READ = {
    "runtime/chaos/nodes.py": "a word for the process that has started it",
    "runtime/cli/docs.py": "names of our own pages",
    "runtime/cli/prepare_commands.py": "the schema, which is generated",
    "runtime/cli/ledger.py": "comma-separated values, for another program unless there is a terminal",
    "runtime/launch/progress.py": "figures and words of ours; the one line of the run's log went through terminal_text",
    "runtime/safe_text.py": "sets the log up",
}
"""Where something else is written than what strangers may have a part in."""


def sinks(source: str) -> Iterator[tuple[int, str]]:
    """Calls that write to the terminal past the console, and consoles that let anything through."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        is_safe = all(
            isinstance(value, ast.Call)
            and ast.unparse(value.func) in ("terminal_lines", "terminal_text", "without_credentials")
            for value in node.args
        )
        if name == "Console" or name.endswith(("from_ansi", "basicConfig")):
            is_safe = any("LogFormatter" in ast.unparse(node) or each.arg == "handlers" for each in node.keywords)
        elif name not in ("print", "sys.stdout.write", "sys.stderr.write", "typer.echo", "csv.writer", "console.out"):
            continue
        if not is_safe:
            yield node.lineno, name


def test_everything_that_is_printed_goes_through_one_place() -> None:
    found = {
        f"{path.relative_to(HOUSE)}:{line} {name}"
        for path in (HOUSE / "runtime").rglob("*.py")
        if str(path.relative_to(HOUSE)) not in MACHINES_READ
        for line, name in sinks(path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        "print(story)",
        "sys.stderr.write(f'{error}')",
        "console = Console()",
        "Text.from_ansi(row)",
        "csv.writer(sys.stdout)",
        "logging.basicConfig(stream=sys.stderr)",
    ],
)
def test_the_rule_for_sinks_sees_a_violation(source: str) -> None:
    assert list(sinks(source))
    assert not list(sinks("sys.stderr.write(terminal_text(story))"))
