"""``penstock run --dry-run``: what would run, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.syntax import Syntax

from penstock.runtime.cli.placement import placement
from penstock.runtime.hosts.ray.placement import needs_of
from penstock.runtime.scenario import dump_scenario

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.runtime.scenario import Scenario


def show_plan(scenario: Scenario, console: Console) -> None:
    """Print the resolved scenario and behind it, as comments, the placement: the whole is a scenario again."""
    text = dump_scenario(scenario) + "\n" + placement_text(scenario)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"), soft_wrap=True)
    else:
        console.print(text, markup=False, soft_wrap=True, end="")


def placement_text(scenario: Scenario) -> str:
    """The placement as aligned comment lines."""
    rows = placement(scenario)
    cells = [("actor", "processes", "threads each", "device", "")] + [
        (row.name, str(row.num_processes), str(row.num_threads), row.device, row.remark) for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    where = scenario.runtime.ray_address or "this machine, with Ray started embedded"
    lines.append(f"{sum(row.num_processes for row in rows)} processes on {where}{_gpus(scenario)}")
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _gpus(scenario: Scenario) -> str:
    """What Ray is asked for; whether the cluster has it is seen when the run starts."""
    num_gpus = sum(len(need.names) * need.size.num_gpus for need in needs_of(scenario))
    if not num_gpus:
        return ""
    is_optional = all(need.is_optional for need in needs_of(scenario))
    how = scenario.engines.placement
    return f"; asks for {num_gpus} GPU{'s' * (num_gpus > 1)}{' where there are any' * is_optional} (placement {how})"
