"""The storeys of the house: within `backends/` and `runtime/` imports go down, never up, and in no circle.

Each line of a table is a storey; what stands on one line does not know of each other. ``docs/architecture.md`` shows
the same tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_house import HOUSE, imports, sources

if TYPE_CHECKING:
    from pathlib import Path

STOREYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "backends": (
        ("contracts",),
        ("simulated",),
        ("evaluation",),
        ("episodes",),
        ("rewards",),
        ("ledger", "engines"),
        ("learners",),
        ("data",),
        ("vision",),
        ("checkpoint",),
        ("weights", "trackers"),
        ("processes",),
        ("protocol", "registry", "draws", "durable", "extras", "devices", "device_memory", "profiling", "result_cache"),
        ("user_cache",),
    ),
    "backends/learners": (
        ("convert_model",),
        ("megatron",),
        ("torch",),
        ("training",),
        ("objectives",),
        ("hooks",),
        ("checkpoints",),
        ("spec",),
        ("worker_group",),
        ("batch",),
        ("plan", "learning_rate", "step_dumps", "compiling"),
        ("options",),
        ("objective_names", "megatron_options", "recording_options"),
    ),
    "backends/learners/megatron": (
        ("rank", "spec"),
        ("worker",),
        ("opened",),
        ("trainer",),
        ("critic",),
        ("canary", "checkpoint", "out_of_memory", "reference", "roles", "speed", "warm_start"),
        ("weights",),
        ("optimizer",),
        ("schedule",),
        ("model",),
        ("layout",),
        ("bridge",),
        ("cpu",),
    ),
    "backends/engines/served": (
        ("sglang",),
        ("base",),
        ("expectation",),
    ),
    "runtime": (
        ("cli",),
        ("prediction",),
        ("gateway", "slime", "contracts", "chaos", "dashboard", "submit"),
        ("launch",),
        ("preflight",),
        ("hosts",),
        ("run",),
        ("observability",),
        ("scenario",),
        ("shell",),
        ("terminal",),
        ("pictures",),
        ("safe_text",),
        ("output_file", "run_folder"),
    ),
    "runtime/hosts": (
        ("driver", "virtual"),
        ("ray", "local"),
        ("processes",),
    ),
}
"""The uppermost storey first."""


def storey_of(folder: str, name: str) -> tuple[int, str] | None:
    """Height and room of what a module's full name leads to; None where it is outside the folder, or the folder."""
    prefix = f"penstock.{folder.replace('/', '.')}."
    if not name.startswith(prefix):
        return None
    room = name.removeprefix(prefix).split(".")[0]
    for height, rooms in enumerate(reversed(STOREYS[folder])):
        if room in rooms:
            return height, room
    return None


def arrows_up(folder: str, file: Path) -> list[str]:
    """Imports of one file that do not go down."""
    path = file.relative_to(HOUSE / folder)
    own = storey_of(folder, ".".join(("penstock", *folder.split("/"), *path.with_suffix("").parts)))
    if own is None:  # the folder's own __init__
        return []
    found = ((line, name, storey_of(folder, name)) for line, name in imports(file))
    return [
        f"{folder}/{path}:{line} imports {name}"
        for line, name, theirs in found
        if theirs is not None and theirs[1] != own[1] and theirs[0] >= own[0]
    ]


@pytest.mark.parametrize("folder", STOREYS)
def test_imports_go_down(folder: str) -> None:
    assert not [arrow for file in sources(folder) for arrow in arrows_up(folder, file)]


@pytest.mark.parametrize("folder", STOREYS)
def test_every_room_is_on_one_storey(folder: str) -> None:
    there = {
        path.stem for path in (HOUSE / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    rooms = [room for storey in STOREYS[folder] for room in storey]
    assert sorted(rooms) == sorted(there - {"__init__"})


@pytest.mark.parametrize("folder", STOREYS)
def test_the_page_about_the_architecture_shows_the_storeys(folder: str) -> None:
    drawn = "\n".join((f"{folder}/", *("  " + "  ".join(storey) for storey in STOREYS[folder])))
    assert drawn in (HOUSE / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_an_arrow_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STOREYS, "runtime", tuple(reversed(STOREYS["runtime"])))
    arrows = arrows_up("runtime", HOUSE / "runtime" / "run" / "wiring.py")
    assert any("penstock.runtime.scenario" in arrow for arrow in arrows)
    assert not any("penstock.runtime.run" in arrow for arrow in arrows)
