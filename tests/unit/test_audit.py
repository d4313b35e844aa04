"""The audit finds what is wrong with a ledger, names it, and finds nothing in one where all is well."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import ledger_entries as make
import msgspec
import pytest
from rich.console import Console
from trials.draws import draw_trial
from trials.fuzz import TrialRun
from typer.testing import CliRunner

from penstock.actors.buffer.machine import Buffer
from penstock.backends.ledger import sqlite
from penstock.backends.ledger.audit import AuditReport, audit_ledger
from penstock.backends.ledger.audit_books import AuditBooks
from penstock.backends.ledger.memory import MemoryStore
from penstock.backends.ledger.protocol import LedgerStoreError
from penstock.backends.ledger.sqlite import SqliteStore
from penstock.backends.ledger.tables import LEDGER_FILE
from penstock.messages.errors import UserFault
from penstock.messages.evaluation import GroupEvaluated
from penstock.messages.flow import GrantSpan, GroupRow
from penstock.messages.ledger import (
    CheckpointRecorded,
    GroupRecorded,
    GroupsGranted,
    LedgerEntry,
    PauseRecorded,
    PayloadsReleased,
    PolicyRecorded,
    RowsRecorded,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.samples import TerminalState
from penstock.messages.training import Balance, CauseCount, OnStale, UpdateMode
from penstock.runtime.cli.app import app
from penstock.runtime.cli.audit import show_audit
from penstock.runtime.hosts.virtual.host import IdleWatcher
from penstock.runtime.launch.runs import open_record
from penstock.runtime.observability.summary import MachineFacts, RunSummary, write_summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.hosts.virtual.process import Process

TIMEOUT_S = 60


def fold(entries: list[LedgerEntry]) -> AuditBooks:
    books = AuditBooks()
    for sequence, entry in enumerate(entries, 1):
        books.apply(sequence, 1, entry)
    return books


def ledger_of(entries: list[LedgerEntry], folder: Path) -> Path:
    store = SqliteStore(folder / LEDGER_FILE)
    store.claim(1)
    for entry in entries:
        store.commit([entry])
    store.close()
    return folder / LEDGER_FILE


def tamper(path: Path, *statements: str) -> None:
    database = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        database.execute(statement)
    database.close()


def texts(report: AuditReport) -> list[str]:
    return [finding.text for finding in report.findings]


# --- all is well ------------------------------------------------------------------------------------------------


def test_a_sound_run_is_clean_after_every_entry(tmp_path: Path) -> None:
    entries = make.whole_run()
    for length in range(len(entries) + 1):
        (folder := tmp_path / str(length)).mkdir()
        report = audit_ledger(ledger_of(entries[:length], folder))
        assert not report.findings, length
        assert report.balance.is_balanced


def test_the_report_says_what_became_of_every_sample(tmp_path: Path) -> None:
    report = audit_ledger(ledger_of(make.whole_run(), tmp_path))
    tokens = make.TOKENS
    assert report.balance.issued == 9 * 2 + 2  # two failed samples were replaced
    assert report.balance.in_system == 4
    assert report.in_system_tokens == 2 * tokens
    assert report.balance.ended == (
        CauseCount(state="failed", cause="reward_timeout", num_samples=2, num_tokens=2 * tokens),
        CauseCount(state="filtered", cause="zero_spread", num_samples=2, num_tokens=2 * tokens),
        CauseCount(state="stale", cause="past_deadline", num_samples=4, num_tokens=4 * tokens),
        CauseCount(state="trained", cause="", num_samples=8, num_tokens=8 * tokens),
    )
    assert report.num_trained_tokens == 8 * tokens
    assert report.num_groups == {"trained": 4, "closed": 3, "granted": 1, "admitted": 1}
    assert (report.version, report.announced_version, report.leased_version, report.max_staleness) == (2, 1, None, 1)
    assert [(fact.version, fact.place) for fact in report.checkpoints] == [(1, "modelled"), (2, "modelled")]
    assert report.num_payloads == 3  # groups 3 and 4 may be trained again, 8 is open
    assert report.epochs == (1,)


def test_groups_that_came_from_outside_are_counted_and_one_that_came_twice_is_found(tmp_path: Path) -> None:
    for name, keys, found in (("once", ("a", "b"), []), ("twice", ("a", "a"), ["2 groups came from outside under"])):
        entries, given = make.whole_run(), iter(keys)
        for place, entry in enumerate(entries):
            if isinstance(entry, GroupRecorded) and (key := next(given, "")):
                entries[place] = msgspec.structs.replace(entry, pushed=key)
        (tmp_path / name).mkdir()
        report = audit_ledger(ledger_of(entries, tmp_path / name))
        assert report.num_pushed == 2
        assert [text[:32] for text in texts(report)] == found


def test_tokens_that_the_model_did_not_make_are_missing_from_a_receipt_and_that_is_right(tmp_path: Path) -> None:
    entries = make.whole_run()[:3]
    entries += [make.admitted(0, loss_mask=b"\1\0\1"), make.admitted(1), make.leased(1, 0, 1)]
    sound = [*entries, make.trained(1, 0, 1, num_tokens=4 * make.TOKENS - 2)]
    (tmp_path / "sound").mkdir()
    report = audit_ledger(ledger_of(sound, tmp_path / "sound"))
    assert not report.findings
    assert report.num_given_tokens == 2
    (tmp_path / "unsound").mkdir()
    unsound = [*entries, make.trained(1, 0, 1, num_tokens=4 * make.TOKENS - 1)]
    (finding,) = audit_ledger(ledger_of(unsound, tmp_path / "unsound")).findings
    assert finding.sequence == 7
    assert finding.text == (
        "the receipt of version 1 names 11 tokens, its samples have 12; the model did not make 2 of them"
    )


def test_masked_tokens_may_be_older_than_the_bound(tmp_path: Path) -> None:
    entries = make.whole_run()[:3]
    for version in range(1, 4):
        first = 4 * version
        entries += [make.granted(first, 4), make.admitted(first), make.admitted(first + 1)]
        entries += [make.leased(version, first, first + 1), make.trained(version, first, first + 1, age=version - 1)]
    entries += [make.admitted(0), make.admitted(1), make.leased(4, 0, 1, mask_stale=True)]
    masked = make.trained(4, 0, 1, age=0, masked=4 * make.TOKENS)
    assert not fold([*entries, masked]).findings
    assert not audit_ledger(ledger_of([*entries, masked], tmp_path)).findings


def test_where_old_tokens_are_masked_the_age_of_a_sample_is_that_of_its_newest_ones() -> None:
    entries = make.whole_run()[:3]
    for version in range(1, 3):
        first = 4 * version
        entries += [make.granted(first, 4), make.admitted(first), make.admitted(first + 1)]
        entries += [make.leased(version, first, first + 1), make.trained(version, first, first + 1, age=version - 1)]
    spread = make.admitted(0)
    notes = tuple(msgspec.structs.replace(note, newest_version=1) for note in spread.samples)
    groups = [msgspec.structs.replace(spread, samples=notes), make.admitted(1)]
    lease = msgspec.structs.replace(make.leased(3, 0, 1), mask_old_tokens=True)
    assert not fold([*entries, *groups, lease, make.trained(3, 0, 1, age=2)]).findings
    both = [
        msgspec.structs.replace(g, samples=tuple(msgspec.structs.replace(note, newest_version=1) for note in g.samples))
        for g in groups
    ]
    assert not fold([*entries, *both, lease, make.trained(3, 0, 1, age=1, masked=2)]).findings
    assert fold([*entries, *both, lease, make.trained(3, 0, 1, age=2)]).findings


class Copyist(IdleWatcher):
    """Watches a virtual run and writes what it commits to a file as well."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._epoch = -1

    def committed(self, process: Process, entries: Sequence[LedgerEntry]) -> None:
        if process.epoch != self._epoch:
            self._store.claim(process.epoch)
            self._epoch = process.epoch
        machine = process.shell.machine
        assert isinstance(machine, Buffer)
        self._store.commit(entries, machine.snapshot)


