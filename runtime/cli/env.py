"""``penstock env sglang``: the environment that SGLang's servers run in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.backends.engines.served.sglang.environment import device_name
from penstock.backends.engines.served.sglang.environment_build import Progress, build_environment

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


def build_sglang(
    console: Console, *, folder: Path | None, stand_ins: Path | None, python: Path | None, recreate: bool
) -> None:
    """Build it unless it is ready, showing what is being installed and for how long.

    Raises:
        UserFault: it cannot be built.
    """
    began_s = time.monotonic()
    said = ""
    with console.status("looking …") as status:

        def show(progress: Progress) -> None:
            nonlocal said
            total = progress.total_packages
            counted = f"[{progress.num_packages}/{total}] " if total else ""
            status.update(f"{escape(f'{counted}{progress.text}')} … {time.monotonic() - began_s:.0f} s")
            what = f"installing {total} packages" if total else progress.text
            if what != said and not console.is_terminal:  # one line for each stage, where nothing can move
                console.print(f"{what} …", markup=False, soft_wrap=True)
            said = what

        built = build_environment(folder=folder, stand_ins=stand_ins, python=python, recreate=recreate, report=show)
    environment = built.environment
    what = f"SGLang {environment.version} for {device_name(is_cpu=environment.is_cpu)}"
    how = "was ready" if built.was_ready else f"is ready after {time.monotonic() - began_s:.0f} s"
    console.print(f"[green]✓[/] {what} {how}: {escape(str(built.folder))}", soft_wrap=True)
