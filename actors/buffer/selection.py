"""Which ready groups make the next batch: the look-ahead rule.

A batch may be taken at ``v`` only if afterwards, for every ``d ≥ v``, at most ``(d − v)·B`` outstanding groups, ready
or not, have a deadline ``≤ d``. Then no group is ever left over when its deadline comes (``docs/staleness.md`` has the
proof, and the schedule that breaks the plain rule "earliest deadline first").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.actors.buffer.policies import RankedGroup


def forced_counts(outstanding: Mapping[int, int], *, version: int, groups_per_batch: int) -> list[tuple[int, int]]:
    """For each deadline, ascending, how many groups with that deadline or an earlier one this batch has to take.

    Args:
        outstanding: groups that are in no batch, ready or not, counted by deadline.
        version: v, at which the batch is taken.
        groups_per_batch: B.
    """
    forced: list[tuple[int, int]] = []
    total = 0
    for deadline in sorted(outstanding):
        total += outstanding[deadline]
        excess = total - max(0, deadline - version) * groups_per_batch
        forced.append((deadline, max(0, excess)))
    return forced


def is_possible(forced: Sequence[tuple[int, int]], ready: Mapping[int, int], *, num_places: int) -> bool:
    """Whether the ready groups (counted by deadline) fill the places and cover what is forced."""
    if sum(ready.values()) < num_places:
        return False
    covered = 0
    deadlines = iter(sorted(ready))
    pending = next(deadlines, None)
    for deadline, need in forced:
        while pending is not None and pending <= deadline:
            covered += ready[pending]
            pending = next(deadlines, None)
        if need > min(covered, num_places):
            return False
    return True


def select(
    groups: Sequence[RankedGroup], forced: Sequence[tuple[int, int]], *, num_places: int
) -> list[RankedGroup] | None:
    """The batch: groups in rank order, each taken only if the places that remain suffice for what is still forced.

    Args:
        groups: the ready groups in rank order.
        forced: of :func:`forced_counts`.
        num_places: size of the batch.

    Returns:
        The batch in rank order, or None when no allowed batch exists.
    """
    batch: list[RankedGroup] = []
    taken = [0] * len(forced)
    for group in groups:
        if len(batch) == num_places:
            break
        places_left = num_places - len(batch) - 1
        counts = [index for index, (deadline, _) in enumerate(forced) if deadline >= group.deadline_version]
        for index in counts:
            taken[index] += 1
        if all(need - taken[index] <= places_left for index, (_, need) in enumerate(forced)):
            batch.append(group)
        else:
            for index in counts:
                taken[index] -= 1
    complete = len(batch) == num_places and all(need <= taken[i] for i, (_, need) in enumerate(forced))
    return batch if complete else None


def surplus(
    outstanding: Mapping[int, int], *, version: int, groups_per_batch: int, over_sampling: float = 1.0
) -> list[tuple[int, int]]:
    """For each deadline, ascending, how many more groups with that deadline or an earlier one there are than can still
    be trained in time, times ``over_sampling``, when the next batch is taken at ``version``."""
    found: list[tuple[int, int]] = []
    total = 0
    for deadline in sorted(outstanding):
        total += outstanding[deadline]
        room = math.ceil(max(0, deadline - version + 1) * groups_per_batch * over_sampling)
        if total > room:
            found.append((deadline, total - room))
            total = room
    return found
