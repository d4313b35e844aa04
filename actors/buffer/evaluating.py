"""Evaluations in the books: which one is due, which one is open, and what has come of it.

Evaluation is beside training. Its groups are outside admission, selection and the staleness policy; they have ids and a
settled floor of their own (:mod:`penstock.messages.evaluation`), so that nothing of training depends on them: neither
ids, nor seeds and prompts, which follow from the ids, nor the balance of what is granted and trained.

Invariants:

* At most one evaluation is open, and at most one version is due. Of versions that become due while one is open the
  newest is evaluated next: what is told late of a version that is gone would mislead. While one that is due waits for
  engines to serve it, no other takes its place, so one of them comes to its turn however quick the steps are. The last
  one is never left out.
* An evaluation is opened when engines serve the version that is due, or a newer one; its samples start with no older
  one. It is recorded before anybody hears of it.
* Every place of an open evaluation is recorded once, with all its samples; with the last one it is done.
* While a *pinned* evaluation is due or open, no newer batch is leased. So nothing newer than its version is ever
  trained before it is done, whatever the policy; every engine serves this very version, and nothing needs to be held
  back, drawn again or given up at an engine. The price is the Learner's time: it stands still meanwhile, in every
  regime alike.
* An evaluation that is not pinned holds nothing up: it goes on beside training, over swaps, and its samples say which
  versions made them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.base import Value
from penstock.messages.books import KeptEvaluations
from penstock.messages.evaluation import (
    EvaluatedDataset,
    EvaluatedRow,
    EvaluatedSample,
    Evaluation,
    EvaluationFinished,
    EvaluationShape,
    GroupEvaluated,
)
from penstock.messages.parts import joined_spans
from penstock.messages.samples import SampleEnd, TerminalState, is_evaluation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.messages.samples import Group, Sample


class EvaluationSchedule(Value, frozen=True, kw_only=True):
    """When there are evaluations, and of what."""

    every: int | None = None
    """Batches."""
    before_first: bool = False
    at_end: bool = False
    is_pinned: bool = False
    datasets: tuple[EvaluationShape, ...]
    """Together they have at least one row."""


class Evaluations:
    """A part of the books: it changes with the ledger's entries only, but for :meth:`end`, which follows from the
    rest."""

    def __init__(self, schedule: EvaluationSchedule | None) -> None:
        self.schedule = schedule
        self.due: int | None = 0 if schedule is not None and schedule.before_first else None
        """A version that is to be evaluated, as soon as engines serve it."""
        self.open: Evaluation | None = None
        self.number = 0
        """Of the next one."""
        self.finished: EvaluationFinished | None = None
        """The newest that is done."""
        self._newest_version = -1
        """That was ever opened."""
        self._next_place = 0
        self._rows: dict[int, GroupEvaluated] = {}
        """Of the open one, by group."""

    @property
    def is_busy(self) -> bool:
        """Whether one is due or open."""
        return self.due is not None or self.open is not None

    @property
    def holds_training(self) -> bool:
        """Whether no newer batch may be leased."""
        if self.open is not None and self.open.is_pinned:
            return True
        return self.due is not None and self.schedule is not None and self.schedule.is_pinned

    @property
    def num_in_system(self) -> int:
        """Samples of the open one that have not ended."""
        return sum(self._num_samples(group_id) for group_id in self.waiting())

    def waiting(self) -> Iterator[int]:
        """The groups of the open one that have not ended."""
        if self.open is not None:
            yield from (place.group_id for place in self.open.places() if place.group_id not in self._rows)

    @property
    def num_ended(self) -> int:
        """Groups of the open one that have."""
        return len(self._rows)

    def waits_for(self, group_id: int) -> bool:
        """Whether this group belongs to the open one and has not ended."""
        is_of_open = self.open is not None and self.open.place_of(group_id) is not None
        return is_of_open and group_id not in self._rows

    # --- changes ----------------------------------------------------------------------------------------------

    def granted(self) -> None:
        """Groups of training were. A run that was begun without an evaluation before its first batch gets none."""
        if self.due == 0:
            self.due = None

    def is_wanted(self, version: int) -> bool:
        """Whether this version, which has just been trained, is one of those to be evaluated on the way."""
        every = None if self.schedule is None else self.schedule.every
        return every is not None and version % every == 0

    def stepped(self, version: int) -> None:
        """A batch was trained."""
        if self.is_wanted(version) and (self.due is None or self.open is not None):
            self.due = version

    def end(self, version: int) -> None:
        """Nothing more is trained: the last evaluation is due, if it is wanted and not made yet."""
        schedule = self.schedule
        if schedule is not None and schedule.at_end and self._newest_version < version:
            self.due = version

    def next(self, max_staleness: int) -> Evaluation:
        """The one to be opened for the version that is due; ``max_staleness`` is that of training."""
        assert self.schedule is not None
        assert self.due is not None
        assert self.open is None
        return Evaluation(
            number=self.number,
            version=self.due,
            is_pinned=self.schedule.is_pinned,
            deadline_version=self.due + max_staleness + 2,
            first_place=self._next_place,
            datasets=self.schedule.datasets,
        )

    def opened(self, evaluation: Evaluation) -> None:
        """It is recorded."""
        assert self.open is None
        assert (evaluation.number, evaluation.first_place) == (self.number, self._next_place)
        self.open, self._rows = evaluation, {}
        self.number += 1
        self._next_place += evaluation.num_groups
        self._newest_version = evaluation.version
        if self.due is not None and self.due <= evaluation.version:
            self.due = None

    def evaluated(self, entry: GroupEvaluated) -> None:
        """A group of the open one has ended; with the last one, the evaluation is done."""
        evaluation = self.open
        assert evaluation is not None
        assert entry.group_id not in self._rows
        self._rows[entry.group_id] = entry
        if len(self._rows) == evaluation.num_groups:
            self.finished = self._finish(evaluation)
            self.open, self._rows = None, {}

    def _finish(self, evaluation: Evaluation) -> EvaluationFinished:
        rows: list[list[EvaluatedRow]] = [[] for _ in evaluation.datasets]
        for place in evaluation.places():
            rows[place.dataset].append(self._rows[place.group_id].row)
        datasets = tuple(
            EvaluatedDataset(
                dataset=index,
                name=shape.name,
                samples_per_prompt=shape.samples_per_prompt,
                rows=tuple(rows[index]),
            )
            for index, shape in enumerate(evaluation.datasets)
        )
        return EvaluationFinished(
            number=evaluation.number,
            version=evaluation.version,
            is_pinned=evaluation.is_pinned,
            datasets=datasets,
        )

    def kept(self) -> KeptEvaluations:
        """What a snapshot has of it."""
        return KeptEvaluations(
            due=self.due,
            open=self.open,
            number=self.number,
            finished=self.finished,
            newest_version=self._newest_version,
            next_place=self._next_place,
            rows=tuple(self._rows.values()),
        )

    def restore(self, kept: KeptEvaluations) -> None:
        """As it was then."""
        self.due, self.open, self.number, self.finished = kept.due, kept.open, kept.number, kept.finished
        self._newest_version, self._next_place = kept.newest_version, kept.next_place
        self._rows = {row.group_id: row for row in kept.rows}

    # --- entries ----------------------------------------------------------------------------------------------

    def entry_of(self, group: Group) -> GroupEvaluated:
        """The record of a group of the open one. A sample without a reward has none to be counted, so it is missing."""
        assert self.open is not None
        place = self.open.place_of(group.group_id)
        assert place is not None
        scored = [sample for sample in group.samples if sample.reward is not None]
        unscored = (_without_reward(sample) for sample in group.samples if sample.reward is None)
        row = EvaluatedRow(
            place.row,
            tuple(_evaluated(sample) for sample in sorted(scored, key=lambda sample: sample.key.index)),
            tuple(sorted((*group.ended, *unscored), key=lambda end: end.key.index)),
        )
        return GroupEvaluated(group_id=group.group_id, evaluation=self.open.number, dataset=place.dataset, row=row)

    def _num_samples(self, group_id: int) -> int:
        assert self.open is not None
        place = self.open.place_of(group_id)
        assert place is not None
        return place.samples_per_prompt

    def validate(self) -> None:
        """Assert the invariants."""
        assert all(is_evaluation(group_id) for group_id in self._rows)
        assert self.open is not None or not self._rows
        if self.open is not None:
            assert self.open.first_place + self.open.num_groups == self._next_place
            assert len(self._rows) < self.open.num_groups, "an evaluation is done and still open"
            assert self.due is None or self.due > self.open.version
        for entry in self._rows.values():
            indices = sorted([sample.index for sample in entry.row.samples] + [e.key.index for e in entry.row.missing])
            assert indices == list(range(self._num_samples(entry.group_id))), entry


def _evaluated(sample: Sample) -> EvaluatedSample:
    reward = sample.outcome.reward
    assert reward is not None
    return EvaluatedSample(
        sample.key.index,
        sample.attempt,
        sample.engine,
        str(type(sample.outcome).__struct_config__.tag),  # as it is called on the wire
        sample.num_tokens,
        sample.num_given_tokens,
        reward.value,
        joined_spans(sample.spans),
        reward.components,
        reward.answer,
    )


def _without_reward(sample: Sample) -> SampleEnd:
    return SampleEnd(
        key=sample.key,
        state=TerminalState.FAILED,
        cause="no_reward",
        num_tokens=sample.num_tokens,
        num_given_tokens=sample.num_given_tokens,
    )
