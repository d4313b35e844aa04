"""The scenarios that come with Penstock, by their names."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Final

from penstock.messages.errors import UserFault

FOLDER: Final = Path(__file__).resolve().parents[2] / "scenarios"
EXAMPLES: Final = "examples"


def shipped_scenarios() -> dict[str, Path]:
    """Files by name, which is that of the file without ``.yaml``; those of ``examples/`` last."""
    files = [*sorted(FOLDER.glob("*.yaml")), *sorted((FOLDER / EXAMPLES).glob("*.yaml"))]
    return {file.stem: file for file in files}


def find_scenario(given: Path) -> Path:
    """The file that is meant: the one of this path, or else the shipped one of this name.

    Raises:
        UserFault: there is neither.
    """
    if given.exists() and not given.is_dir():
        return given
    shipped = shipped_scenarios()
    name = given.name.removesuffix(".yaml")
    if given.suffix == "" and given.parent in (Path(), Path(EXAMPLES)) and name in shipped:
        return shipped[name]
    if name in shipped:
        raise UserFault(f"{given}: no such file; the scenario that comes with Penstock is run by name: {name}")
    if given.is_dir():
        raise UserFault(f"{given}: a folder, and no scenario; name the YAML file")
    close = ", ".join(get_close_matches(name, shipped, n=3))
    if given.suffix:
        hint = f"; with Penstock comes {close}" if close else ""
        raise UserFault(f"{given}: cannot read this scenario: no such file or directory{hint}")
    own = [f"{given}{suffix}" for suffix in (".yaml", ".yml", ".toml") if Path(f"{given}{suffix}").is_file()]
    close = ", ".join(own) or close
    there = f"did you mean {close}?" if close else f"there are {', '.join(shipped)}"
    raise UserFault(f"{given}: no such file, and no scenario of this name comes with Penstock; {there}")
