"""The tables of a ledger file, with what they mean: the one place that the file, ``penstock ledger`` and
``docs/ledger.md`` are made from.

Invariants:

* ``entries`` is the truth: every other table but ``payloads`` and ``claims`` follows from it, is written in the same
  transaction, and is there so that people can ask questions without decoding anything.
* Times are Unix seconds of the machine that wrote them. They are for people; nothing is decided by them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SCHEMA_VERSION: Final = 8
TABLES_SINCE: Final = {"reasons": 4, "reason_counts": 4, "pauses": 5, "reuses": 6, "snapshot": 7, "engines": 8}
"""Tables and views that the first form did not have, with the form that brought each."""
COUNTED_SINCE: Final = 6
"""The form that brought what engines count of samples."""
OLDER_READABLE: Final = (3, 4, 5, 6, 7)
"""The same without what came later; what is missing is added when such a ledger is written on."""
LEDGER_FILE: Final = "ledger.sqlite"
"""Name of the ledger in the folder of a run."""
GRANTED: Final = "granted"
ADMITTED: Final = "admitted"
LEASED: Final = "leased"
TRAINED: Final = "trained"
CLOSED: Final = "closed"
EVALUATED: Final = "evaluated"
OPEN: Final = "open"
DONE: Final = "done"


class Column(NamedTuple):
    """A column of the ledger, as it is created and as its documentation shows it."""

    name: str
    declaration: str
    """Its type and constraints in SQL."""
    meaning: str


class Table(NamedTuple):
    """A table of the ledger; both the database and its documentation are made from it."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    key: str = ""
    """Of several columns; the table then has no row ids."""


