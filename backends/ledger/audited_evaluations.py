"""The auditor's books of evaluations, and what the tables of the file must say about them.

Invariants:

* As in :mod:`penstock.backends.ledger.audit_books`, what contradicts the books is a finding and does not enter them.
* A group that has ended keeps a hash of its row and of the rows of its samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.backends.ledger.projection import number
from penstock.backends.ledger.tables import DONE, EVALUATED, GRANTED, OPEN
from penstock.messages.evaluation import Evaluation
from penstock.messages.samples import TerminalState, group_name, is_evaluation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.messages.evaluation import EvaluationOpened, GroupEvaluated

EvaluationRow = tuple[int | str, ...]
"""number, version, is_pinned, state, num_groups, num_samples, num_ended"""
EvaluatedSampleRow = tuple[int | float | str | None, ...]
"""sample_index, attempt, engine, outcome, num_tokens, num_given_tokens, oldest, newest, reward, state, cause"""


class AuditedEvaluation(msgspec.Struct):
    """One evaluation that was opened."""

    opened: Evaluation
    digests: dict[int, int] = {}
    """Of the rows about its groups that have ended, by group."""

    @property
    def is_done(self) -> bool:
        return len(self.digests) == self.opened.num_groups

    def row(self) -> EvaluationRow:
        """What ``evaluations`` must say."""
        opened = self.opened
        state = DONE if self.is_done else OPEN
        head = (opened.number, opened.version, int(opened.is_pinned), state)
        return (*head, opened.num_groups, opened.num_samples, len(self.digests))

    def digests_by_group(self) -> Iterator[tuple[int, int]]:
        """Group id, and the digest of what the tables must say about it."""
        opened = self.opened
        for group_id, dataset, row, num_samples in opened.places():
            name = opened.datasets[dataset].name
            open_row = (opened.number, dataset, name, row, num_samples, GRANTED)
            known = self.digests.get(group_id)
            yield group_id, digest_of(open_row, []) if known is None else known


def digest_of(group: tuple[int | str, ...], samples: list[EvaluatedSampleRow]) -> int:
    """Of the rows about one group, comparable within this process."""
    return hash((group, tuple(samples)))


class AuditedEvaluations:
    """The fold over the entries of evaluations."""

    def __init__(self, find: Callable[[str], None]) -> None:
        self._find = find
        self.evaluations: list[AuditedEvaluation] = []
        self.num_in_system = 0
        """Samples of the open one that have not ended."""

    @property
    def num_places(self) -> int:
        """Groups of all of them."""
        newest = self.evaluations[-1].opened if self.evaluations else None
        return 0 if newest is None else newest.first_place + newest.num_groups

    @property
    def open_one(self) -> AuditedEvaluation | None:
        newest = self.evaluations[-1] if self.evaluations else None
        return None if newest is None or newest.is_done else newest

    def open(self, entry: EvaluationOpened, *, announced: int) -> bool:
        """Whether it enters the books."""
        evaluation, before = entry.evaluation, self.evaluations[-1].opened if self.evaluations else None
        if self.open_one is not None:
            self._find(f"evaluation {evaluation.number} is opened while evaluation {len(self.evaluations) - 1} is open")
            return False
        place = 0 if before is None else before.first_place + before.num_groups
        if (evaluation.number, evaluation.first_place) != (len(self.evaluations), place) or not evaluation.num_groups:
            self._find(
                f"evaluation {evaluation.number} begins at place {evaluation.first_place}: it must be evaluation "
                f"{len(self.evaluations)} and begin at {place}"
            )
            return False
        if evaluation.version > announced:
            self._find(f"version {evaluation.version} is evaluated, and has not been announced")
        if before is not None and evaluation.version <= before.version:
            self._find(f"version {evaluation.version} is evaluated after version {before.version}")
        self.evaluations.append(AuditedEvaluation(evaluation))
        self.num_in_system += evaluation.num_samples
        return True

    def evaluated(self, entry: GroupEvaluated) -> bool:
        """Whether it enters the books."""
        audited, name = self.open_one, group_name(entry.group_id)
        place = None if audited is None else audited.opened.place_of(entry.group_id)
        if audited is None or place is None or not is_evaluation(entry.group_id):
            self._find(f"group {name} is evaluated, and no evaluation that has it is open")
            return False
        if entry.group_id in audited.digests:
            self._find(f"group {name} is evaluated twice")
            return False
        said = (entry.evaluation, entry.dataset, entry.row.row)
        if said != (audited.opened.number, place.dataset, place.row):
            self._find(f"group {name} is said to be {said}, it is {(audited.opened.number, place.dataset, place.row)}")
            return False
        row = entry.row
        indices = sorted([sample.index for sample in row.samples] + [end.key.index for end in row.missing])
        if indices != list(range(place.samples_per_prompt)):
            self._find(f"group {name} is evaluated with the samples {indices} of {place.samples_per_prompt}")
            return False
        self._check_samples(entry, audited.opened)
        audited.digests[entry.group_id] = self._digest(entry, audited.opened)
        self.num_in_system -= place.samples_per_prompt
        return True

    def _check_samples(self, entry: GroupEvaluated, opened: Evaluation) -> None:
        name = group_name(entry.group_id)
        for sample in entry.row.samples:
            versions = sorted({span.version for span in sample.spans})
            if versions and versions[0] < opened.version:
                self._find(f"group {name} has tokens of version {versions[0]}, it is evaluated at {opened.version}")
            if opened.is_pinned and set(versions) - {opened.version}:
                self._find(f"group {name} has tokens of {versions}, it is pinned to {opened.version}")
            if sum(span.num_tokens for span in sample.spans) != sample.num_tokens:
                self._find(f"the versions of sample {name}/{sample.index} do not add up to its tokens")
        for end in entry.row.missing:
            if end.state is not TerminalState.FAILED or end.key.group_id != entry.group_id:
                self._find(f"sample {end.key} of group {name} ends as {end.state}: it can only fail")

    def _digest(self, entry: GroupEvaluated, opened: Evaluation) -> int:
        place = opened.place_of(entry.group_id)
        assert place is not None
        name = opened.datasets[place.dataset].name
        row = (opened.number, place.dataset, name, place.row, place.samples_per_prompt, EVALUATED)
        return digest_of(row, sample_rows(entry))


def sample_rows(entry: GroupEvaluated) -> list[EvaluatedSampleRow]:
    """What ``samples`` must say of a group, by index."""
    rows: list[EvaluatedSampleRow] = [
        (
            sample.index, sample.attempt, sample.engine, sample.outcome, sample.num_tokens, sample.num_given_tokens,
            sample.oldest_version, sample.newest_version, number(sample.reward), EVALUATED, "",
        )
        for sample in entry.row.samples
    ]  # fmt: skip
    for end in entry.row.missing:
        ended = (None, None, None, end.num_tokens, 0, None, None, None, end.state.value, end.cause)
        rows.append((end.key.index, *ended))
    return sorted(rows, key=_index)


def _index(row: EvaluatedSampleRow) -> int:
    index = row[0]
    assert isinstance(index, int)
    return index
