"""``penstock convert scenario``: a slime launch script as a scenario, or what such a scenario would lack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.runtime.safe_text import terminal_text
from penstock.runtime.slime.convert import to_scenario
from penstock.runtime.slime.script import read_script
from penstock.runtime.slime.verdict import verdict_on

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


def convert_script(script: Path, console: Console, *, is_check: bool) -> int:
    """Print the scenario; or only its notes, and the verdict as the last line. The exit code: 1 for another job.

    Raises:
        UserFault: the script cannot be read.
    """
    converted = to_scenario(read_script(script), script.stem)
    if not is_check:
        console.print(converted.text, markup=False, soft_wrap=True, highlight=False, end="")
        return 0
    verdict = verdict_on(converted)
    console.print(converted.notes, markup=False, soft_wrap=True, highlight=False, end="")
    console.print(terminal_text(str(verdict)), markup=False, soft_wrap=True, highlight=False)
    return 1 if verdict.kind == "other job" else 0