COUNTED: Final = (
    Column("num_read_tokens", "INTEGER", "That its engine read for it. NULL, as the next three: not told."),
    Column("num_cached_tokens", "INTEGER", "Of these, tokens that were in the prefix cache."),
    Column("num_drafted_tokens", "INTEGER", "That speculative decoding proposed for it."),
    Column("num_accepted_tokens", "INTEGER", "Of these, tokens that were kept."),
)
"""What an engine counts of a sample."""
TABLES: Final = (
    Table(
        "entries",
        "The log, in the order in which it was written: all that the run has decided. Everything else follows from it.",
        (
            Column("sequence", "INTEGER PRIMARY KEY", "Counts from 1, without gaps."),
            Column("epoch", "INTEGER NOT NULL", "Incarnation of the Buffer that wrote it."),
            Column("written_at", "REAL NOT NULL", "Time of the transaction."),
            Column("kind", "TEXT NOT NULL", "Name of the entry's struct in messages/ledger.py."),
            Column("body", "BLOB NOT NULL", "The entry as msgpack, without payload; `entry_json(body)` shows it."),
        ),
    ),
    Table(
        "payloads",
        "Prompt and samples of the groups that may have to be trained (again): admitted ones that are not trained, and "
        "those of the batches since the oldest checkpoint that is kept.",
        (
            Column("group_id", "INTEGER PRIMARY KEY", "The group."),
            Column("body", "BLOB NOT NULL", "The group with its tokens and log-probs, as msgpack."),
        ),
    ),
    Table(
        "claims",
        "Who has had this ledger, drives and Buffers. Only the highest epoch may write.",
        (
            Column(
                "epoch",
                "INTEGER PRIMARY KEY",
                "1000 n is drive n of the run, counted from 0, and 1000 n + k the k-th Buffer in it.",
            ),
            Column("claimed_at", "REAL NOT NULL", "When it became the writer."),
        ),
    ),
    Table(
        "run",
        "One row: what must be the same whenever the run is resumed.",
        (
            Column("only", "INTEGER PRIMARY KEY CHECK (only = 0)", "Always 0."),
            Column("seed", "INTEGER NOT NULL", "`run.seed`."),
            Column("num_rows", "INTEGER NOT NULL", "Of the dataset."),
            Column("shuffle", "INTEGER NOT NULL", "1: the rows are shuffled, each epoch anew."),
            Column("samples_per_group", "INTEGER NOT NULL", "Samples drawn for a prompt."),
            Column("groups_per_batch", "INTEGER NOT NULL", "Groups that a step trains."),
        ),
    ),
    Table(
        "groups",
        "Every group that was granted.",
        (
            Column("group_id", "INTEGER PRIMARY KEY", "Counts from 0, without gaps; never used again."),
            Column("ordinal", "INTEGER", "Place of its prompt in the endless stream of prompts."),
            Column("min_version", "INTEGER", "Engines start it with this version or a newer one."),
            Column("deadline_version", "INTEGER", "The last learner version at which a batch may take it."),
            Column("max_staleness", "INTEGER", "Bound of the policy that it was granted under."),
            Column("state", "TEXT NOT NULL", "`granted`, `admitted`, `leased` (in a batch), `trained` or `closed`."),
            Column("is_requeued", "INTEGER NOT NULL DEFAULT 0", "1: closed, and its prompt is granted anew."),
            Column("version", "INTEGER", "Of the first batch that has it: the version that training it makes."),
            Column("position", "INTEGER", "In that batch, from 0."),
            Column("granted_at", "REAL", "When it was granted."),
            Column("admitted_at", "REAL", "When it was admitted."),
            Column("ended_at", "REAL", "When it was trained or closed."),
        ),
    ),
    Table(
        "samples",
        "Every sample that has come to the Buffer. Those of groups in state `granted` have no row yet: they are in the "
        "system, `run.samples_per_group` for each group; of an evaluation `evaluation_groups.num_samples`.",
        (
            Column("group_id", "INTEGER NOT NULL", "Its group; below 0 one of an evaluation."),
            Column("sample_index", "INTEGER NOT NULL", "In its group; i + n replaces a failed i of a group of n."),
            Column("attempt", "INTEGER", "How often it was issued again. NULL, as the next two: no response came."),
            Column("engine", "TEXT", "Which engine finished it."),
            Column("outcome", "TEXT", "`completed`, `truncated` or `policy_error`."),
            Column("num_tokens", "INTEGER NOT NULL", "Of the response."),
            Column("num_given_tokens", "INTEGER NOT NULL DEFAULT 0", "Of these, tokens that the model did not make."),
            Column("oldest_version", "INTEGER", "The oldest weights that made one of its tokens."),
            Column("newest_version", "INTEGER", "The newest ones."),
            Column("reward", "REAL", "As scored."),
            Column("state", "TEXT", "Terminal state; NULL while it is in the system."),
            Column("cause", "TEXT", "Why it ended so; empty when it was trained."),
            Column("version", "INTEGER", "The version that training it made, the first time."),
            *COUNTED,
        ),
        key="group_id, sample_index",
    ),
    Table(
        "reuses",
        "Every further use of a group, where groups are trained more than once (`staleness.reuse`): the first is in "
        "`groups`. It changes nothing about the ends of its samples.",
        (
            Column("group_id", "INTEGER NOT NULL", "The group."),
            Column("use", "INTEGER NOT NULL", "Which use of it, from 2."),
            Column("version", "INTEGER NOT NULL", "Of the batch that has it again; trained if `steps` has that."),
            Column("position", "INTEGER NOT NULL", "In that batch, from 0."),
            Column("max_uses", "INTEGER NOT NULL", "The bound that the batch has to keep."),
        ),
        key="group_id, use",
    ),
    Table(
        "reasons",
        "Why samples failed, or were dropped by an error, as soon as that is known: before their groups have ended. "
        "Samples that end for what they are (too long, without spread) have no reason.",
        (
            Column("group_id", "INTEGER NOT NULL", "The group; below 0 one of an evaluation."),
            Column("sample_index", "INTEGER NOT NULL", "In its group."),
            Column("state", "TEXT NOT NULL", "`failed`, or `filtered` where a filter failed on it."),
            Column("cause", "TEXT NOT NULL", "As in `samples`."),
            Column("kind", "TEXT NOT NULL", "The reason without what varies: exception and line."),
            Column("reason", "TEXT NOT NULL", "Exception, message, file and line. Part of it is foreign text."),
            Column("noted_at", "REAL NOT NULL", "When it was written down."),
        ),
        key="group_id, sample_index",
    ),
    Table(
        "evaluations",
        "Every evaluation that was opened. At most one is open.",
        (
            Column("number", "INTEGER PRIMARY KEY", "Counts from 0."),
            Column("version", "INTEGER NOT NULL", "That was asked for: no older weights start a sample of it."),
            Column("is_pinned", "INTEGER NOT NULL", "1: every token is made by this version."),
            Column("state", "TEXT NOT NULL", "`open`, or `done`: every sample of it has ended."),
            Column("num_groups", "INTEGER NOT NULL", "Rows of all its datasets."),
            Column("num_samples", "INTEGER NOT NULL", "Samples of all its groups."),
            Column("num_ended", "INTEGER NOT NULL", "Groups of which every sample has ended."),
            Column("opened_at", "REAL NOT NULL", "When it was."),
            Column("ended_at", "REAL", "When the last of its groups had ended."),
        ),
    ),
    Table(
        "evaluation_groups",
        "Every group of an evaluation: one row of a dataset. Its samples are in `samples`.",
        (
            Column("group_id", "INTEGER PRIMARY KEY", "−1, −2, …; shown to people as e0, e1, …; never used again."),
            Column("evaluation", "INTEGER NOT NULL", "Number of the evaluation."),
            Column("dataset", "INTEGER NOT NULL", "Index in the scenario's `evaluation.datasets`."),
            Column("dataset_name", "TEXT NOT NULL", "Its name."),
            Column("row_number", "INTEGER NOT NULL", "Of the dataset, from 0."),
            Column("num_samples", "INTEGER NOT NULL", "Samples that are drawn."),
            Column("state", "TEXT NOT NULL", "`granted`, or `evaluated`: every sample of it has ended."),
            Column("ended_at", "REAL", "When it had."),
        ),
    ),
    Table(
        "batches",
        "Leases: each batch as it was fixed for good. Its groups are those with its `version`, by `position`, in "
        "`groups` and in `reuses`.",
        (
            Column("version", "INTEGER PRIMARY KEY", "The version that training it makes."),
            Column("state", "TEXT NOT NULL", "`leased` or `trained`."),
            Column("num_groups", "INTEGER NOT NULL", "Groups in it."),
            Column("max_staleness", "INTEGER NOT NULL", "The bound that it has to keep."),
            Column("mask_stale", "INTEGER NOT NULL", "1: older tokens get no loss."),
            Column("update_mode", "TEXT NOT NULL", "How engines take the version that it makes."),
            Column("is_last", "INTEGER NOT NULL", "1: the last one of the run."),
            Column("leased_at", "REAL NOT NULL", "When it was fixed."),
        ),
    ),
    Table(
        "steps",
        "Receipts: what the Learner has trained.",
        (
            Column("version", "INTEGER PRIMARY KEY", "The version that was made."),
            Column("sequence", "INTEGER NOT NULL", "Of its entry."),
            Column("num_groups", "INTEGER NOT NULL", "Groups that were trained."),
            Column("num_trained_tokens", "INTEGER NOT NULL", "Tokens with a loss."),
            Column("num_masked_tokens", "INTEGER NOT NULL", "Tokens that were too old to have one."),
            Column("max_staleness", "INTEGER NOT NULL", "Age of the oldest trained token, in versions."),
            Column("recorded_at", "REAL NOT NULL", "When the receipt was written down."),
        ),
    ),
    Table(
        "checkpoints",
        "Checkpoints that were saved.",
        (
            Column("version", "INTEGER PRIMARY KEY", "The version that it holds."),
            Column("path", "TEXT NOT NULL", "Its folder."),
            Column("is_kept", "INTEGER NOT NULL", "1: the run can be resumed from it; 0: it may have been deleted."),
            Column("recorded_at", "REAL NOT NULL", "When it was written down."),
        ),
    ),
    Table(
        "versions",
        "Versions that enough engines have come to serve.",
        (
            Column("version", "INTEGER PRIMARY KEY", "The version."),
            Column("announced_at", "REAL NOT NULL", "When that was written down."),
        ),
    ),
    Table(
        "policies",
        "Changes of the staleness policy while the run goes on.",
        (
            Column("sequence", "INTEGER PRIMARY KEY", "Of its entry; what is granted after it follows the policy."),
            Column("policy", "TEXT NOT NULL", "Its name."),
            Column("max_staleness", "INTEGER NOT NULL", "Its bound."),
            Column("update_mode", "TEXT NOT NULL", "How engines take new weights."),
            Column("on_stale", "TEXT NOT NULL", "What is done about groups that could become too old."),
            Column("recorded_at", "REAL NOT NULL", "When it was written down."),
        ),
    ),
    Table(
        "pauses",
        "Where an operator paused new grants, and let them go on.",
        (
            Column("sequence", "INTEGER PRIMARY KEY", "Of its entry."),
            Column("is_paused", "INTEGER NOT NULL", "1: nothing more is granted for training; 0: it is again."),
            Column("recorded_at", "REAL NOT NULL", "When it was written down."),
        ),
    ),
    Table(
        "engines",
        "The engines of the run, where they may join and leave.",
        (
            Column("sequence", "INTEGER PRIMARY KEY", "Of its entry; these are the engines from there on."),
            Column("names", "TEXT NOT NULL", "Their names, as a JSON list."),
            Column("recorded_at", "REAL NOT NULL", "When it was written down."),
        ),
    ),
    Table(
        "snapshot",
        "At most one row: what the first entries come to, so that a new Buffer need not read the whole log. A cache.",
        (
            Column("only", "INTEGER PRIMARY KEY CHECK (only = 0)", "Always 0."),
            Column("form", "INTEGER NOT NULL", "`SNAPSHOT_FORM` in messages/books.py; of another form it is not read."),
            Column("sequence", "INTEGER NOT NULL", "The last entry that it covers."),
            Column("digest", "BLOB NOT NULL", "SHA-256 of `sequence` as 8 bytes and `body`."),
            Column("body", "BLOB NOT NULL", "As msgpack, without payloads."),
        ),
    ),
)

