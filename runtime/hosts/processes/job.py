"""What the launcher and the driver tell each other.

```
launcher ── DriverJob, msgpack with its length before it, then nothing until the end ──► driver's stdin
driver ── DriverReady, then DriverEnd, one JSON object a line ──► a pipe to the launcher
```
"""

from __future__ import annotations

import os
import struct
from typing import Final

import msgspec

from penstock.messages.base import Value
from penstock.runtime.hosts.processes.ports import FIRST_EPOCH, OutcomeKind
from penstock.runtime.scenario import Scenario

RUN_ID_VARIABLE: Final = "PENSTOCK_RUN_ID"
"""In the environment of every process of a run but its launcher."""
RUN_FOLDER_VARIABLE: Final = "PENSTOCK_RUN_FOLDER"
"""Beside it: runs of different folders may have one name."""
STORY_PIPE_VARIABLE: Final = "PENSTOCK_STORY_PIPE"
"""Number of the descriptor that the driver writes to."""
_LENGTH: Final = struct.Struct("<I")


class DriverJob(Value, frozen=True, kw_only=True):
    """One run, as the driver gets it."""

    run_id: str
    run_folder: str
    """Absolute."""
    temp_folder: str
    """For an embedded Ray."""
    scenario: Scenario
    """Resolved."""
    scenario_path: str = ""
    """Where it came from."""
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
    """What started it, as a shell reads it."""


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
    data = msgspec.msgpack.encode(job)
    data = _LENGTH.pack(len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def read_job(descriptor: int) -> DriverJob:
    """Read a job; what comes behind it stays unread.

    Raises:
        EOFError: whoever was to write it is gone.
    """
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    return msgspec.msgpack.decode(_read(descriptor, length), type=DriverJob)


def _read(descriptor: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = os.read(descriptor, length - len(data))
        if not more:
            raise EOFError("the job was cut off")
        data += more
    return data
