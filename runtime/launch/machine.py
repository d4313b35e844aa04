"""All that a scenario needs of this machine, asked at once; a run stops at the first thing that is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.sglang.environment import num_cuda_gpus
from penstock.messages.errors import UserFault
from penstock.runtime.preflight.machine import machine_checks
from penstock.runtime.run.gpu_needs import NodeGpus
from penstock.runtime.run.placement import needs_of, place

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.runtime.preflight.machine import MachineCheck
    from penstock.runtime.scenario import Scenario

OK: Final = "ok"
FAILED: Final = "failed"
LEFT_OUT: Final = "left out"


def ask_machine(scenario: Scenario, run_parent: Path) -> dict[str, str]:
    """Each check of this machine and its outcome."""
    outcomes: dict[str, str] = {}
    for check in machine_checks(scenario, run_parent):
        outcomes[check.subject] = _outcome(check, outcomes)
    if needs_of(scenario):
        outcomes["GPUs"] = _room_for_gpus(scenario)
    return outcomes


def _outcome(check: MachineCheck, before: Mapping[str, str]) -> str:
    if check.is_elsewhere:
        return f"{LEFT_OUT}: it is for the machines of the cluster"
    if check.needs and before[check.needs] != OK:
        return f"{LEFT_OUT}: it needs {check.needs}"
    try:
        check.ask()
    except UserFault as error:
        return f"{LEFT_OUT if check.is_later else FAILED}: {error}"
    return OK


def _room_for_gpus(scenario: Scenario) -> str:
    """Whether those of this machine suffice."""
    if scenario.runtime.ray_address is not None:
        return f"{LEFT_OUT}: they are those of the cluster"
    try:
        place(scenario, [NodeGpus("this machine", num_cuda_gpus())])
    except UserFault as error:
        return f"{FAILED}: {error}"
    return OK
