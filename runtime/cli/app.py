"""The ``penstock`` command: its commands, and how a mistake of the user is told."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer
from rich.markup import escape

from penstock.messages.errors import UserFault
from penstock.runtime.cli import control_commands, planning_commands, prepare_commands, run_commands, view_commands
from penstock.runtime.cli.program import OWN_PROCESS, app, console, errors
from penstock.runtime.safe_text import without_credentials

__all__ = ["app", "control_commands", "main", "planning_commands", "prepare_commands", "run_commands", "view_commands"]

INTERRUPTED = 130


def _refuse_dashed_keys(words: list[str]) -> None:
    """Keys with dashes before them, as other systems have them."""
    for word in words:
        if found := re.fullmatch(r"--?(\w+(?:\.\w+)+(?:=.*)?)", word, re.DOTALL):
            raise UserFault(f"{word}: keys of a scenario have no dashes before them; write {found[1]}")


def main() -> None:
    """The entry point of the ``penstock`` command."""
    try:
        _refuse_dashed_keys(sys.argv[1:])
        app(obj=OWN_PROCESS)
    except UserFault as error:
        errors.print(f"[bold red]penstock:[/] {escape(without_credentials(str(error)))}")
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
