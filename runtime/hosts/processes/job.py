"""What the launcher and the driver tell each other.

```
launcher ── DriverJob in a frame, then nothing until the end ──► driver's stdin
driver ── DriverReady, then DriverEnd, one JSON object a line ──► a pipe to the launcher
```
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from penstock.backends.processes.frames import READ_BYTES, FrameReader, frame
from penstock.messages.base import Value
from penstock.runtime.hosts.processes.ports import FIRST_EPOCH, OutcomeKind
from penstock.runtime.scenario import Scenario

RUN_ID_VARIABLE: Final = "PENSTOCK_RUN_ID"
"""In the environment of every process of a run but its launcher."""
RUN_FOLDER_VARIABLE: Final = "PENSTOCK_RUN_FOLDER"
"""Beside it: runs of different folders may have one name."""
ACTOR_VARIABLE: Final = "PENSTOCK_ACTOR"
"""Beside these, in the environment of what an actor has started: its name."""
STORY_PIPE_VARIABLE: Final = "PENSTOCK_STORY_PIPE"
"""Number of the descriptor that the driver writes to."""


def run_variables(run_id: str, run_folder: str) -> dict[str, str]:
    """What marks what a process of this run starts."""
    return {RUN_ID_VARIABLE: run_id, RUN_FOLDER_VARIABLE: run_folder}


class DriverJob(Value, frozen=True, kw_only=True):
    """One run, as the driver gets it."""

    run_id: str
    run_folder: str
    """Absolute."""
    temp_folder: str
    """Temporary folder for an embedded Ray."""
    scenario: Scenario
    """Resolved."""
    scenario_path: str = ""
    """The file that the scenario came from."""
    wiring: str = "penstock.runtime.run.wiring"
    """Module that says what the actors are."""
    names: tuple[str, ...] = ()
    """Every actor; empty takes those of the scenario."""
    plan: bytes | None = None
    """The wiring's ``RunPlan`` as msgpack; None prepares one from the scenario."""
    first_epoch: int = FIRST_EPOCH
    """Of every actor. Above all epochs of earlier drives of this run."""
    started_unix_s: float | None = None
    """When the first drive of this run began; None: now."""
    command: str = ""
    """The command that started the run, as a shell reads it."""


class DriverReady(Value, frozen=True, tag=True):
    """The supervisor runs: from here on the driver knows what to do about a signal."""


class DriverEnd(Value, frozen=True, kw_only=True, tag=True):
    """How the run ended."""

    kind: OutcomeKind
    story: str
    exit_code: int


DriverWord = DriverReady | DriverEnd


def write_job(descriptor: int, job: DriverJob) -> None:
    """Write a job whole."""
    data = frame([job])
    while data:
        data = data[os.write(descriptor, data) :]


def read_job(descriptor: int) -> DriverJob:
    """Read a job, behind which nothing comes.

    Raises:
        EOFError: whoever was to write it is gone.
    """
    reader = FrameReader(msgspec.msgpack.Decoder(list[DriverJob]))
    while data := os.read(descriptor, READ_BYTES):
        for job in reader.feed(data):
            return job
    raise EOFError("the job was cut off")
