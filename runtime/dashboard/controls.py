"""What a person may tell a run from the page: another policy, a pause, a checkpoint, to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.launch.control import (
    PauseGrants,
    ResumeGrants,
    SaveCheckpoint,
    StopRun,
    SwitchPolicy,
    send_command,
)

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.hosts.processes.operator_door import CommandAnswer

ANSWER_S: Final = 20.0
LIMIT_S: Final = 30.0
"""Of the request: the answer's own time, and that of a driver that does not even say that it is late."""


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the page sends."""

    command: SwitchPolicy | PauseGrants | ResumeGrants | SaveCheckpoint | StopRun


def tell_run(folder: Path, told: Told) -> CommandAnswer:
    """Send it, and wait for what the run answers.

    Raises:
        UserFault: the run does not go on, on this machine at least.
    """
    return send_command(folder, told.command, ANSWER_S)
