"""How a run stands, from its folder: whether it is alive, how far it is, how it ended."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.runtime.launch.runs import is_alive, read_record
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.summary import read_summary
from penstock.runtime.observability.trackers import read_steps

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.launch.runs import RunRecord
    from penstock.runtime.observability.trackers import StepRow


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
    driven_s: float | None
    """Seconds in which somebody drove it, up to now or its end: without the time between a drive and its resumption.
    None of one that vanished."""
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
    steps = read_steps(folder)
    last = steps[-1] if steps else None
    summary = None if state == "running" else read_summary(folder)
    until = time.time() if state == "running" else record.ended_at
    return RunStatus(
        name=record.name,
        state=state,
        version=0 if last is None else last.version,
        num_steps=None if last is None else last.num_steps,
        reward=None if last is None else last.metrics.get(REWARD),
        began_at=record.began_at,
        ended_at=record.ended_at,
        driven_s=None if until is None else until - record.started_at + _earlier_s(record, steps),
        exit_code=record.exit_code,
        story="" if summary is None else summary.story,
    )


def _earlier_s(record: RunRecord, steps: Sequence[StepRow]) -> float:
    """Seconds that the drives before this one took; of one that vanished, up to its last step."""
    begins = (*(drive.started_at for drive in record.earlier), record.started_at)
    ends = [record.began_at + row.at_s for row in steps]
    return sum(
        (drive.ended_at or max((end for end in ends if begin < end < after), default=begin)) - begin
        for drive, (begin, after) in zip(record.earlier, pairwise(begins), strict=True)
    )
