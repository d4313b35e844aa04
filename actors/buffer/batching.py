"""Which groups make a batch now, and which can no longer be in any: looks at the table, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.buffer.policies import ranked
from penstock.actors.buffer.selection import forced_counts, is_possible, select, surplus
from penstock.messages.base import Value
from penstock.messages.samples import TerminalState
from penstock.messages.training import OnStale

if TYPE_CHECKING:
    from penstock.actors.buffer.pacing import PacingSettings
    from penstock.actors.buffer.policies import StalenessPolicy
    from penstock.actors.buffer.table import GroupTable, TrackedGroup


def form_batch(
    table: GroupTable, policy: StalenessPolicy, pacing: PacingSettings, *, version: int, is_exhausted: bool
) -> list[int] | None:
    """Group ids of the next batch in rank order, or None when no allowed one exists.

    ``is_exhausted``: nothing more can be granted, so the last batch may be short.
    """
    num_places = pacing.groups_per_batch
    if is_exhausted:
        num_places = min(num_places, table.num_unleased)
    if num_places == 0 or table.num_ready < num_places:
        return None
    looks_ahead = policy.on_stale is OnStale.WAIT and pacing.over_sampling == 1.0
    forced = (
        forced_counts(table.unleased_by_deadline, version=version, groups_per_batch=pacing.groups_per_batch)
        if looks_ahead
        else []
    )
    if not is_possible(forced, table.ready_by_deadline, num_places=num_places):
        return None
    batch = select(ranked(policy, table.ready_groups()), forced, num_places=num_places)
    return None if batch is None else [group.group_id for group in batch]


def places_to_fill(table: GroupTable, pacing: PacingSettings, *, version: int) -> int:
    """How many places of the next batch groups that were trained before may take, beside all that are ready; 0: none.

    The look-ahead rule holds for what was not trained yet, whatever the policy does about stale groups, and the end of
    the run is a deadline too: no group that is on its way gets too old, or is left over, because others come twice.
    """
    num_ready, size = table.num_ready, pacing.groups_per_batch
    forced = forced_counts(table.unleased_by_deadline, version=version, groups_per_batch=size)
    num_left = max(0, pacing.num_steps - version - 1) * size
    is_in_time = table.num_unleased - num_ready <= num_left
    is_allowed = is_in_time and is_possible(forced, table.ready_by_deadline, num_places=num_ready)
    return max(0, size - num_ready) if is_allowed else 0


class Expiry(Value, frozen=True):
    """Why groups are given up, and as what."""

    state: TerminalState
    cause: str
    is_requeued: bool = False


def expired(
    table: GroupTable, policy: StalenessPolicy, pacing: PacingSettings, *, version: int, taken_at: int
) -> tuple[Expiry, list[TrackedGroup]]:
    """The groups that are given up now. Under plain ``wait`` there never are any.

    Args:
        table: all outstanding groups.
        policy: says what becomes of stale groups.
        pacing: says how large a batch is and how many groups compete for a place.
        version: v.
        taken_at: the version at which the next batch is taken; v + 1 while one is out.
    """
    match policy.on_stale:
        case OnStale.DROP | OnStale.REQUEUE:
            again = policy.on_stale is OnStale.REQUEUE
            return Expiry(TerminalState.STALE, "past_deadline", again), table.past_deadline(version)
        case OnStale.MASK:
            return Expiry(TerminalState.STALE, "fully_masked"), table.fully_older(version, policy.max_staleness)
        case OnStale.WAIT:
            found: list[TrackedGroup] = []
            if pacing.over_sampling > 1.0:
                found = unfit(table, pacing, taken_at=taken_at)
            return Expiry(TerminalState.CANCELLED, "surplus"), found


def unfit(table: GroupTable, pacing: PacingSettings, *, taken_at: int) -> list[TrackedGroup]:
    """The groups beyond those (times over-sampling) that can be trained in time when the next batch is taken at
    ``taken_at``. What is ready is kept before what is not, the earlier issued before the later."""
    chosen: dict[int, TrackedGroup] = {}
    found = surplus(
        table.unleased_by_deadline,
        version=taken_at,
        groups_per_batch=pacing.groups_per_batch,
        over_sampling=pacing.over_sampling,
    )
    for deadline, number in found:
        candidates = (t for t in table.last_to_keep(deadline) if t.group_id not in chosen)
        for _, tracked in zip(range(number), candidates, strict=False):
            chosen[tracked.group_id] = tracked
    return list(chosen.values())
