"""Which host a run lives on; each is imported only where it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from penstock.runtime.hosts.processes.ports import ProcessHost
    from penstock.runtime.scenario import Scenario


def open_host(scenario: Scenario, temp_folder: Path, wiring: str, *, spare: Collection[int] = ()) -> ProcessHost:
    """The host that ``runtime.host`` names, not started yet.

    Args:
        scenario: resolved.
        temp_folder: for an embedded Ray.
        wiring: module that says what the actors are.
        spare: processes of ours that outlive the host.
    """
    if scenario.runtime.host == "local":
        from penstock.runtime.hosts.local.local_host import LocalHost
        from penstock.runtime.hosts.local.warm import modules_of

        return LocalHost(modules_of(scenario, wiring))
    from penstock.runtime.hosts.ray.cluster import RayHost

    return RayHost(scenario.runtime.ray_address, temp_folder, spare=spare)
