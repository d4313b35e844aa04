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


class Expiry(Value, frozen=True):
    """Why groups are given up, and as what."""

    state: TerminalState
    cause: str
    is_requeued: bool = False


def expired(
    table: GroupTable, policy: StalenessPolicy, pacing: PacingSettings, *, version: int, has_open_batch: bool
) -> tuple[Expiry, list[TrackedGroup]]:
    """The groups that can no longer be trained in time. Under plain ``wait`` there never are any."""
    match policy.on_stale:
        case OnStale.DROP | OnStale.REQUEUE:
            again = policy.on_stale is OnStale.REQUEUE
            return Expiry(TerminalState.STALE, "past_deadline", again), table.past_deadline(version)
        case OnStale.MASK:
            oldest_trained = version - policy.max_staleness
            return Expiry(TerminalState.STALE, "fully_masked"), table.fully_older_than(oldest_trained)
        case OnStale.WAIT:
            found: list[TrackedGroup] = []
            if pacing.over_sampling > 1.0 and not has_open_batch:
                found = _surplus_groups(table, pacing, version=version)
            return Expiry(TerminalState.CANCELLED, "surplus"), found


def _surplus_groups(table: GroupTable, pacing: PacingSettings, *, version: int) -> list[TrackedGroup]:
    """What over-sampling has granted beyond what can still be trained: the first that are ready are kept."""
    chosen: dict[int, TrackedGroup] = {}
    batch = pacing.groups_per_batch
    for deadline, number in surplus(table.unleased_by_deadline, version=version, groups_per_batch=batch):
        candidates = (t for t in table.last_to_keep(deadline) if t.group_id not in chosen)
        for _, tracked in zip(range(number), candidates, strict=False):
            chosen[tracked.group_id] = tracked
    return list(chosen.values())
