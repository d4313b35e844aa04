"""What follows from the books: the next grants, the next batch, and what can no longer be trained. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.buffer.batching import expired, form_batch, places_to_fill
from penstock.actors.buffer.grants import groups_of
from penstock.actors.buffer.pacing import bound, num_grantable
from penstock.actors.buffer.policies import BufferState, ranked
from penstock.actors.buffer.report import closed_ends
from penstock.actors.buffer.table import Status
from penstock.messages.ledger import BatchLeased, GroupClosed, GroupsGranted, RowsRecorded
from penstock.messages.training import OnStale

if TYPE_CHECKING:
    from penstock.actors.buffer.books import Books
    from penstock.actors.buffer.pacing import AutoTarget
    from penstock.actors.buffer.table import TrackedGroup
    from penstock.messages.flow import GroupRejected
    from penstock.messages.samples import TerminalState


def bound_of(books: Books) -> int:
    """The most groups that may be outstanding now."""
    return bound(
        announced=books.announced or 0,
        taken_at=books.taken_at,
        num_leased=books.table.num_leased,
        max_staleness=books.policy.max_staleness,
        settings=books.settings.pacing,
    )


def next_grants(books: Books, target: AutoTarget) -> list[GroupsGranted]:
    """The grants that may be made now."""
    if books.announced is None or books.is_paused:
        return []
    number = num_grantable(
        limit=_limit(books, target),
        outstanding=books.table.num_outstanding,
        in_generation=books.table.num_in_generation,
        trained=books.num_trained_groups + (0 if books.open_lease is None else len(books.open_lease.again)),
        num_left=books.grants.num_left,
        settings=books.settings.pacing,
    )
    number = books.goal.num_grantable(books, number)
    eta = books.policy.max_staleness
    spans = books.grants.next_spans(number, min_version=books.announced, deadline_version=books.announced + eta)
    return [GroupsGranted(span=span, total=span.first_group + span.num_groups, max_staleness=eta) for span in spans]


def _limit(books: Books, target: AutoTarget) -> int:
    """How many groups may be outstanding: the policy's target, cut at the bound, never below one batch."""
    pacing, table = books.settings.pacing, books.table
    view = BufferState(
        version=books.version,
        announced_version=books.announced or 0,
        groups_per_batch=pacing.groups_per_batch,
        outstanding=table.num_outstanding,
        ready=table.num_ready,
        target_outstanding=pacing.target_outstanding or target.value,
    )
    wanted = max(books.policy.target(view), pacing.groups_per_batch)
    return min(int(wanted * pacing.over_sampling), bound_of(books))


def formed_lease(books: Books) -> BatchLeased | None:
    """The batch of ready groups that makes the next version, or else of these and used ones; None when no allowed one
    exists."""
    pacing, used = books.settings.pacing, books.used
    formed = form_batch(books.table, books.policy, pacing, version=books.version, is_exhausted=books.is_exhausted)
    again: list[int] = []
    if formed is None:
        formed, again = _filled(books)
        if not again:
            return None
    masks = books.policy.on_stale is OnStale.MASK  # one mask for the whole batch: that of the strictest grant
    bounds = [books.table.tracked(group_id).max_staleness for group_id in formed] + list(map(used.max_staleness, again))
    takes_all = books.is_exhausted and books.table.num_unleased == len(formed)
    return BatchLeased(
        version=books.version + 1,
        group_ids=(*formed, *again),
        max_staleness=min(bounds) if masks else max(bounds),
        mask_stale=masks,
        mask_old_tokens=books.settings.mask_old_tokens,
        update_mode=books.policy.update_mode,
        is_last=books.version + 1 == pacing.num_steps or takes_all,
        uses=(*[1] * len(formed), *map(used.next_use, again)) if again else (),
        max_uses=books.settings.max_uses,
    )


def _filled(books: Books) -> tuple[list[int], list[int]]:
    """The groups that are ready, and used ones for the other places; no used ones where that makes no whole batch."""
    if books.settings.max_uses == 1:
        return [], []
    number = places_to_fill(books.table, books.settings.pacing, version=books.version)
    usable = books.used.usable(books.version, books.policy.max_staleness)
    ready = [group.group_id for group in ranked(books.policy, books.table.ready_groups())]
    return ready, usable[:number] if len(usable) >= number else []


def rows_again(books: Books, grants: list[GroupsGranted]) -> list[RowsRecorded]:
    """A prompt that is granted anew keeps its row."""
    if not books.settings.chooses_rows:
        return []
    places = [place for grant in grants for place in groups_of(grant.span)]
    rows = tuple(row for place in places if (row := books.history.again(*place)) is not None)
    return [RowsRecorded(rows=rows)] if rows else []


def rows_by_place(books: Books) -> list[RowsRecorded]:
    """The first rows of a run that goes on with chosen ones: groups that are outstanding keep those of their places."""
    if not books.history.begins:
        return []
    without = (tracked for tracked in books.table.outstanding() if tracked.status is Status.GRANTED)
    return [RowsRecorded(rows=books.history.by_place(without))]


def is_kept(books: Books, event: GroupRejected) -> bool:
    """Whether a group that the Filter turned away is admitted all the same: enough others were, or the dataset ends and
    its last batch would lack this one."""
    after, size = books.settings.keep_after_batches, books.settings.groups_per_batch
    if after is None or event.group is None:
        return False
    if books.rejections.num_since_progress >= after * size:
        return True
    return books.is_exhausted and books.table.num_unleased <= size


def closing(books: Books, tracked: TrackedGroup, state: TerminalState, cause: str) -> GroupClosed:
    """The entry for a group that is given up."""
    ended = closed_ends(tracked, state, cause, samples_per_group=books.settings.samples_per_group)
    return GroupClosed(group_id=tracked.group_id, ended=ended)


def expiring(books: Books) -> list[GroupClosed]:
    """The entries for the groups that can no longer be trained in time."""
    if not books.goal.keeps_deadlines:
        return []
    expiry, found = expired(
        books.table, books.policy, books.settings.pacing, version=books.version, taken_at=books.taken_at
    )
    entries: list[GroupClosed] = []
    for tracked in found:
        entry = closing(books, tracked, expiry.state, expiry.cause)
        again = expiry.is_requeued and books.grants.may_requeue(tracked.ordinal)
        entries.append(GroupClosed(group_id=entry.group_id, ended=entry.ended, is_requeued=again))
    return entries
