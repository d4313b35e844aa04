"""``penstock run --dry-run``: what would run, and where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.syntax import Syntax

from penstock.backends.learners.spec import LEARNERS
from penstock.messages.texts import counted
from penstock.runtime.cli.engine_memory import embedded_text
from penstock.runtime.cli.megatron_plan import megatron_text
from penstock.runtime.cli.node_text import node_text
from penstock.runtime.cli.shared_memory import shared_memory_text
from penstock.runtime.cli.tables import aligned
from penstock.runtime.launch.machine import FAILED, LEFT_OUT, OK, ask_machine
from penstock.runtime.observability.texts import bytes_text
from penstock.runtime.preflight.gpu_memory import memory_outcome
from penstock.runtime.run.node_plan import plan_nodes
from penstock.runtime.run.placement import needs_of, num_gpus_asked
from penstock.runtime.run.process_table import placement
from penstock.runtime.safe_text import without_credentials
from penstock.runtime.scenario import dump_scenario
from penstock.runtime.scenario.profiling_rules import dumped_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from penstock.runtime.scenario import Scenario


def show_plan(
    scenario: Scenario,
    console: Console,
    *,
    gpus_per_node: int | None = None,
    gpu_gb: float | None = None,
    is_full: bool = False,
) -> int:
    """Print the scenario, and behind it as comments the placement, the layout of a Megatron learner, and what this
    machine lacks: the whole is a scenario again, but for users and passwords in addresses.

    Args:
        scenario: resolved.
        console: where to.
        gpus_per_node: of the cluster that the placement is shown for.
        gpu_gb: memory of a GPU, that what learner and engines need is compared with; before what the scenario says.
        is_full: with every key, also those that are left at their defaults.

    Returns:
        The exit code: 2 where a check of this machine failed.
    """
    with console.status("looking at this machine …"):
        outcomes = ask_machine(scenario, Path(scenario.run.folder).expanduser().absolute())
        if plan_nodes(scenario, gpus_per_node) is not None:
            outcomes["GPU memory"] = memory_outcome(scenario, gpu_gb, ok=OK, failed=FAILED, left_out=LEFT_OUT)
        layout = layout_text(scenario, gpus_per_node=gpus_per_node, gpu_gb=gpu_gb)
    resolved = without_credentials(dump_scenario(scenario, is_short=not is_full))
    sizes = f"{embedded_text(scenario)}{layout}{dump_text(scenario)}"
    text = f"{resolved}\n{placement_text(scenario)}#\n{sizes}{machine_text(outcomes)}"
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default"), soft_wrap=True)
    else:
        console.print(text, markup=False, soft_wrap=True, end="")
    return 2 if any(outcome.startswith(FAILED) for outcome in outcomes.values()) else 0


def layout_text(scenario: Scenario, *, gpus_per_node: int | None = None, gpu_gb: float | None = None) -> str:
    """Nodes and their GPUs, and how a Megatron learner divides its model over its ranks, as comment lines; empty where
    neither is asked for."""
    nodes, gpu_gb = plan_nodes(scenario, gpus_per_node), gpu_gb or scenario.runtime.gpu_memory_gb
    blocks = [] if nodes is None else [node_text(nodes), shared_memory_text(scenario, nodes, gpu_gb)]
    if LEARNERS.spec(scenario.learner.backend).has_layout:
        on_gpus = nodes is not None and scenario.learner.device != "cpu"
        blocks.append(megatron_text(scenario, nodes if on_gpus else None, gpu_gb))
    return "".join(f"# {line}".rstrip() + "\n" for block in blocks if block for line in [*block, ""])


def placement_text(scenario: Scenario) -> str:
    """The placement as aligned comment lines."""
    rows = placement(scenario)
    lines = aligned(
        [("actor", "processes", "threads each", "device", "")]
        + [(row.name, str(row.num_processes), str(row.num_threads), row.device, row.remark) for row in rows]
    )
    where = scenario.runtime.ray_address or "this machine, with Ray started embedded"
    lines.append(f"{counted(sum(row.num_processes for row in rows), 'process')} on {where}{_gpus(scenario)}")
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def dump_text(scenario: Scenario) -> str:
    """What ``learner.dump`` takes of the disk at most, as comment lines; empty where nothing is written down."""
    if scenario.learner.dump is None:
        return ""  # what follows brings numpy
    num_steps, of_step = dumped_bytes(scenario)
    if not num_steps:
        return ""
    parts = " for each part of an episode" if scenario.episode.kind != "single" else ""
    return (
        f"# learner.dump: {counted(num_steps, 'step')} of at most {bytes_text(of_step)}{parts}, "
        f"{bytes_text(num_steps * of_step)} together before compression\n#\n"
    )


def machine_text(outcomes: Mapping[str, str]) -> str:
    """The outcomes as comment lines, those that failed in full at the end."""
    failed = {subject: outcome for subject, outcome in outcomes.items() if outcome.startswith(FAILED)}
    width = max(map(len, outcomes))
    lines = ["this machine:"]
    lines += [
        f"{subject.ljust(width)}  {FAILED if subject in failed else outcome}" for subject, outcome in outcomes.items()
    ]
    if failed:
        lines += ["", f"{len(failed)} of {len(outcomes)} checks failed:"]
        told = {subject: outcome.removeprefix(f"{FAILED}: ") for subject, outcome in failed.items()}
        lines += [f"{subject}: {text.removeprefix(f'{subject}: ')}" for subject, text in told.items()]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _gpus(scenario: Scenario) -> str:
    """What Ray is asked for; whether the cluster has it is seen when the run starts."""
    num_gpus, at_start = num_gpus_asked(scenario), num_gpus_asked(scenario, at_start=True)
    if not num_gpus:
        return ""
    is_optional = all(need.is_optional for need in needs_of(scenario))
    how = scenario.engines.placement
    later = f", and for more as engines join, {num_gpus} at most" if at_start < num_gpus else ""
    return f"; asks for {counted(at_start, 'GPU')}{' where there are any' * is_optional}{later} (placement {how})"
