"""Whether the snapshot of the Buffer's books says what the log says, up to the entry that it covers.

Invariant: the auditor's own books are the measure. Nothing of a snapshot enters them, nor any other verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.ledger.kept_books import read_snapshot
from penstock.backends.ledger.tables import ADMITTED, GRANTED, LEASED
from penstock.messages.training import Balance, CauseCount

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

    from penstock.backends.ledger.audit_books import AuditBooks
    from penstock.backends.ledger.audited_group import AuditedGroup
    from penstock.messages.books import BooksSnapshot


class AuditedSnapshot:
    """The one that the file has when the audit begins; a live run may replace it meanwhile."""

    def __init__(self, database: sqlite3.Connection) -> None:
        found = read_snapshot(database)
        self._sequence, self._snapshot = found.sequence, found.snapshot
        self.problem = f"the Buffer's books: {found.problem}" if found.is_wrong else ""

    def findings(self, books: AuditBooks) -> list[str]:
        """What differs, when the books have come to the entry that it covers."""
        if self._snapshot is None or books.sequence != self._sequence:
            return []
        return [
            f"the snapshot of the Buffer's books at entry {self._sequence} says of {what}: {_short(said)}; the log: "
            f"{_short(found)}"
            for what, said, found in _compared(self._snapshot, books)
            if said != found
        ]


def _compared(snapshot: BooksSnapshot, books: AuditBooks) -> Iterator[tuple[str, object, object]]:
    """What, as the snapshot has it, and as it follows from the log."""
    yield "the run", snapshot.identity, books.run
    yield "the version", snapshot.version, books.version
    yield "the announced version", -1 if snapshot.announced is None else snapshot.announced, books.announced
    yield "released payloads", snapshot.released_through, books.released_through
    checkpoints = list(books.checkpoints.items())
    kept = [(each.version, each.path) for each in snapshot.checkpoints]
    yield "checkpoints", kept, checkpoints[-max(1, len(kept)) :]
    newest = checkpoints[-1][0] if checkpoints else -1
    since = [lease for version, lease in books.leases.items() if version > newest]
    yield "leases", list(snapshot.leases), since
    yield "trained groups", snapshot.num_trained_groups, sum(len(step.group_ids) for _, step in books.steps.values())
    receipts = (step.max_staleness for _, step in books.steps.values())
    yield "the oldest trained token", snapshot.max_staleness_seen, max(receipts, default=0)
    pause = next(reversed(books.operator.pauses.values()), None)
    yield "the pause", snapshot.is_paused, pause is not None and pause.is_paused
    engines = next(reversed(books.operator.engines.values()), None)
    yield "the engines", snapshot.engines, () if engines is None else engines.engines
    yield "the policy", snapshot.policy, next(reversed(books.operator.policies.values()), None)
    yield "granted groups", snapshot.grants.total, len(books.groups)
    yield "granted prompts", snapshot.grants.next_ordinal, books.next_ordinal
    yield from _compared_groups(snapshot, books)
    evaluations, opened = books.evaluations, snapshot.evaluations.open
    yield "the next evaluation", snapshot.evaluations.number, len(evaluations.evaluations)
    held = evaluations.open_one
    yield "the open evaluation", opened, None if held is None else held.opened
    ended = sorted(row.group_id for row in snapshot.evaluations.rows)
    yield "its groups that have ended", ended, [] if held is None else sorted(held.digests)


def _compared_groups(snapshot: BooksSnapshot, books: AuditBooks) -> Iterator[tuple[str, object, object]]:
    is_open = (GRANTED, ADMITTED, LEASED)
    opened = {group.group_id: group for group in books.groups if group.state in is_open}
    said = {group.group_id: group for group in snapshot.groups}
    yield "open groups", sorted(said), sorted(opened)
    for group_id in sorted(said.keys() & opened.keys()):
        kept, group = said[group_id], opened[group_id]
        origin = (kept.ordinal, kept.min_version, kept.deadline_version, kept.max_staleness)
        yield f"group {group_id}", origin, group.row()[:4]
        record = kept.record
        samples = None if record is None else (record.samples, {end.key.index: end for end in record.ended})
        found = None if group.state == GRANTED else (group.notes, group.ended)
        yield f"the samples of group {group_id}", samples, found
    yield "ready groups", sorted(snapshot.ready), sorted(g for g, group in opened.items() if group.state == ADMITTED)
    unsettled = [group_id for group_id, group in opened.items() if group.state == GRANTED]
    yield "groups that are not settled", _unsettled(snapshot), unsettled
    yield "the balance", snapshot.balance, _balance(books, list(opened.values()))


def _unsettled(snapshot: BooksSnapshot) -> list[int]:
    settled = set(snapshot.settled.above)
    return [group_id for group_id in range(snapshot.settled.floor, snapshot.grants.total) if group_id not in settled]


def _balance(books: AuditBooks, opened: list[AuditedGroup]) -> Balance:
    """As the Buffer counts: the samples of a group end with it, and its replacements are issued then."""
    notes = [note for group in opened for note in group.notes]
    early = [end for group in opened for end in group.ended.values()]
    counts = {key: list(numbers) for key, numbers in books.ended.items()}
    for end in early:
        ended = counts[end.state.value, end.cause]
        for place, number in enumerate((1, end.num_tokens, end.num_given_tokens)):
            ended[place] -= number
    indices = (*(note.index for note in notes), *(end.key.index for end in early))
    return Balance(
        issued=books.issued - sum(1 for index in indices if index >= books.size),
        in_system=len(opened) * books.size + books.evaluations.num_in_system,
        ended=tuple(
            CauseCount(state=state, cause=cause, num_samples=n, num_tokens=tokens, num_given_tokens=given)
            for (state, cause), (n, tokens, given) in sorted(counts.items())
            if n
        ),
        generated_tokens=books.num_tokens,
        in_system_tokens=sum(note.num_made_tokens for note in notes) + sum(end.num_made_tokens for end in early),
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