BALANCE: Final = Table(
    "balance",
    "A view: every issued sample once, by what became of it. Adding up `num_samples` gives what was issued.",
    (
        Column("state", "", "Terminal state, or `in the system`."),
        Column("cause", "", "Why."),
        Column("num_samples", "", "Samples."),
        Column("num_tokens", "", "Their tokens, as far as they have been reported."),
    ),
)

REASON_COUNTS: Final = Table(
    "reason_counts",
    "A view: how many samples failed for which kind of reason, most frequent first.",
    (
        Column("state", "", "As in `reasons`."),
        Column("cause", "", "As in `reasons`."),
        Column("kind", "", "As in `reasons`."),
        Column("num_samples", "", "Samples."),
        Column("example", "", "One of their reasons in full."),
    ),
)
VIEWS: Final = (BALANCE, REASON_COUNTS)

_REASONS_QUERY: Final = """
SELECT state, cause, kind, count(*) AS num_samples, min(reason) AS example FROM reasons
    GROUP BY state, cause, kind ORDER BY num_samples DESC
"""
_BALANCE_QUERY: Final = """
SELECT state, cause, count(*) AS num_samples, sum(num_tokens) AS num_tokens FROM samples
    WHERE state IS NOT NULL GROUP BY state, cause
UNION ALL
SELECT 'in the system', 'admitted', count(*), coalesce(sum(num_tokens), 0) FROM samples WHERE state IS NULL
UNION ALL
SELECT 'in the system', 'granted', count(*) * coalesce((SELECT samples_per_group FROM run), 0), 0 FROM groups
    WHERE state = 'granted'
UNION ALL
SELECT 'in the system', 'evaluation', sum(num_samples), 0 FROM evaluation_groups WHERE state = 'granted'
    GROUP BY state
"""


