"""Write the generated pages of ``docs/``: ``python -m penstock.runtime.cli.docs [FOLDER]``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.runtime.cli.bench_all import kept_page
from penstock.runtime.cli.catalogue import events_catalogue
from penstock.runtime.cli.state_machines import state_machines
from penstock.runtime.scenario.reference import scenario_reference
from penstock.runtime.scenario.schema import schema_text

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS: Final = "benchmarks"
"""Folder in ``docs/`` of the results of ``penstock bench NAME --output docs/benchmarks/NAME.json``."""
GENERATED: Final[dict[str, Callable[[Path], str]]] = {
    "events.md": lambda _: events_catalogue(),
    "scenarios.md": lambda _: scenario_reference(),
    "state_machines.md": lambda _: state_machines(),
    "scenario.schema.json": lambda _: schema_text(),
    "benchmarks.md": lambda folder: kept_page(folder / RESULTS),
}
"""File name, and what makes it of the folder of the docs."""


def write_docs(folder: Path) -> list[Path]:
    """Write every generated page into the folder; those that changed."""
    changed: list[Path] = []
    for name, text_of in GENERATED.items():
        file, text = folder / name, text_of(folder)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            changed.append(file)
    return changed


if __name__ == "__main__":
    for written in write_docs(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")):
        print(f"wrote {written}")
