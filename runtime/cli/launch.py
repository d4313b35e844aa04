"""``penstock run``: preflight, the run's folder, and then the host until the run has ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from penstock.runtime.cli.runs import SCENARIO_NAME, close_record, make_run_folder, open_record
from penstock.runtime.errors import UserError
from penstock.runtime.scenario import dump_scenario
from penstock.runtime.scenario.preflight import check_machine

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.runtime.scenario import Scenario


def launch(scenario: Scenario, scenario_path: Path, console: Console) -> int:
    """Run a scenario in a folder of its own; the exit code of the run.

    Raises:
        UserError: something that the scenario needs is missing here. Nothing was started and no folder is left.
    """
    parent = Path(scenario.run.folder).expanduser().absolute()
    with console.status("checking that everything is there …"):
        check_machine(scenario, parent)
    from penstock.runtime.hosts.ray.driver import run_scenario

    folder = make_run_folder(parent, scenario.run.name)
    (folder / SCENARIO_NAME).write_text(dump_scenario(scenario), encoding="utf-8")
    console.print(f"run folder: {escape(str(folder))}")
    record = open_record(folder, scenario.run.name)
    exit_code = 1
    try:
        exit_code = run_scenario(scenario, scenario_path, folder, console)
    except KeyboardInterrupt:
        exit_code = 130
        raise
    except UserError:
        exit_code = 2
        raise
    finally:
        close_record(folder, record, exit_code)
    return exit_code
