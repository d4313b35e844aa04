"""The ``penstock`` command: its commands, and how a mistake of the user is told."""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from contextlib import suppress
from typing import Annotated

import typer
from rich.markup import escape

from penstock.messages.errors import UserFault, is_disk_full
from penstock.runtime.cli import control_commands, planning_commands, prepare_commands, run_commands, view_commands
from penstock.runtime.cli.program import OWN_PROCESS, PlainCommand, app, console, engine_commands, errors
from penstock.runtime.safe_text import without_credentials

__all__ = ["app", "control_commands", "main", "planning_commands", "prepare_commands", "run_commands", "view_commands"]

INTERRUPTED = 130
NO_HOME = "Could not determine home directory."
"""The words of ``pathlib``, which has no type of error for it."""


def _plain_help(program: typer.Typer) -> None:
    """A paragraph of a docstring is as wide as its reader's terminal, not as the source: where markup is understood,
    the library takes each line end of the source for one that is meant."""
    for command in program.registered_commands:
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
        command.cls = PlainCommand
    for group in program.registered_groups:
        if group.typer_instance is not None:
            _plain_help(group.typer_instance)


_plain_help(app)
PARTS = {
    run_commands.__name__: "Run",
    view_commands.__name__: "Look at runs",
    control_commands.__name__: "Tell a run something while it goes on",
    prepare_commands.__name__: "Prepare and measure",
    planning_commands.__name__: "Before there are devices",
}
"""In this order their commands are listed, under these headings; what somebody new types first comes first."""


def _under_headings(program: typer.Typer) -> None:
    order = [*PARTS]
    program.registered_commands.sort(key=lambda each: order.index(each.callback.__module__) if each.callback else 0)
    for command in program.registered_commands:
        command.rich_help_panel = PARTS[command.callback.__module__] if command.callback else None
    for group in program.registered_groups:
        about = control_commands if group.typer_instance is engine_commands else prepare_commands
        group.rich_help_panel = PARTS[about.__name__]


_under_headings(app)


def _refuse_dashed_keys(words: list[str]) -> None:
    """Keys with dashes before them, as other systems have them."""
    for word in words:
        if found := re.fullmatch(r"--?(\w+(?:\.\w+)+(?:=.*)?)", word, re.DOTALL):
            raise UserFault(f"{word}: keys of a scenario have no dashes before them; write {found[1]}")


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UserFault("the current folder was removed; change to one that exists") from None


def _check_names(names: list[str]) -> None:
    """Paths are written into files that are UTF-8."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            advice = "give what is named so another name"
            with suppress(UnicodeDecodeError):
                os.fsencode(name).decode()
                advice = f"the locale has {sys.getfilesystemencoding()} in its place; set LC_ALL=C.UTF-8"
            raise UserFault(f"{ascii(name)[1:-1]}: expected UTF-8; {advice}") from None


def main() -> None:
    """The entry point of the ``penstock`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where the locale knows no such sign, another one
            stream.reconfigure(errors="replace")
    try:
        _check_names([_current_folder(), *sys.argv[1:]])
        _refuse_dashed_keys(sys.argv[1:])
        app(obj=OWN_PROCESS)
    except SystemExit as end:
        # A run says how it ended itself; what ends before it has begun would end without a word.
        if end.__context__ is not None and isinstance(end.__context__.__cause__, KeyboardInterrupt):
            errors.print("[bold red]penstock:[/] interrupted")
        raise
    except UserFault as error:
        errors.print(f"[bold red]penstock:[/] {escape(without_credentials(str(error)))}")
        sys.exit(2)
    except OSError as error:
        if not is_disk_full(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what did not go out would be tried once more at the end
        what = error.filename or "a file or the output"  # what could not be written does not name itself
        why = (error.strerror or "").lower()
        errors.print(f"[bold red]penstock:[/] {escape(str(what))} cannot be written: {why}; make room")
        sys.exit(1)
    except RuntimeError as error:
        if str(error) != NO_HOME:
            raise
        errors.print(
            "[bold red]penstock:[/] a path begins with ~, or is in the home folder where nothing else is said, and no "
            "home folder is known; write the path in full, or set HOME to a folder"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and leave.")] = False,
) -> None:
    if version:
        from penstock import __version__

        console.print(f"penstock {__version__}")
        raise typer.Exit
