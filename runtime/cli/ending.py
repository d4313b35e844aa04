"""A run from its launch to its end, as the command line tells it."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from penstock.runtime.cli.collected import show_collected
from penstock.runtime.launch.again import begin_or_go_on
from penstock.runtime.launch.launch import launch, what_is_left
from penstock.runtime.safe_text import terminal_lines, without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rich.console import Console

    from penstock.runtime.launch.launch import Ended
    from penstock.runtime.scenario import Scenario


def tell_end(ended: Ended) -> int:
    """Say why a run has not come to its end, and how to go on with it; its exit code."""
    if ended.exit_code:
        sys.stderr.write(without_credentials(terminal_lines(f"penstock: {ended.story}\n")))
        sys.stderr.write(terminal_lines(f"{what_is_left(ended.folder)}\n"))
    return ended.exit_code


def run_and_tell(
    scenario: Scenario, path: Path, console: Console, *, has_dashboard: bool = False, folder: Path | None = None
) -> int:
    """Launch a run, follow it to its end, and say what it came to; its exit code. In a ``folder`` that is named, it
    goes on where it has begun already."""
    beside: Callable[[Path], AbstractContextManager[object]] = nullcontext
    if has_dashboard:
        from penstock.runtime.cli.dashboard import dashboard_beside

        beside = partial(dashboard_beside, console=console)
    if folder is None:
        ended = launch(scenario, path, console, beside=beside)
    else:
        ended = begin_or_go_on(scenario, path, console, folder, beside=beside)
    if scenario.run.only == "rollout" and not ended.exit_code:
        show_collected(ended.folder, console)
    return tell_end(ended)
