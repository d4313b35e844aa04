"""One group in the auditor's books, and what the tables of the file must say about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.backends.ledger.projection import number
from penstock.backends.ledger.tables import GRANTED, TRAINED
from penstock.messages.ledger import SampleNote
from penstock.messages.samples import SampleEnd

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.messages.flow import GrantSpan

GroupRow = tuple[int | None, ...]
"""ordinal, min_version, deadline_version, max_staleness, is_requeued, version, position"""
SampleRow = tuple[int | float | str | None, ...]
"""sample_index, attempt, engine, outcome, num_tokens, oldest, newest, reward, state, cause, version"""


class Finding(msgspec.Struct, frozen=True):
    """Something that disagrees."""

    sequence: int
    """Of the entry that disagrees with those before it; 0: the files or tables disagree with the log."""
    text: str


class AuditedGroup(msgspec.Struct):
    """One granted group."""

    group_id: int
    ordinal: int
    min_version: int
    deadline_version: int
    max_staleness: int
    state: str = GRANTED
    notes: tuple[SampleNote, ...] = ()
    """Of the samples that are in the system, while it is admitted or leased."""
    ended: dict[int, SampleEnd] = {}
    """Those of its samples that ended before it did, by index."""
    is_requeued: bool = False
    pushed: str = ""
    """The key under which it came from outside; empty: the run has made it."""
    version: int | None = None
    position: int | None = None
    digest: int | None = None
    """Digest of the group's rows, once it has ended."""
    num_uses: int = 0
    """Batches that have it."""
    num_tokens: int = 0
    """Of its samples, once it is trained; with the next, all that a further use of it is judged by."""
    oldest_versions: tuple[int | None, int | None] = (None, None)
    """Of all its tokens, and of the newest of each sample."""

    @property
    def oldest_version(self) -> int | None:
        return min((note.oldest_version for note in self.notes if note.oldest_version is not None), default=None)

    def remember(self) -> None:
        """What a use is judged by, before the notes go."""
        newest = (note.newest_version for note in self.notes if note.newest_version is not None)
        self.oldest_versions = (self.oldest_version, min(newest, default=None))
        self.num_tokens = sum(note.num_tokens for note in self.notes)

    def row(self) -> GroupRow:
        """What ``groups`` must say."""
        origin = (self.ordinal, self.min_version, self.deadline_version, self.max_staleness)
        return (*origin, int(self.is_requeued), self.version, self.position)

    def sample_rows(self, ends: Iterable[SampleEnd] = ()) -> list[SampleRow]:
        """What ``samples`` must say, by index; ``ends`` are those that the group's own end brings."""
        ended = {**self.ended, **{end.key.index: end for end in ends}}
        notes = {note.index: note for note in self.notes}
        return [_sample_row(index, notes.get(index), ended.get(index), self) for index in sorted({*notes, *ended})]


def digest(state: str, group: GroupRow, samples: Sequence[SampleRow]) -> int:
    """Of the rows about one group, comparable within this process."""
    return hash((state, group, tuple(samples)))


def granted(span: GrantSpan, offset: int, max_staleness: int) -> AuditedGroup:
    place = (span.first_group + offset, span.first_ordinal + offset)
    return AuditedGroup(*place, span.min_version, span.deadline_version, max_staleness)


def _sample_row(index: int, note: SampleNote | None, end: SampleEnd | None, group: AuditedGroup) -> SampleRow:
    if note is None:
        assert end is not None
        return (index, None, None, None, end.num_tokens, None, None, None, end.state.value, end.cause, None)
    facts = (note.attempt, note.engine, note.outcome, note.num_tokens, note.oldest_version, note.newest_version)
    fate: tuple[str | None, str | None, int | None]
    if end is not None:
        fate = (end.state.value, end.cause, None)
    elif group.state == TRAINED:
        fate = (TRAINED, "", group.version)
    else:
        fate = (None, None, None)
    return (index, *facts, number(note.reward), *fate)


def listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
