"""The scenario that a plan has chosen, as a file that runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.messages.errors import UserFault
from penstock.runtime.scenario.load import dump_scenario, load_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.scenario import Scenario


def write_planned(scenario: Scenario, path: Path, remarks: Sequence[str]) -> None:
    """Write the scenario, with the remarks as comments before it; it is read again before it has its name.

    Raises:
        UserFault: it cannot be written.
    """
    lines = [f"# {part}".rstrip() for remark in remarks for part in remark.splitlines()]
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text("\n".join([*lines, "", dump_scenario(scenario, is_short=True)]), encoding="utf-8")
        load_scenario(scratch)
        scratch.rename(path)
    except OSError as error:
        raise UserFault(f"{path}: cannot be written: {(error.strerror or str(error)).lower()}") from None
    finally:
        scratch.unlink(missing_ok=True)
