"""The audit of a ledger file: the log folded by the auditor's own books, and everything else compared with it.

Invariants:

* It only reads, and in short transactions: the writer of a live run is never held up, and its write-ahead log is held
  back from truncation for a page at a time.
* Log and tables are compared within one snapshot, whatever the writer does meanwhile.
* A ledger that cannot be read is an error; one that can be read and is wrong is a report with findings.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.backends.learners.checkpoints.names import CHECKPOINTS, checkpoint_in, is_of_a_run
from penstock.backends.ledger.audit_books import AuditBooks
from penstock.backends.ledger.audited_evaluations import AuditedEvaluation, EvaluatedSampleRow, digest_of
from penstock.backends.ledger.audited_group import AuditedGroup, Finding, digest
from penstock.backends.ledger.audited_snapshot import AuditedSnapshot
from penstock.backends.ledger.sqlite import SqliteReader
from penstock.backends.ledger.tables import LEASED, TABLES_SINCE, TRAINED
from penstock.messages.base import UNREADABLE
from penstock.messages.samples import Group, evaluation_group_id, group_name
from penstock.messages.training import Balance, CauseCount

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

GROUPS_A_PAGE: Final = 1000
ENTRIES_A_PAGE: Final = 1000
MODELLED: Final = "simulated/"
"""Begins the path of a checkpoint of the simulated learner, which keeps no weights."""

_GROUPS: Final = (
    "SELECT group_id, state, ordinal, min_version, deadline_version, max_staleness, is_requeued, version, position "
    "FROM groups WHERE group_id >= ? AND group_id < ? ORDER BY group_id"
)
_SAMPLES: Final = (
    "SELECT group_id, sample_index, attempt, engine, outcome, num_tokens, oldest_version, newest_version, reward, "
    "state, cause, version FROM samples WHERE group_id >= ? AND group_id < ? ORDER BY group_id, sample_index"
)
_SMALL_TABLES: Final = {
    "run": "SELECT seed, num_rows, shuffle, samples_per_group, groups_per_batch FROM run",
    "batches": "SELECT version, state, num_groups, max_staleness, mask_stale, update_mode, is_last FROM batches",
    "steps": "SELECT version, sequence, num_groups, num_trained_tokens, num_masked_tokens, max_staleness FROM steps",
    "checkpoints": "SELECT version, path, is_kept FROM checkpoints",
    "versions": "SELECT version FROM versions",
    "policies": "SELECT sequence, policy, max_staleness, update_mode, on_stale FROM policies",
    "pauses": "SELECT sequence, is_paused FROM pauses",
    "engines": "SELECT sequence, names FROM engines",
    "reuses": "SELECT group_id, use, version, position, max_uses FROM reuses",
    "evaluations": "SELECT number, version, is_pinned, state, num_groups, num_samples, num_ended FROM evaluations",
}

_EVALUATED: Final = (
    "SELECT group_id, evaluation, dataset, dataset_name, row_number, num_samples, state FROM evaluation_groups "
    "WHERE group_id <= ? AND group_id > ?"
)
_EVALUATED_SAMPLES: Final = (
    "SELECT group_id, sample_index, attempt, engine, outcome, num_tokens, num_given_tokens, oldest_version, "
    "newest_version, reward, state, cause FROM samples WHERE group_id <= ? AND group_id > ? "
    "ORDER BY group_id, sample_index"
)

Row = tuple[int | float | str | None, ...]


class CheckpointFact(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that the run can be resumed from."""

    version: int
    path: str
    place: Literal["on disk", "modelled", "in another run's folder", "missing"]


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a ledger says, and what is wrong with it."""

    path: str
    num_entries: int
    epochs: tuple[int, ...]
    """Incarnations of the Buffer that have claimed it."""
    balance: Balance
    in_system_tokens: int
    """That the model made, of the admitted samples that have not ended."""
    num_trained_tokens: int
    """Tokens with a loss that were trained, by the receipts."""
    num_masked_tokens: int
    """Too old for a loss, by the receipts."""
    num_given_tokens: int
    """In trained samples, and not made by the model."""
    num_groups: dict[str, int]
    """Groups by state."""
    num_pushed: int
    """That came in and were made outside."""
    evaluated_versions: tuple[int, ...]
    """That evaluations were asked for, ascending."""
    is_evaluating: bool
    """The last of them is not done."""
    version: int
    announced_version: int
    """−1: none."""
    leased_version: int | None
    """Version of the batch that is out; None: none is."""
    max_staleness: int
    """The oldest trained token, in versions."""
    checkpoints: tuple[CheckpointFact, ...]
    """Ascending."""
    released_through: int
    num_payloads: int
    findings: tuple[Finding, ...]

    @property
    def is_clean(self) -> bool:
        return not self.findings


def audit_ledger(path: Path) -> AuditReport:
    """Audit the ledger in this file; also while it is being written.

    Raises:
        LedgerStoreError: it cannot be read.
    """
    auditor = _Auditor(path)
    try:
        return auditor.report()
    finally:
        auditor.close()


class _Auditor(SqliteReader):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path
        self._books = AuditBooks()
        self._found: list[Finding] = []
        """Beside those of the books."""
        self._num_given = 0
        self._snapshot: AuditedSnapshot | None = None

    def report(self) -> AuditReport:
        with self._named("read"):
            self._open_snapshot()
            while self._catch_up():
                pass
            if self._books.num_entries and self._books.run is None:
                return self._report((), (), 0)  # nothing follows from such a log
            self._compare_groups()
            self._compare_evaluations()
            payload_ids, checkpoints, epochs = self._compare_the_rest()
            self._read_payloads(payload_ids)
            self._check_tokens()
        facts = tuple(self._locate(version, path) for version, path in sorted(checkpoints.items()))
        self._miss_checkpoints(facts)
        return self._report(facts, epochs, len(payload_ids))

    def _catch_up(self) -> int:
        """Enter one page of what has been written since; how many entries that was."""
        query = "SELECT sequence, epoch, kind, body FROM entries WHERE sequence > ? ORDER BY sequence LIMIT ?"
        rows = self._database.execute(query, (self._books.sequence, ENTRIES_A_PAGE)).fetchall()
        for sequence, epoch, kind, body in rows:
            self._books.apply(sequence, epoch, self._entry(sequence, kind, body))
            for text in () if self._snapshot is None else self._snapshot.findings(self._books):
                self._find(text)
        return len(rows)

    def _open_snapshot(self) -> None:
        (form,) = self._database.execute("PRAGMA user_version").fetchone()
        if form >= TABLES_SINCE["snapshot"]:
            with self._transaction("BEGIN"):
                self._snapshot = AuditedSnapshot(self._database)
            if self._snapshot.problem:
                self._find(self._snapshot.problem)

    # --- tables -----------------------------------------------------------------------------------------------

    def _compare_groups(self) -> None:
        first = 0
        while first < len(self._books.groups):
            with self._transaction("BEGIN"):
                while self._catch_up():
                    pass
                self._compare_page(first, first + GROUPS_A_PAGE)
            first += GROUPS_A_PAGE

    def _compare_page(self, first: int, end: int) -> None:
        samples: dict[int, list[Row]] = {}
        for group_id, *row in self._database.execute(_SAMPLES, (first, end)):
            samples.setdefault(group_id, []).append(tuple(row))
        rows = {row[0]: row for row in self._database.execute(_GROUPS, (first, end))}
        for group in self._books.groups[first:end]:
            row, its_samples = rows.get(group.group_id), samples.get(group.group_id, [])
            if row is None:
                self._find(f"the table of groups lacks group {group.group_id}, which was granted")
            elif digest(row[1], row[2:], its_samples) != self._books.digest_of(group):
                self._find(_difference(group, row[1], row[2:], its_samples))

    def _compare_evaluations(self) -> None:
        """One evaluation at a time, within a snapshot each."""
        for number in range(len(self._books.evaluations.evaluations)):
            with self._transaction("BEGIN"):
                while self._catch_up():
                    pass
                self._compare_evaluation(self._books.evaluations.evaluations[number])

    def _compare_evaluation(self, audited: AuditedEvaluation) -> None:
        opened = audited.opened
        first = evaluation_group_id(opened.first_place)
        span = (first, first - opened.num_groups)
        samples: dict[int, list[EvaluatedSampleRow]] = {}
        for group_id, *row in self._database.execute(_EVALUATED_SAMPLES, span):
            samples.setdefault(group_id, []).append(tuple(row))
        rows = {row[0]: row[1:] for row in self._database.execute(_EVALUATED, span)}
        for group_id, expected in audited.digests_by_group():
            if group_id not in rows:
                self._find(f"the table of evaluation_groups lacks group {group_name(group_id)} of an open evaluation")
            elif digest_of(rows[group_id], samples.get(group_id, [])) != expected:
                said = (rows[group_id], samples.get(group_id, []))
                self._find(f"the tables say {said} of group {group_name(group_id)}, which is not what the log says")

    def _compare_the_rest(self) -> tuple[set[int], dict[int, str], tuple[int, ...]]:
        """The tables that are small, within one snapshot. Returns the payloads and checkpoints that are needed in it,
        and who claimed the ledger."""
        execute, books = self._database.execute, self._books
        with self._transaction("BEGIN"):
            while self._catch_up():
                pass
            expected = _small_tables(books)
            (form,) = execute("PRAGMA user_version").fetchone()
            for name, query in _SMALL_TABLES.items():
                if TABLES_SINCE.get(name, form) > form:
                    continue
                self._compare_rows(name, set(execute(query)), set(expected[name]))
            total, least = len(books.groups), evaluation_group_id(books.evaluations.num_places - 1)
            for name, floor in (("groups", 0), ("samples", least), ("evaluation_groups", least)):
                query = f"SELECT DISTINCT group_id FROM {name} WHERE group_id < ? OR group_id >= ?"
                for (group_id,) in execute(query, (floor, 0 if name == "evaluation_groups" else total)):
                    self._find(f"the table of {name} has group {group_name(group_id)}, which was never granted")
            needed, kept = books.payload_ids(), {row[0] for row in execute("SELECT group_id FROM payloads")}
            epochs = tuple(row[0] for row in execute("SELECT epoch FROM claims ORDER BY epoch"))
        for group_id in sorted(needed - kept):
            self._find(f"the payload of group {group_id} is gone, and the group may have to be trained")
        for group_id in sorted(kept - needed):
            self._find(f"the payload of group {group_id} is there, and nothing can need it")
        if books.epoch > max(epochs, default=-1):
            self._find(f"epoch {books.epoch} wrote entries and never claimed the ledger")
        return needed & kept, books.resumable(), epochs

    def _compare_rows(self, name: str, found: set[Row], expected: set[Row]) -> None:
        for row in sorted(expected - found, key=repr):
            self._find(f"the table of {name} lacks {row}, which follows from the log")
        for row in sorted(found - expected, key=repr):
            self._find(f"the table of {name} has {row}, which does not follow from the log")

    # --- payloads, tokens, files ------------------------------------------------------------------------------

    def _read_payloads(self, group_ids: Iterable[int]) -> None:
        """Each can be read and has the samples that the log says. One that has been released since is skipped."""
        for group_id in sorted(group_ids):
            with self._transaction("BEGIN"):
                row = self._database.execute("SELECT body FROM payloads WHERE group_id = ?", (group_id,)).fetchone()
                query = (
                    "SELECT sample_index, num_tokens FROM samples WHERE group_id = ? AND (state IS NULL OR state = ?) "
                    "ORDER BY sample_index"
                )
                expected = self._database.execute(query, (group_id, TRAINED)).fetchall()
            if row is None:
                continue
            try:
                group = msgspec.msgpack.decode(row[0], type=Group)
            except UNREADABLE as error:
                self._find(f"the payload of group {group_id} cannot be read: {error}")
                continue
            found = sorted((sample.key.index, sample.num_tokens) for sample in group.samples)
            if group.group_id != group_id or found != expected:
                self._find(f"the payload of group {group_id} is another one: it has {found}, the log says {expected}")

    def _check_tokens(self) -> None:
        """What a receipt does not name must be tokens that the model did not make."""
        query = "SELECT coalesce(sum(num_given_tokens), 0) FROM samples WHERE group_id = ? AND state = ?"
        for version, num_missing in self._books.untrained_tokens.items():
            sequence, step = self._books.steps[version]
            given = sum(self._database.execute(query, (group_id, TRAINED)).fetchone()[0] for group_id in step.group_ids)
            self._num_given += given
            if given != num_missing:
                named = step.num_trained_tokens + step.num_masked_tokens
                self._find(
                    f"the receipt of version {version} names {named} tokens, its samples have {named + num_missing}; "
                    f"the model did not make {given} of them",
                    sequence,
                )

    def _locate(self, version: int, recorded: str) -> CheckpointFact:
        if recorded.startswith(MODELLED):
            return CheckpointFact(version=version, path=recorded, place="modelled")
        run_folder = self._file.parent
        found = checkpoint_in(run_folder / CHECKPOINTS, recorded)
        if not found.exists():
            found = run_folder / recorded
        if not found.exists():
            return CheckpointFact(version=version, path=recorded, place="missing")
        is_elsewhere = is_of_a_run(recorded) and not found.resolve().is_relative_to(run_folder.resolve())
        return CheckpointFact(
            version=version, path=str(found), place="in another run's folder" if is_elsewhere else "on disk"
        )

    def _miss_checkpoints(self, facts: Collection[CheckpointFact]) -> None:
        missing = [fact for fact in facts if fact.place not in ("on disk", "modelled")]
        if missing:
            with self._named("read"):
                while self._catch_up():  # it may have been released in the meantime
                    pass
        for fact in missing:
            if fact.version in self._books.resumable():
                where = "not on disk" if fact.place == "missing" else fact.place
                self._find(f"checkpoint {fact.version} is {where}: {fact.path}")

    # --- the report -------------------------------------------------------------------------------------------

    def _report(self, facts: tuple[CheckpointFact, ...], epochs: tuple[int, ...], num_payloads: int) -> AuditReport:
        books = self._books
        num_samples, num_tokens = books.in_system()
        ended = tuple(
            CauseCount(
                state=state, cause=cause, num_samples=counts[0], num_tokens=counts[1], num_given_tokens=counts[2]
            )
            for (state, cause), counts in sorted(books.ended.items())
        )
        balance = Balance(issued=books.issued, in_system=num_samples, ended=ended)
        if not balance.is_balanced:
            num_ended = sum(count.num_samples for count in ended)
            self._find(f"{balance.issued} samples were issued; {num_ended} ended and {num_samples} are in the system")
        accounted = num_tokens + sum(count.num_made_tokens for count in ended)
        if accounted != books.num_tokens:
            self._find(f"samples came with {books.num_tokens} tokens, and {accounted} are accounted for")
        evaluations = [audited.opened.version for audited in books.evaluations.evaluations]
        num_groups: dict[str, int] = {}
        for group in books.groups:
            num_groups[group.state] = num_groups.get(group.state, 0) + 1
        receipts = [step for _, step in books.steps.values()]
        return AuditReport(
            path=str(self._file),
            num_entries=books.num_entries,
            epochs=epochs,
            balance=balance,
            in_system_tokens=num_tokens,
            num_trained_tokens=sum(step.num_trained_tokens for step in receipts),
            num_masked_tokens=sum(step.num_masked_tokens for step in receipts),
            num_given_tokens=self._num_given,
            num_groups=num_groups,
            num_pushed=self._num_pushed(),
            evaluated_versions=tuple(evaluations),
            is_evaluating=books.evaluations.open_one is not None,
            version=books.version,
            announced_version=books.announced,
            leased_version=None if books.lease is None else books.lease.version,
            max_staleness=books.max_staleness,
            checkpoints=facts,
            released_through=books.released_through,
            num_payloads=num_payloads,
            findings=(*books.findings, *self._found),
        )

    def _num_pushed(self) -> int:
        """Groups that came finished from outside; each has a key of its own."""
        keys = Counter(group.pushed for group in self._books.groups if group.pushed)
        for key, count in keys.items():
            if count > 1:
                self._find(f"{count} groups came from outside under one key: {key}")
        return keys.total()

    def _find(self, text: str, sequence: int = 0) -> None:
        self._found.append(Finding(sequence, text))


def _small_tables(books: AuditBooks) -> dict[str, list[Row]]:
    """What they must hold."""
    run = books.run
    return {
        "run": []
        if run is None
        else [(run.seed, run.num_rows, int(run.shuffle), run.samples_per_group, run.groups_per_batch)],
        "batches": [
            (
                lease.version, TRAINED if lease.version in books.steps else LEASED, len(lease.group_ids),
                lease.max_staleness, int(lease.mask_stale), lease.update_mode.value, int(lease.is_last),
            )
            for lease in books.leases.values()
        ],
        "steps": [
            (
                step.version, sequence, len(step.group_ids), step.num_trained_tokens, step.num_masked_tokens,
                step.max_staleness,
            )
            for sequence, step in books.steps.values()
        ],
        "checkpoints": [
            (version, path, int(version >= books.released_through)) for version, path in books.checkpoints.items()
        ],
        "versions": [(version,) for version in books.versions],
        "policies": [
            (sequence, policy.policy, policy.max_staleness, policy.update_mode.value, policy.on_stale.value)
            for sequence, policy in books.operator.policies.items()
        ],
        "pauses": [(sequence, int(pause.is_paused)) for sequence, pause in books.operator.pauses.items()],
        "engines": [(number, json.dumps(entry.engines)) for number, entry in books.operator.engines.items()],
        "reuses": [
            (group_id, use, lease.version, lease.group_ids.index(group_id), lease.max_uses)
            for lease in books.leases.values()
            for group_id, use in lease.again.items()
        ],
        "evaluations": [audited.row() for audited in books.evaluations.evaluations],
    }  # fmt: skip


def _difference(group: AuditedGroup, state: str, row: Row, samples: list[Row]) -> str:
    """Both sides of a group that the tables tell otherwise than the log."""
    if state != group.state:
        return f"the table of groups says that group {group.group_id} is {state}, the log that it is {group.state}"
    if row != group.row():
        return f"the table of groups says {row} of group {group.group_id}, the log says {group.row()}"
    if group.digest is None:
        return f"the table of samples says {samples} of group {group.group_id}, the log says {group.sample_rows()}"
    return f"the table of samples says {samples} of group {group.group_id} ({state}), which is not what the log says"
