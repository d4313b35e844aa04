"""A snapshot of the Buffer's books: what the fold of the ledger's first entries comes to.

Invariants:

* It is a cache. Whoever finds it missing, of another form, made under other settings or damaged reads the log instead,
  which says the same; nothing else is decided by it.
* It has no payloads: those are in the ledger, which knows the groups that still need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.messages.base import Value
from penstock.messages.evaluation import Evaluation, EvaluationFinished, GroupEvaluated
from penstock.messages.flow import GrantSpan, SettledState
from penstock.messages.ledger import BatchLeased, CheckpointRecorded, GroupRecorded, PolicyRecorded, RunRecorded
from penstock.messages.reasons import ReasonCount
from penstock.messages.training import Balance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.messages.ledger import LedgerEntry

SNAPSHOT_FORM: Final = 1
"""Of the snapshot, and of the fold that it stands for: one of another form is not read."""


class OpenGroup(Value, frozen=True, array_like=True):
    """A group that is granted and neither trained nor closed."""

    group_id: int
    ordinal: int
    min_version: int
    deadline_version: int
    max_staleness: int
    record: GroupRecorded | None
    """Of one that has come in."""


class KeptGrants(Value, frozen=True, kw_only=True):
    """What was granted, as far as it is still needed."""

    total: int
    next_ordinal: int
    again: tuple[int, ...]
    """Prompts that wait to be granted anew."""
    num_requeued: tuple[tuple[int, int], ...]
    """Prompts that were granted anew and have not ended, with how often."""
    spans: tuple[GrantSpan, ...]
    """Of the groups above the settled floor."""


class KeptRejections(Value, frozen=True, kw_only=True):
    """Groups that the Filter turned away."""

    num_since_progress: int
    rejected: tuple[tuple[str, int], ...]
    """By cause."""
    kept: tuple[tuple[str, int], ...]
    """Taken in spite of it."""


class KeptFailures(Value, frozen=True, kw_only=True):
    """Samples that failed."""

    num_samples: int
    has_scored: bool
    counts: tuple[ReasonCount, ...]
    noted: tuple[tuple[int, tuple[int, ...]], ...]
    """Of groups that have not gone out: group, and indices of the samples."""


class KeptEvaluations(Value, frozen=True, kw_only=True):
    """Which evaluation is due, open and done."""

    due: int | None
    open: Evaluation | None
    number: int
    finished: EvaluationFinished | None
    newest_version: int
    next_place: int
    rows: tuple[GroupEvaluated, ...]


class KeptPlaces(Value, frozen=True, kw_only=True):
    """Groups that were drawn by their places in the stream of prompts."""

    num_came_in: int
    num_granted: int
    again: tuple[int, ...]


class BooksSnapshot(Value, frozen=True, kw_only=True):
    """The books of a run that chooses no rows, trains no group again and forms its own batches."""

    settings: str
    """Of the Buffer that made it; under others the same entries may come to something else."""
    identity: RunRecorded | None
    policy: PolicyRecorded | None
    is_paused: bool
    version: int
    announced: int | None
    released_through: int
    num_trained_groups: int
    max_staleness_seen: int
    leases: tuple[BatchLeased, ...]
    """Since the newest checkpoint; the last one may be out."""
    checkpoints: tuple[CheckpointRecorded, ...]
    groups: tuple[OpenGroup, ...]
    """In the order of their issue."""
    ready: tuple[int, ...]
    """Those of them that are in no batch, in the order in which they came in."""
    settled: SettledState
    balance: Balance
    grants: KeptGrants
    rejections: KeptRejections
    failures: KeptFailures
    evaluations: KeptEvaluations
    places: KeptPlaces
    engines: tuple[str, ...] = ()
    """Of the run, where they may join and leave."""


class KeptBooks(NamedTuple):
    """What a ledger has of the books."""

    snapshot: BooksSnapshot | None
    """With the payloads of the groups that still need them."""
    later: Iterable[LedgerEntry]
    """The entries since."""
    problem: str = ""
    """Why a ledger of some length has no snapshot that can be used."""
