"""Snapshots of the books, so that a new Buffer need not read the whole ledger.

Invariants:

* Books that are restored equal those that fold every entry up to the snapshot, whatever is applied to both from there.
* There is none of books that hold what a snapshot lacks: chosen rows, groups that may be trained again, batches that
  were fixed beforehand. Such a run folds its whole ledger.
* It is taken while the run trains: at its end the books know that an evaluation is due, which no entry says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.actors.buffer.table import Status, TrackedGroup
from penstock.messages.books import BooksSnapshot, OpenGroup
from penstock.messages.ledger import BatchLeased, GroupRecorded, GroupsGranted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.actors.buffer.books import Books
    from penstock.actors.buffer.settings import BufferSettings
    from penstock.actors.buffer.table import GroupTable
    from penstock.messages.books import KeptBooks
    from penstock.messages.ledger import LedgerEntry


def snapshot_of(books: Books) -> BooksSnapshot | None:
    """The books as they stand; None where it would lack something."""
    if books.history.is_recording or books.settings.chooses_rows or len(books.used):
        return None
    if books.goal is not books.settings.goal:
        return None
    settled = books.settled.snapshot()
    return BooksSnapshot(
        settings=name_of(books.settings),
        identity=books.identity,
        policy=books.policy_recorded,
        is_paused=books.is_paused,
        version=books.version,
        announced=books.announced,
        released_through=books.released_through,
        num_trained_groups=books.num_trained_groups,
        max_staleness_seen=books.max_staleness_seen,
        leases=tuple(books.leases.values()),
        checkpoints=tuple(books.checkpoints),
        groups=tuple(map(_open_group, books.table.outstanding())),
        ready=books.table.ready_ids(),
        settled=settled,
        balance=books.accounts.balance(),
        grants=books.grants.kept(settled.floor),
        rejections=books.rejections.kept(),
        failures=books.failures.kept(),
        evaluations=books.evaluations.kept(),
        places=books.history.kept(),
        engines=books.engines,
    )


def restore(books: Books, snapshot: BooksSnapshot) -> None:
    """Bring books that are empty to where this one was taken."""
    books.identify(snapshot.identity)
    if snapshot.policy is not None:
        books.switch(snapshot.policy)
    books.is_paused = snapshot.is_paused
    books.version, books.announced = snapshot.version, snapshot.announced
    books.released_through = snapshot.released_through
    books.num_trained_groups = snapshot.num_trained_groups
    books.max_staleness_seen = snapshot.max_staleness_seen
    books.leases = {lease.version: lease for lease in snapshot.leases}
    books.open_lease = books.leases.get(snapshot.version + 1)
    books.checkpoints = list(snapshot.checkpoints)
    _fill(books.table, snapshot, books.open_lease)
    books.settled.restore(snapshot.settled)
    books.evaluations.restore(snapshot.evaluations)
    books.accounts.restore(
        snapshot.balance, num_open_groups=len(snapshot.groups), num_in_evaluation=books.evaluations.num_in_system
    )
    books.grants.restore(snapshot.grants)
    books.rejections.restore(snapshot.rejections)
    books.failures.restore(snapshot.failures)
    books.history.restore(snapshot.places)
    books.engines = snapshot.engines


def name_of(settings: BufferSettings) -> str:
    """The same for equal settings, in any process."""
    return repr(settings)


def _open_group(tracked: TrackedGroup) -> OpenGroup:
    return OpenGroup(
        tracked.group_id,
        tracked.ordinal,
        tracked.min_version,
        tracked.deadline,
        tracked.max_staleness,
        None if tracked.record is None else tracked.record.without_payload(),
    )


def _fill(table: GroupTable, snapshot: BooksSnapshot, lease: BatchLeased | None) -> None:
    """Take the steps that these groups took, each with the entry that caused it."""
    table.steps.cause = GroupsGranted
    for group in snapshot.groups:
        table.grant(
            TrackedGroup(group.group_id, group.ordinal, group.min_version, group.deadline_version, group.max_staleness)
        )
    records = {group.group_id: group.record for group in snapshot.groups if group.record is not None}
    table.steps.cause = GroupRecorded
    leased = () if lease is None else lease.group_ids
    for group_id in (*leased, *snapshot.ready):
        table.admit(records[group_id])
    table.steps.cause = BatchLeased
    table.lease(leased)
    assert all(tracked.status is not Status.GRANTED for tracked in map(table.tracked, records))


def resume(books: Books, records: Iterable[LedgerEntry], kept: KeptBooks | None) -> str:
    """Bring books that are empty to the end of the ledger, from its snapshot if that can be used; else why it cannot.

    Raises:
        UserFault: the ledger is that of another run.
    """
    snapshot, problem = (None, "") if kept is None else (kept.snapshot, kept.problem)
    if snapshot is not None and snapshot.settings != name_of(books.settings):
        snapshot, problem = None, "the scenario is another one than when their snapshot was taken"
    if kept is not None and snapshot is not None:
        restore(books, snapshot)
        records = kept.later
    for entry in records:
        books.apply(entry)
    return problem