def schema_statements() -> list[str]:
    """What makes an empty file a ledger."""
    return [*map(_creation, TABLES), *_views()]


def upgrade_statements(form: int) -> list[str]:
    """What makes a ledger of a form that is ``OLDER_READABLE`` one of this form."""
    columns = [f"ALTER TABLE samples ADD COLUMN {column.name} {column.declaration}" for column in COUNTED]
    tables = [_creation(table) for table in TABLES if TABLES_SINCE.get(table.name, form) > form]
    views = zip(VIEWS, _views(), strict=True)
    added = [made for view, made in views if TABLES_SINCE.get(view.name, form) > form]
    return [*(columns if form < COUNTED_SINCE else []), *tables, *added]


def _creation(table: Table) -> str:
    columns = [f"{column.name} {column.declaration}" for column in table.columns]
    if table.key:
        columns.append(f"PRIMARY KEY ({table.key})")
    options = "STRICT, WITHOUT ROWID" if table.key else "STRICT"
    return f"CREATE TABLE {table.name} ({', '.join(columns)}) {options}"


def _views() -> list[str]:
    queries = ((BALANCE, _BALANCE_QUERY), (REASON_COUNTS, _REASONS_QUERY))
    return [f"CREATE VIEW {view.name} AS {query}" for view, query in queries]


def tables_markdown() -> str:
    """The reference of tables and columns in ``docs/ledger.md``."""
    parts: list[str] = []
    for table in (*TABLES, *VIEWS):
        rows = "".join(f"| `{column.name}` | {_type(column)} | {column.meaning} |\n" for column in table.columns)
        parts.append(f"### `{table.name}`\n\n{table.meaning}\n\n| column | type | meaning |\n|---|---|---|\n{rows}")
    return "\n".join(parts)


def _type(column: Column) -> str:
    return column.declaration.partition(" ")[0].lower()
