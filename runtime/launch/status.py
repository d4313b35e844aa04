"""How a run stands, from its folder: whether it is alive, how far it is, how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.runtime.launch.runs import is_alive, read_record
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.launch.runs import RunRecord


RunState = Literal["running", "completed", "failed", "stopped", "diverged", "vanished"]
"""``vanished``: its process ended without a word, as after ``kill -9``."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands at one moment."""

    name: str
    state: RunState
    version: int
    """Batches trained."""
    num_steps: int | None
    """Batches that are to be trained; None before the first one."""
    reward: float | None
    """Mean reward of the newest batch; None before the first one, and where the learner reports none."""
    began_at: float
    """Unix time in seconds, of the first drive."""
    ended_at: float | None
    """None of one that runs or vanished."""
    exit_code: int | None
    """0 completed, 1 failed, 2 the user has to change something, 130 and 143 stopped; None as above."""
    story: str
    """Why the last drive ended, in a sentence; empty while it runs, and where nobody could say."""


def state_of(folder: Path, record: RunRecord) -> RunState:
    """The state of a run by its record, and whether its process is there and drives this folder."""
    return "vanished" if record.state == "running" and not is_alive(folder, record) else record.state


def run_status(folder: Path) -> RunStatus:
    """How the run of this folder stands.

    Raises:
        UserFault: the folder holds no run, or it is damaged.
    """
    record = read_record(folder)
    state = state_of(folder, record)
    last = next(iter(read_steps(folder)[-1:]), None)
    summary = None if state == "running" else read_summary(folder)
    return RunStatus(
        name=record.name,
        state=state,
        version=0 if last is None else last.version,
        num_steps=None if last is None else last.num_steps,
        reward=None if last is None else last.metrics.get(REWARD),
        began_at=record.began_at,
        ended_at=record.ended_at,
        exit_code=record.exit_code,
        story="" if summary is None else summary.story,
    )
