"""From an entry of the log to the tables that follow from it.

Invariants:

* It judges nothing: an entry that contradicts earlier ones is written down as well as it can be; the audit names it.
* Every statement finds its rows by key, so a commit costs the same in a long run as in a short one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from penstock.messages.evaluation import EvaluationOpened, GroupEvaluated
from penstock.messages.ledger import (
    BatchesFixed,
    BatchLeased,
    CheckpointRecorded,
    EngineNoted,
    EnginesRecorded,
    FailuresNoted,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    PauseRecorded,
    PayloadsReleased,
    PolicyRecorded,
    RowsRecorded,
    RunRecorded,
    StepRecorded,
    VersionRecorded,
)
from penstock.messages.reasons import reason_kind

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator

    from penstock.messages.ledger import LedgerEntry
    from penstock.messages.samples import SampleEnd

_ENCODER: Final = msgspec.msgpack.Encoder()

_GRANT: Final = (
    "INSERT OR REPLACE INTO groups (group_id, ordinal, min_version, deadline_version, max_staleness, state, granted_at)"
    " VALUES (?, ?, ?, ?, ?, 'granted', ?)"
)
_PAYLOAD: Final = "INSERT OR REPLACE INTO payloads (group_id, body) VALUES (?, ?)"
_ADMIT: Final = (
    "INSERT INTO groups (group_id, deadline_version, state, admitted_at) VALUES (?, ?, 'admitted', ?) "
    "ON CONFLICT (group_id) DO UPDATE SET deadline_version = excluded.deadline_version, state = excluded.state, "
    "admitted_at = excluded.admitted_at"
)
_SAMPLE: Final = (
    "INSERT OR REPLACE INTO samples (group_id, sample_index, attempt, engine, outcome, num_tokens, num_given_tokens, "
    "oldest_version, newest_version, reward, num_read_tokens, num_cached_tokens, num_drafted_tokens, "
    "num_accepted_tokens) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_END: Final = (
    "INSERT INTO samples (group_id, sample_index, num_tokens, num_given_tokens, state, cause) "
    "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (group_id, sample_index) DO UPDATE SET num_tokens = excluded.num_tokens, "
    "num_given_tokens = excluded.num_given_tokens, state = excluded.state, cause = excluded.cause"
)
_REASON: Final = "INSERT OR IGNORE INTO reasons VALUES (?, ?, ?, ?, ?, ?, ?)"
_CLOSE: Final = (
    "INSERT INTO groups (group_id, state, is_requeued, ended_at) VALUES (?, 'closed', ?, ?) "
    "ON CONFLICT (group_id) DO UPDATE SET state = excluded.state, is_requeued = excluded.is_requeued, "
    "ended_at = excluded.ended_at"
)
_LEASE: Final = "UPDATE groups SET state = 'leased', version = ?, position = ? WHERE group_id = ?"
_TRAIN_GROUP: Final = "UPDATE groups SET state = 'trained', version = ?, ended_at = ? WHERE group_id = ?"
_TRAIN_SAMPLES: Final = (
    "UPDATE samples SET state = 'trained', cause = '', version = ? WHERE group_id = ? AND state IS NULL"
)
# Walks the payloads that are there, which are few, not the groups of the whole run.
_RELEASE: Final = (
    "DELETE FROM payloads WHERE group_id IN (SELECT p.group_id FROM payloads p CROSS JOIN groups g USING (group_id) "
    "WHERE g.state = 'trained' AND g.version <= ? AND g.group_id NOT IN (SELECT value FROM json_each(?)))"
)
_REUSE: Final = "INSERT OR REPLACE INTO reuses VALUES (?, ?, ?, ?, ?)"
_OPEN: Final = "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, 'open', ?, ?, 0, ?, NULL)"
_PLACE: Final = "INSERT OR REPLACE INTO evaluation_groups VALUES (?, ?, ?, ?, ?, ?, 'granted', NULL)"
_EVALUATE: Final = "UPDATE evaluation_groups SET state = 'evaluated', ended_at = ? WHERE group_id = ?"
_EVALUATED: Final = (
    "INSERT OR REPLACE INTO samples (group_id, sample_index, attempt, engine, outcome, num_tokens, num_given_tokens, "
    "oldest_version, newest_version, reward, state, cause) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'evaluated', '')"
)
_COUNT: Final = "UPDATE evaluations SET num_ended = num_ended + 1 WHERE number = ?"
_DONE: Final = "UPDATE evaluations SET state = 'done', ended_at = ? WHERE number = ? AND num_ended = num_groups"


def number(value: float | None) -> float | None:
    """As SQLite keeps it: it has no NaN."""
    return None if value is None or value != value else value


class Projection:
    """Writes the tables of one file, inside the caller's transaction."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def apply(self, sequence: int, entry: LedgerEntry, now_s: float) -> None:
        """Bring the tables up to this entry.

        Raises:
            sqlite3.Error: it cannot be written.
        """
        execute = self._database.execute
        match entry:
            case GroupsGranted():
                self._database.executemany(_GRANT, _granted(entry, now_s))
            case GroupRecorded():
                self._admit(entry, now_s)
            case GroupClosed():
                execute("DELETE FROM payloads WHERE group_id = ?", (entry.group_id,))
                execute(_CLOSE, (entry.group_id, entry.is_requeued, now_s))
                self._end(entry.ended, now_s)
            case FailuresNoted():
                self._note_reasons(entry.ends, now_s)
            case BatchLeased():
                self._lease(entry, now_s)
            case StepRecorded():
                self._train(sequence, entry, now_s)
            case CheckpointRecorded():
                execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, 1, ?)", (entry.version, entry.path, now_s))
            case PayloadsReleased():
                execute(_RELEASE, (entry.through_version, json.dumps(entry.kept)))
                execute("UPDATE checkpoints SET is_kept = 0 WHERE version < ?", (entry.through_version,))
            case VersionRecorded():
                execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (entry.version, now_s))
            case PolicyRecorded():
                policy = (entry.policy, entry.max_staleness, entry.update_mode.value, entry.on_stale.value)
                execute("INSERT INTO policies VALUES (?, ?, ?, ?, ?, ?)", (sequence, *policy, now_s))
            case RunRecorded():
                row = (entry.seed, entry.num_rows, entry.shuffle, entry.samples_per_group, entry.groups_per_batch)
                execute("INSERT OR REPLACE INTO run VALUES (0, ?, ?, ?, ?, ?)", row)
            case PauseRecorded():
                execute("INSERT INTO pauses VALUES (?, ?, ?)", (sequence, entry.is_paused, now_s))
            case EnginesRecorded():
                execute("INSERT INTO engines VALUES (?, ?, ?)", (sequence, json.dumps(entry.engines), now_s))
            case EngineNoted():
                pass  # it stands in the log
            case BatchesFixed():
                pass  # each batch stands in the tables when it is leased
            case EvaluationOpened():
                self._open(entry, now_s)
            case GroupEvaluated():
                self._evaluate(entry, now_s)
            case RowsRecorded():
                pass  # a group's prompt names its row
            case _:
                assert_never(entry)

    def _admit(self, entry: GroupRecorded, now_s: float) -> None:
        assert entry.payload is not None, "written without its payload"
        given = {sample.key.index: sample.num_given_tokens for sample in entry.payload.samples}
        self._database.execute(_PAYLOAD, (entry.group_id, _ENCODER.encode(entry.payload)))
        self._database.execute(_ADMIT, (entry.group_id, entry.deadline_version, now_s))
        rows = [
            (
                entry.group_id, note.index, note.attempt, note.engine, note.outcome, note.num_tokens,
                given.get(note.index, 0), note.oldest_version, note.newest_version, number(note.reward),
                *((None,) * 4 if note.counts is None else msgspec.structs.astuple(note.counts)),
            )
            for note in entry.samples
        ]  # fmt: skip
        self._database.executemany(_SAMPLE, rows)
        self._end(entry.ended, now_s)

    def _lease(self, entry: BatchLeased, now_s: float) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO batches VALUES (?, 'leased', ?, ?, ?, ?, ?, ?)",
            (
                entry.version, len(entry.group_ids), entry.max_staleness, entry.mask_stale, entry.update_mode.value,
                entry.is_last, now_s,
            ),
        )  # fmt: skip
        again, places = entry.again, list(enumerate(entry.group_ids))
        new = ((entry.version, position, group_id) for position, group_id in places if group_id not in again)
        self._database.executemany(_LEASE, new)
        used = ((g, again[g], entry.version, position, entry.max_uses) for position, g in places if g in again)
        self._database.executemany(_REUSE, used)

    def _train(self, sequence: int, entry: StepRecorded, now_s: float) -> None:
        self._database.execute(
            "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                entry.version, sequence, len(entry.group_ids), entry.num_trained_tokens, entry.num_masked_tokens,
                entry.max_staleness, now_s,
            ),
        )  # fmt: skip
        self._database.execute("UPDATE batches SET state = 'trained' WHERE version = ?", (entry.version,))
        ids = [group_id for group_id in entry.group_ids if group_id not in entry.again]
        self._database.executemany(_TRAIN_GROUP, ((entry.version, now_s, group_id) for group_id in ids))
        self._database.executemany(_TRAIN_SAMPLES, ((entry.version, group_id) for group_id in ids))

    def _end(self, ended: tuple[SampleEnd, ...], now_s: float) -> None:
        if ended:
            self._database.executemany(_END, _ends(ended))
            self._note_reasons(ended, now_s)

    def _note_reasons(self, ended: tuple[SampleEnd, ...], now_s: float) -> None:
        rows = [
            (end.key.group_id, end.key.index, end.state.value, end.cause, reason_kind(end.reason), end.reason, now_s)
            for end in ended
            if end.reason
        ]
        if rows:
            self._database.executemany(_REASON, rows)

    def _open(self, entry: EvaluationOpened, now_s: float) -> None:
        opened = entry.evaluation
        head = (opened.number, opened.version, opened.is_pinned, opened.num_groups, opened.num_samples, now_s)
        self._database.execute(_OPEN, head)
        names = [shape.name for shape in opened.datasets]
        rows = (
            (group_id, opened.number, dataset, names[dataset], row, num_samples)
            for group_id, dataset, row, num_samples in opened.places()
        )
        self._database.executemany(_PLACE, rows)

    def _evaluate(self, entry: GroupEvaluated, now_s: float) -> None:
        execute = self._database.execute
        execute(_EVALUATE, (now_s, entry.group_id))
        self._database.executemany(_EVALUATED, _evaluated(entry))
        self._end(entry.row.missing, now_s)
        execute(_COUNT, (entry.evaluation,))
        execute(_DONE, (now_s, entry.evaluation))


def _evaluated(entry: GroupEvaluated) -> Iterator[tuple[int | float | str | None, ...]]:
    for sample in entry.row.samples:
        yield (
            entry.group_id, sample.index, sample.attempt, sample.engine, sample.outcome, sample.num_tokens,
            sample.num_given_tokens, sample.oldest_version, sample.newest_version, number(sample.reward),
        )  # fmt: skip


def _granted(entry: GroupsGranted, now_s: float) -> Iterator[tuple[int | float, ...]]:
    span = entry.span
    for offset in range(span.num_groups):
        place = (span.first_group + offset, span.first_ordinal + offset)
        yield (*place, span.min_version, span.deadline_version, entry.max_staleness, now_s)


def _ends(ended: Iterable[SampleEnd]) -> list[tuple[int | str, ...]]:
    return [
        (end.key.group_id, end.key.index, end.num_tokens, end.num_given_tokens, end.state.value, end.cause)
        for end in ended
    ]