@pytest.mark.parametrize("policy", ["sync", "one_step_off", "fully_async"])
def test_runs_with_faults_are_clean_and_the_same_in_both_stores(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(12):
        monkeypatch.setattr(sqlite, "SNAPSHOT_EVERY", 1 + 7 * seed)
        path = tmp_path / f"{seed}.sqlite"
        store = SqliteStore(path)
        trial = TrialRun(draw_trial(policy, seed), with_digest=False)
        trial.host.watch(Copyist(store), events=False)
        trial.run()
        in_memory = list(MemoryStore(trial.host.ledger).entries())
        assert list(store.entries()) == in_memory
        assert sum(isinstance(entry, StepRecorded | GroupEvaluated) for entry in in_memory) > 0
        store.close()
        assert not audit_ledger(path).findings, (policy, seed)


# --- what is wrong with a log -----------------------------------------------------------------------------------

Edit = Callable[[list[LedgerEntry]], object]


def replaced(position: int, entry: LedgerEntry) -> Edit:
    def edit(entries: list[LedgerEntry]) -> None:
        entries[position - 1] = entry

    return edit


def inserted(position: int, entry: LedgerEntry) -> Edit:
    """Before the entry that has this sequence now."""
    return lambda entries: entries.insert(position - 1, entry)


def changed(position: int, **changes: object) -> Edit:
    def edit(entries: list[LedgerEntry]) -> None:
        entries[position - 1] = msgspec.structs.replace(entries[position - 1], **changes)

    return edit


def drawn(*rows: tuple[int, int]) -> RowsRecorded:
    """Group and row."""
    return RowsRecorded(rows=tuple(GroupRow(group_id, row, 0, -1) for group_id, row in rows))


WRONG: dict[str, tuple[Edit, int, str]] = {
    "no run": (lambda entries: entries.pop(0), 1, "the first entry is VersionRecorded, it must be RunRecorded"),
    "another run": (inserted(2, msgspec.structs.replace(make.run(), seed=1)), 2, "the run is said to be another one"),
    "a gap in the grants": (
        replaced(12, make.granted(5, 2, version=1)),
        12,
        "groups 5 to 6 of 7 are granted after 4 groups: ids have a gap",
    ),
    "granted twice": (inserted(4, make.granted(0, 4)), 4, "groups 0 to 3 of 4 are granted after 4 groups"),
    "a wrong total": (changed(3, total=5), 3, "groups 0 to 3 of 5 are granted after 0 groups"),
    "granted before it is announced": (
        replaced(3, make.granted(0, 4, version=1)),
        3,
        "granted for version 1, which has not been announced",
    ),
    "a late deadline": (
        replaced(3, GroupsGranted(span=GrantSpan(0, 4, 0, 0, 3), total=4, max_staleness=2)),
        3,
        "groups get the deadline 3",
    ),
    "a prompt twice": (replaced(17, make.granted(8, 1, ordinal=6, version=1)), 17, "granted for prompt 6: prompt 7 is"),
    "a prompt left out": (replaced(17, make.granted(8, 1, ordinal=8, version=1)), 17, "for prompt 8: prompt 7 is next"),
    "admitted twice": (inserted(5, make.admitted(0)), 5, "group 0 is admitted when it is admitted already"),
    "admitted after its training": (
        inserted(10, make.admitted(0)),
        10,
        "group 0 is admitted when it is trained already",
    ),
    "admitted and never granted": (inserted(4, make.admitted(9)), 4, "group 9 is admitted and was never granted"),
    "a sample is lost at admission": (replaced(4, make.admitted(0, indices=(0,))), 4, "group 0 lacks its samples 1"),
    "a sample twice": (replaced(4, make.admitted(0, indices=(0, 1, 1))), 4, "group 0 names a sample twice"),
    "a sample of another group": (
        changed(5, ended=(make.end(0, 0, TerminalState.FAILED, "x"),)),
        5,
        "group 1 names a sample twice, or one of another",
    ),
    "a replacement of nothing": (
        replaced(4, make.admitted(0, indices=(0, 1, 5))),
        4,
        "group 0 has replacements 5 of samples that have not failed",
    ),
    "a place twice": (
        replaced(4, make.admitted(0, indices=(0, 1, 2))),
        4,
        "group 0 has replacements 2 of samples that have not failed",
    ),
    "older than its grant": (
        replaced(13, make.admitted(4, version=0, deadline=3)),
        13,
        "group 4 has a token of version 0, it was granted for 1",
    ),
    "a deadline that its tokens do not give": (
        replaced(4, make.admitted(0, deadline=5)),
        4,
        "group 0 gets the deadline 5: its tokens and its grant make it 2",
    ),
    "a row twice": (inserted(4, drawn((0, 1), (0, 2))), 4, "group 0 is given a row twice"),
    "a row that is not there": (inserted(4, drawn((0, 10**9))), 4, "group 0 is drawn from row 1000000000, the dataset"),
    "a row too late": (inserted(5, drawn((0, 1))), 5, "group 0 is given a row when it is admitted already"),
    "closed twice": (inserted(7, make.closed(2)), 7, "group 2 is closed when it is closed already"),
    "closed after its training": (inserted(10, make.closed(0)), 10, "group 0 is closed when it is trained already"),
    "closed while it is leased": (inserted(8, make.closed(0)), 8, "group 0 is closed when it is leased already"),
    "closed with a sample too few": (replaced(6, make.closed(2, make.end(2, 0))), 6, "group 2 lacks its samples 1"),
    "an admitted sample has no end": (
        replaced(19, make.closed(6, make.stale(6, 0))),
        19,
        "group 6 is closed without an end of its samples 3",
    ),
    "an end with other tokens": (
        replaced(19, make.closed(6, make.stale(6, 0), make.end(6, 3, num_tokens=9))),
        19,
        "6/3 .*contradicts its admission",
    ),
    "a failed sample ends again": (
        replaced(19, make.closed(6, make.stale(6, 0), make.stale(6, 3), make.stale(6, 1))),
        19,
        "6/1 .*contradicts its admission",
    ),
    "trained without a receipt": (
        replaced(6, make.closed(2, make.end(2, 0), make.end(2, 1, TerminalState.TRAINED, ""))),
        6,
        "2/1 is said to be trained",
    ),
    "two batches are out": (inserted(8, make.leased(2, 0, 1)), 8, "batch 2 is leased while batch 1 is out"),
    "a version is left out": (replaced(7, make.leased(2, 0, 1)), 7, "batch 2 is leased at version 0: it must be 1"),
    "a batch of what is not there": (
        replaced(7, make.leased(1, 0, 3)),
        7,
        "group 3 is leased when it is granted already",
    ),
    "a group trained twice": (replaced(21, make.leased(2, 3, 0)), 21, "group 0 is leased when it is trained already"),
    "a group twice in a batch": (replaced(7, make.leased(1, 0, 0)), 7, "batch 1 has a group twice"),
    "a short batch": (replaced(7, make.leased(1, 0)), 7, "batch 1 has 1 groups, it must have 2"),
    "a batch after the last": (
        replaced(7, make.leased(1, 0, 1, is_last=True)),
        21,
        "batch 2 is leased after the last one",
    ),
    "a receipt twice": (
        inserted(10, make.trained(1, 0, 1)),
        10,
        "a receipt of version 1 while no batch is out, at version 1",
    ),
    "a receipt without a lease": (
        lambda entries: entries.pop(6),
        8,
        "a receipt of version 1 while no batch is out, at version 0",
    ),
    "a receipt of another version": (changed(9, version=2), 9, "a receipt of version 2 while batch 1 is out"),
    "a receipt of other groups": (replaced(9, make.trained(1, 1, 0)), 9, "names other groups than its lease"),
    "a bound off by one": (
        changed(22, max_staleness=3),
        22,
        "a token of age 3 was trained, the bound of the batch is 2",
    ),
    "an age that the samples do not have": (
        changed(22, max_staleness=0),
        22,
        "the receipt names an age of 0, the samples' versions make it 1",
    ),
    "a checkpoint ahead of its receipt": (
        inserted(9, CheckpointRecorded(version=1, path="simulated/1")),
        9,
        "checkpoint 1 is ahead of the receipts",
    ),
    "checkpoints go back": (changed(23, version=1), 23, "checkpoint 1 is recorded after checkpoint 1"),
    "released without a checkpoint": (
        inserted(10, PayloadsReleased(through_version=1)),
        10,
        "payloads up to 1 are released, and there is no checkpoint",
    ),
    "released backwards": (
        lambda entries: entries.append(PayloadsReleased(through_version=0)),
        25,
        "up to 0 are released, those up to 1 had",
    ),
    "grants under another bound than the policy's": (
        inserted(16, PolicyRecorded(policy="y", max_staleness=1, update_mode=UpdateMode.DRAIN, on_stale=OnStale.WAIT)),
        17,
        "granted with a bound of 2 under y, which has a max_staleness of 1",
    ),
    "grants while they are paused": (
        inserted(16, PauseRecorded(is_paused=True)),
        17,
        "groups are granted while new grants are paused",
    ),
    "versions go down": (inserted(12, VersionRecorded(version=0)), 12, "version 0 is announced after version 1"),
    "announced beyond the receipts": (
        inserted(3, VersionRecorded(version=2)),
        3,
        "version 2 is announced, the receipts end at 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_log_is_found_at_its_entry(name: str) -> None:
    edit, sequence, pattern = WRONG[name]
    entries = make.whole_run()
    edit(entries)
    findings = fold(entries).findings
    assert findings, name
    first = findings[0]
    assert first.sequence == sequence, first
    assert re.search(pattern, first.text), first


def test_a_token_older_than_its_groups_bound_is_found() -> None:
    entries = make.whole_run()[:3]
    for version in range(1, 4):
        first = 4 * version
        entries += [make.granted(first, 4), make.admitted(first), make.admitted(first + 1)]
        entries += [make.leased(version, first, first + 1), make.trained(version, first, first + 1, age=version - 1)]
    entries += [make.admitted(0), make.admitted(1), make.leased(4, 0, 1), make.trained(4, 0, 1, age=3)]
    found = [finding.text for finding in fold(entries).findings]
    assert found == [
        "group 0 is trained at age 3, its bound is 2",
        "group 1 is trained at age 3, its bound is 2",
        "a token of age 3 was trained, the bound of the batch is 2",
    ]


def test_an_older_epoch_that_writes_is_found() -> None:
    books = AuditBooks()
    books.apply(1, 2, make.run())
    books.apply(2, 1, VersionRecorded(version=0))
    assert [finding.text for finding in books.findings] == ["written by epoch 1 after epoch 2: two writers"]


@pytest.mark.parametrize(("epoch", "is_found"), [(2, True), (999, True), (1001, False)])
def test_only_a_later_drive_may_go_on_after_the_last_batch(epoch: int, is_found: bool) -> None:
    """Whoever resumes a run may make it longer."""
    books = AuditBooks()
    entries = make.whole_run()
    entries[6] = make.leased(1, 0, 1, is_last=True)
    for sequence, entry in enumerate(entries, start=1):
        books.apply(sequence, 1 if sequence < 21 else epoch, entry)
    assert [finding.sequence for finding in books.findings] == ([21] if is_found else [])


# --- what is wrong with a file ----------------------------------------------------------------------------------

BROKEN = {
    "an entry is missing": ("DELETE FROM entries WHERE sequence = 6", "follows entry 5: entries are missing"),
    "a group is missing": ("DELETE FROM groups WHERE group_id = 2", "the table of groups lacks group 2"),
    "a group too many": (
        "INSERT INTO groups (group_id, state) VALUES (9, 'granted')",
        "the table of groups has group 9, which was never",
    ),
    "a group in another state": (
        "UPDATE groups SET state = 'admitted' WHERE group_id = 0",
        "says that group 0 is admitted, the log that it is trained",
    ),
    "a group in another batch": ("UPDATE groups SET version = 2 WHERE group_id = 0", "the table of groups says"),
    "a sample is missing": (
        "DELETE FROM samples WHERE group_id = 0 AND sample_index = 1",
        "the table of samples says .* of group 0",
    ),
    "a sample too many": (
        "INSERT INTO samples (group_id, sample_index, num_tokens) VALUES (8, 2, 3)",
        "the table of samples says .* of group 8",
    ),
    "other tokens": ("UPDATE samples SET num_tokens = 4 WHERE group_id = 1", "the table of samples says .* of group 1"),
    "another reward": ("UPDATE samples SET reward = 1 WHERE group_id = 8", "the table of samples says .* of group 8"),
    "another cause": ("UPDATE samples SET cause = 'x' WHERE group_id = 2", "the table of samples says .* of group 2"),
    "a payload is missing": ("DELETE FROM payloads WHERE group_id = 3", "the payload of group 3 is gone"),
    "a payload too many": (
        "INSERT INTO payloads VALUES (0, x'00')",
        "the payload of group 0 is there, and nothing can",
    ),
    "a payload is damaged": (
        "UPDATE payloads SET body = x'c1' WHERE group_id = 8",
        "payload of group 8 cannot be read",
    ),
    "a payload of another group": (
        "UPDATE payloads SET body = (SELECT body FROM payloads WHERE group_id = 3) WHERE group_id = 4",
        "the payload of group 4 is another one",
    ),
    "another receipt": ("UPDATE steps SET num_trained_tokens = 1 WHERE version = 1", "the table of steps lacks"),
    "a batch is missing": ("DELETE FROM batches WHERE version = 1", "the table of batches lacks"),
    "a checkpoint too many": ("INSERT INTO checkpoints VALUES (9, 'x', 1, 0)", "the table of checkpoints has"),
    "a version is missing": ("DELETE FROM versions", "the table of versions lacks"),
    "a policy is missing": ("DELETE FROM policies", "the table of policies lacks"),
    "another run": ("UPDATE run SET seed = 5", "the table of run lacks"),
    "a writer without a claim": ("DELETE FROM claims", "epoch 1 wrote entries and never claimed the ledger"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_a_file_is_found(name: str, tmp_path: Path) -> None:
    statement, pattern = BROKEN[name]
    path = ledger_of(make.whole_run(), tmp_path)
    tamper(path, statement)
    found = texts(audit_ledger(path))
    assert found
    assert re.search(pattern, found[0]), found


def test_a_checkpoint_is_looked_for_where_it_was_written_and_in_the_runs_folder(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    for folder in (elsewhere / "version-1", run / "checkpoints" / "version-2"):
        folder.mkdir(parents=True)
    entries = make.whole_run()
    entries[9] = CheckpointRecorded(version=1, path=str(elsewhere / "version-1"))
    entries[22] = CheckpointRecorded(version=2, path="moved/away/checkpoints/version-2")
    path = ledger_of(entries, run)
    report = audit_ledger(path)
    assert not report.findings
    assert [fact.place for fact in report.checkpoints] == ["on disk", "on disk"]
    shutil.rmtree(elsewhere)
    assert texts(audit_ledger(path)) == [f"checkpoint 1 is not on disk: {elsewhere / 'version-1'}"]


def test_a_copy_of_a_run_has_its_own_checkpoint_and_not_that_of_the_original(tmp_path: Path) -> None:
    original, run = tmp_path / "original" / "checkpoints", tmp_path / "run"
    for folder in (original / "version-1", original / "version-2", run / "checkpoints" / "version-2"):
        folder.mkdir(parents=True)
    entries = make.whole_run()
    entries[9] = CheckpointRecorded(version=1, path=str(original / "version-1"))
    entries[22] = CheckpointRecorded(version=2, path=str(original / "version-2"))
    report = audit_ledger(ledger_of(entries, run))
    assert [fact.place for fact in report.checkpoints] == ["in another run's folder", "on disk"]
    assert report.checkpoints[1].path == str(run / "checkpoints" / "version-2")
    assert texts(report) == [f"checkpoint 1 is in another run's folder: {original / 'version-1'}"]


def test_a_checkpoint_that_was_given_up_may_be_gone(tmp_path: Path) -> None:
    entries = make.whole_run()
    entries[9] = CheckpointRecorded(version=1, path="nowhere/version-1")
    entries[23] = PayloadsReleased(through_version=2)
    assert not audit_ledger(ledger_of(entries, tmp_path)).findings


def test_what_is_no_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerStoreError, match="unable to open"):
        audit_ledger(tmp_path / LEDGER_FILE)
    (tmp_path / LEDGER_FILE).write_bytes(b"no database at all" * 500)
    with pytest.raises(LedgerStoreError, match="not a database"):
        audit_ledger(tmp_path / LEDGER_FILE)


COMMIT_RUN = """
    import sys
    from pathlib import Path
    import ledger_entries as make
    from penstock.backends.ledger.sqlite import SqliteStore
    from penstock.messages.ledger import CheckpointRecorded, PayloadsReleased, VersionRecorded
    store = SqliteStore(Path(sys.argv[1]))
    store.claim(1)
    store.commit([make.run(), VersionRecorded(version=0)])
    for version in range(1, 100_000):
        first = 3 * (version - 1)
        store.commit([make.granted(first, 3, version=version - 1)])
        store.commit([make.admitted(first + k, version=version - 1) for k in range(2)])
        store.commit([make.closed(first + 2), make.leased(version, first, first + 1)])
        store.commit([make.trained(version, first, first + 1), VersionRecorded(version=version)])
        if version % 5 == 0:
            released = [PayloadsReleased(through_version=version - 5)] if version > 5 else []
            store.commit([CheckpointRecorded(version=version, path=f"simulated/{version}"), *released])
        print(version, flush=True)
"""


def test_a_run_that_goes_on_is_clean_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" + textwrap.dedent(COMMIT_RUN)
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        versions: list[int] = []
        for _ in range(15):
            report = audit_ledger(path)
            assert not report.findings
            versions.append(report.version)
            child.stdout.readline()
        assert versions == sorted(versions)
        assert versions[-1] > versions[0]
    finally:
        child.kill()
        child.communicate(timeout=TIMEOUT_S)
    assert audit_ledger(path).is_clean


# --- the command ------------------------------------------------------------------------------------------------


def shown(folder: Path) -> tuple[int, str]:
    out = StringIO()
    code = show_audit(folder, Console(file=out, width=160))
    return code, out.getvalue()


def test_the_command_prints_ends_waste_and_verdict(tmp_path: Path) -> None:
    ledger_of(make.whole_run(), tmp_path)
    code, text = shown(tmp_path)
    assert code == 0
    rows = [line.split() for line in text.splitlines()]
    assert ["stale", "past_deadline", "4", "20.0", "%", "12"] in rows
    assert ["in", "the", "system", "4", "20.0", "%", "6"] in rows
    assert ["issued", "balanced", "20", "54"] in rows
    assert ["stale:", "past_deadline", "12", "22.2", "%"] in rows
    assert "clean: log, tables, payloads and checkpoints agree" in text


def ended_early(folder: Path) -> None:
    """The summary of a run that ended for its failures: its Buffer had said so before what failed was settled."""
    nothing = Balance(issued=20, in_system=20, ended=())
    write_summary(
        folder,
        RunSummary(
            scenario="x", penstock_version="0", seed=0, policy="sync", staleness_bound=0, started_at="",
            completed=False, machine=MachineFacts(system="Linux", python="3.11", num_cpus=2, memory_bytes=1), story="",
            version=0, num_steps=1, wall_s=1.0, training_s=1.0, first10_reward=None, last10_reward=None,
            mean_staleness=None, max_staleness=0, mean_logprob_abs_diff=None, max_logprob_abs_diff=None,
            balance=nothing, tokens_generated=0,
            tokens_trained=0, tokens_wasted=(), tokens_lost_estimate=0, tokens_reported=54 + 7, restarts=(),
            checkpoint="", report="", metrics="",
        ),
    )  # fmt: skip


def test_tokens_that_are_in_the_ledger_have_come(tmp_path: Path) -> None:
    ledger_of(make.whole_run(), tmp_path)
    ended_early(tmp_path)
    rows = [line.split() for line in shown(tmp_path)[1].splitlines()]
    assert ["issued", "balanced", "20", "54"] in rows
    assert ["reported", "by", "engines,", "and", "in", "no", "response", "that", "came", "≈", "7", "–"] in rows


def test_the_command_names_what_disagrees_and_fails(tmp_path: Path) -> None:
    entries = make.whole_run()
    entries[21] = make.trained(2, 3, 4, age=0)
    ledger_of(entries, tmp_path)
    code, text = shown(tmp_path)
    assert code == 1
    assert "✗ entry 22: the receipt names an age of 0, the samples' versions make it 1" in text


def test_a_run_without_a_ledger_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserFault, match="no such folder"):
        shown(tmp_path / "nowhere")
    with pytest.raises(UserFault, match="not a run's folder"):
        shown(tmp_path)
    open_record(tmp_path, "x")
    with pytest.raises(UserFault, match=r"the run has no ledger\.sqlite"):
        shown(tmp_path)


def test_the_exit_code_is_that_of_the_verdict(tmp_path: Path) -> None:
    path = ledger_of(make.whole_run(), tmp_path)
    assert CliRunner().invoke(app, ["audit", str(tmp_path)]).exit_code == 0
    tamper(path, "DELETE FROM payloads")
    assert CliRunner().invoke(app, ["audit", str(tmp_path)]).exit_code == 1
