"""What a step waited for last: the life of the sample whose group completed its batch.

Of each step the group that was admitted last is looked up in the ledger; of its traced samples the one that came last
is followed from its grant to the end of the training. Where none of them is traced, the group before it is taken.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.runtime.observability.lives import read_fates, read_lives
from penstock.runtime.observability.spans import is_traced
from penstock.runtime.observability.traces import MAX_SEARCHED, run_salt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.runtime.observability.lives import Life
    from penstock.runtime.observability.trackers import StepRow

NUM_SLOWEST: Final = 2


class PathStage(msgspec.Struct, frozen=True, kw_only=True):
    """One stretch of time that a step had to wait for, and whose it was."""

    name: str
    actor: str
    seconds: float
    in_step_s: float
    """Of them, since the step before was done."""
    is_recorded: bool
    """False: its span was lost with an actor, and it lasted at most so long."""


class StepPath(msgspec.Struct, frozen=True, kw_only=True):
    """What one step took and waited for."""

    version: int
    step_s: float
    sample: str
    stages: tuple[PathStage, ...]
    """Of that sample; none where no sample of the batch was traced."""

    @property
    def longest(self) -> PathStage | None:
        """The stage that took most of the step."""
        return max(self.stages, key=lambda stage: stage.in_step_s, default=None)


def step_paths(
    run_folder: Path, rows: Sequence[StepRow], trace_fraction: float
) -> tuple[StepPath | None, tuple[StepPath, ...]]:
    """The path of the step of median length, and of the slowest ones.

    Args:
        run_folder: of the run.
        rows: successive steps; the first one only begins the second.
        trace_fraction: share of the groups that are traced.

    Raises:
        UserFault: the run was not traced, or a file of it is damaged.
    """
    lengths = {row.version: row.at_s - before.at_s for before, row in pairwise(rows)}
    if not lengths:
        return None, ()
    by_length = sorted(lengths, key=lambda version: lengths[version])
    typical = by_length[(len(by_length) - 1) // 2]
    middle_s = statistics.median(lengths.values())
    slowest = [version for version in by_length[: -1 - NUM_SLOWEST : -1] if lengths[version] > middle_s]
    paths = {version: _path(run_folder, version, lengths[version], trace_fraction) for version in {typical, *slowest}}
    return paths[typical], tuple(paths[version] for version in slowest)


def _path(run_folder: Path, version: int, step_s: float, trace_fraction: float) -> StepPath:
    salt = run_salt(run_folder)
    fates = read_fates(run_folder, step=version)
    traced = [fate for fate in fates if is_traced(salt, fate.group_id, trace_fraction)]
    last_ones = sorted(traced, key=lambda fate: fate.admitted_at or 0.0)[-MAX_SEARCHED:]
    lives = [life for life in read_lives(run_folder, last_ones) if life.is_traced]
    if not lives:
        return StepPath(version=version, step_s=step_s, sample="", stages=())
    last = max(lives, key=lambda life: (life.fate.admitted_at or 0.0, _arrival_ns(life)))
    return StepPath(version=version, step_s=step_s, sample=last.fate.name, stages=_stages(last, step_s))


def _arrival_ns(life: Life) -> int:
    """When it came to the Filter."""
    return max((stage.end_ns for stage in life.stages if stage.name == "score"), default=0)


def _stages(life: Life, step_s: float) -> tuple[PathStage, ...]:
    began_ns = life.end_ns - round(1e9 * step_s)
    return tuple(
        PathStage(
            name=stage.name,
            actor=stage.actor,
            seconds=stage.duration_s,
            in_step_s=max(0, stage.end_ns - max(stage.start_ns, began_ns)) / 1e9,
            is_recorded=stage.is_recorded,
        )
        for stage in life.stages
    )
