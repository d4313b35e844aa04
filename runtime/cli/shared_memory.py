"""What learner and engines that take turns need of the GPUs that they share, as a dry run prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.options import take_turns
from penstock.messages.names import LEARNER
from penstock.messages.texts import counted
from penstock.runtime.cli.tables import aligned, bytes_text
from penstock.runtime.preflight.gpu_memory import DEFAULT_GPU_GB, FRACTION, GB, needs_on_gpus, sleeping_bytes
from penstock.runtime.scenario.architecture import UnreadableModelError, find_architecture

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.runtime.preflight.gpu_memory import Need
    from penstock.runtime.run.node_plan import NodePlan
    from penstock.runtime.scenario import Scenario


def shared_memory_text(scenario: Scenario, nodes: NodePlan, gpu_gb: float | None) -> list[str]:
    """A line for the turn of each side, and one for what is in the host's memory then; empty where nobody takes turns.

    Args:
        scenario: resolved.
        nodes: who is on which GPUs.
        gpu_gb: memory of a GPU, where the user has said it.
    """
    block = nodes.placement.block_of(LEARNER)
    if not take_turns(scenario.engines) or block is None or len(block.members) == 1:
        return []
    heading = (
        f"turns: of {counted(block.num_gpus, 'GPU')}, {nodes.placement.num_learner_ranks} with a rank of the learner"
    )
    try:
        found = find_architecture(scenario)
    except UnreadableModelError as error:
        return [heading, f"  their memory was not counted: {error}"]
    if found is None:
        return [heading, f"  their memory was not counted: {scenario.model.path} is not there"]
    return [heading, *_sides(scenario, found.architecture, gpu_gb)]


def _sides(scenario: Scenario, architecture: Architecture, gpu_gb: float | None) -> list[str]:
    how = "" if gpu_gb else " (--gpu-memory)"
    memory = (gpu_gb or DEFAULT_GPU_GB) * GB
    rows = [("  turn of", "on a GPU", f"of its {bytes_text(memory)}{how}", "")]
    for need in needs_on_gpus(scenario, architecture):
        if need.key not in ("learner", "engines"):
            continue
        size, remark = _size(need, memory)
        rows.append((f"  {need.key}", bytes_text(size), f"{size / memory:.0%}", remark))
    kept = bytes_text(sleeping_bytes(scenario, architecture))
    return [
        *aligned(rows),
        "  never both at once: a GPU needs the larger of the two, and some hundred MB for each process on it",
        f"  in the engines' turn the ranks keep {kept} in the memory of their host",
    ]


def _size(need: Need, memory: float) -> tuple[float, str]:
    """What it takes of a GPU: of a server all that it may, where that is said."""
    if need.key == LEARNER:
        return need.size_bytes, "the fullest rank"
    if need.share < 1:
        least = bytes_text(need.size_bytes)
        return need.share * memory, f"{FRACTION} {need.share:g}: at least {least}, for weights and one sample"
    return need.size_bytes, "at least, for weights and one sample; the rest is cache"
