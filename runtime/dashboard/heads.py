"""What stands above every view: which runs are shown, and how they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.dashboard.book import book_of
from penstock.runtime.launch.runs import RECORD_NAME, read_record
from penstock.runtime.launch.status import RunState, state_of
from penstock.runtime.observability.facts import STARTS_FILE, read_starts
from penstock.runtime.observability.figures import REWARD
from penstock.runtime.observability.operations import pause_in_force, policy_in_force, read_operations
from penstock.runtime.observability.summary import SUMMARY_FILE, read_summary
from penstock.runtime.observability.trackers import METRICS_FILE
from penstock.runtime.safe_text import terminal_lines, terminal_text

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.runtime.observability.facts import RunFacts

HEAD_FILES: Final = (RECORD_NAME, SUMMARY_FILE, METRICS_FILE, STARTS_FILE)


class RunHead(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one moment."""

    name: str
    """Of its folder."""
    state: RunState
    version: int
    num_steps: int | None
    reward: float | None
    policy: str
    model: str
    began_at: float
    """Unix time, seconds."""
    at_s: float | None
    """When its newest step was reported, in seconds since its start."""
    story: str
    """Why it ended; empty while it runs, and where nobody could say."""


def head_of(folder: Path) -> RunHead:
    """How the run of this folder stands.

    Raises:
        UserFault: the folder holds no run, or a file is damaged.
    """
    record, starts, steps = read_record(folder), read_starts(folder), book_of(folder).steps()
    state, last = state_of(folder, record), steps[-1] if steps else None
    summary = None if state == "running" else read_summary(folder)
    facts = starts[-1].facts if starts else None
    return RunHead(
        name=terminal_text(folder.name),
        state=state,
        version=0 if last is None else last.version,
        num_steps=last.num_steps if last else facts.num_steps if facts else None,
        reward=None if last is None else last.metrics.get(REWARD),
        policy=terminal_text(_policy(folder, facts)) if facts else "",
        model=f"model {terminal_text(facts.model)}" if facts else "",
        began_at=record.began_at,
        at_s=None if last is None else last.at_s,
        story="" if summary is None else terminal_lines(summary.story),
    )


def _policy(folder: Path, facts: RunFacts) -> str:
    """That new grants follow now, and whether there are any."""
    operations = read_operations(folder)
    now = policy_in_force(operations)
    name, bound = (facts.policy, facts.staleness_bound) if now is None else (now.policy, now.max_staleness)
    switched = "" if now is None else f", since version {now.version}"
    paused = "" if pause_in_force(operations) is None else "; new grants are paused"
    return f"{name}, staleness at most {bound}{switched}{paused}"
