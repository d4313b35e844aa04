"""The oracle's books of evaluations: what must be true of them after every event.

* Evaluations are numbered in order and one is open at a time; each is of a version that was due and that engines serve,
  and begins where the groups of the one before it ended.
* Every group of an open one is recorded once, with every sample of it once: evaluated, or failed for good.
* No sample is started with weights older than the version, and of a pinned one no token is made by any other. While a
  pinned one is due or open, no batch is leased.
* Each evaluation that the schedule wants is made, or a later one took its place before it could begin; the last one
  always is. Each is told of as finished, always the same, and not before it is.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from penstock.messages.evaluation import Evaluation, EvaluationFinished, EvaluationOpened, GroupEvaluated
from penstock.messages.samples import TerminalState
from trials.oracle_checks import assert_whole, versions_of

if TYPE_CHECKING:
    from penstock.actors.buffer.evaluating import EvaluationSchedule
    from penstock.messages.flow import SampleIssued
    from penstock.messages.samples import Sample


class WatchedEvaluation(msgspec.Struct):
    """One evaluation."""

    opened: Evaluation
    rows: dict[int, GroupEvaluated] = {}

    @property
    def is_done(self) -> bool:
        return len(self.rows) == self.opened.num_groups


class EvaluationWatch:
    """All evaluations of a run."""

    def __init__(self, schedule: EvaluationSchedule | None) -> None:
        self._schedule = schedule
        self.evaluations: list[WatchedEvaluation] = []
        self.told: dict[int, EvaluationFinished] = {}
        """What the supervisor heard, by number."""
        self.num_issued = 0
        self.ended: Counter[TerminalState] = Counter()
        self._due = 0 if schedule is not None and schedule.before_first else None

    @property
    def num_in_system(self) -> int:
        """Samples that have not ended."""
        return self.num_issued - self.ended.total()

    @property
    def _open(self) -> WatchedEvaluation | None:
        newest = self.evaluations[-1] if self.evaluations else None
        return None if newest is None or newest.is_done else newest

    def _of(self, group_id: int) -> WatchedEvaluation:
        for watched in reversed(self.evaluations):
            if watched.opened.place_of(group_id) is not None:
                return watched
        raise AssertionError(f"group {group_id} belongs to no evaluation that was opened")

    # --- what travels -----------------------------------------------------------------------------------------

    def issued(self, event: SampleIssued) -> None:
        """PromptSource sends a sample to an engine."""
        opened = self._of(event.key.group_id).opened
        place = opened.place_of(event.key.group_id)
        assert place is not None
        assert event.key.index < place.samples_per_prompt, f"{event.key} replaces a sample of an evaluation"
        assert (event.min_version, event.group_size) == (opened.version, place.samples_per_prompt)
        assert (event.prompt.row, event.prompt.dataset) == (place.row, place.dataset)

    def generated(self, sample: Sample) -> None:
        """An engine has finished one."""
        assert_whole(sample)
        opened, versions = self._of(sample.key.group_id).opened, versions_of([sample])
        assert not versions or min(versions) >= opened.version, f"{sample.key} has older tokens than {opened.version}"
        if opened.is_pinned:
            assert set(versions) <= {opened.version}, f"{sample.key} has tokens of {versions}, not of {opened.version}"

    def finished(self, event: EvaluationFinished) -> None:
        """The supervisor hears that one is done."""
        watched = self.evaluations[event.number]
        assert watched.is_done, f"evaluation {event.number} is said to be done and is not"
        assert (event.version, event.is_pinned) == (watched.opened.version, watched.opened.is_pinned)
        rows = {place.group_id: event.datasets[place.dataset].rows[place.row] for place in watched.opened.places()}
        assert rows == {group_id: entry.row for group_id, entry in watched.rows.items()}
        assert self.told.setdefault(event.number, event) == event, "one evaluation is told of in two ways"

    # --- the ledger -------------------------------------------------------------------------------------------

    def opened(self, entry: EvaluationOpened, *, announced: int | None) -> None:
        """An evaluation is recorded."""
        evaluation, schedule = entry.evaluation, self._schedule
        assert schedule is not None, "nothing is to be evaluated"
        assert self._open is None, "two evaluations are open"
        assert evaluation.number == len(self.evaluations)
        before = self.evaluations[-1].opened if self.evaluations else None
        assert evaluation.first_place == (0 if before is None else before.first_place + before.num_groups)
        assert before is None or evaluation.version > before.version, "a version is evaluated twice"
        assert announced is not None
        assert announced >= evaluation.version, f"version {evaluation.version} is evaluated, served is {announced}"
        assert evaluation.version == self._due, f"version {evaluation.version} is evaluated, due is {self._due}"
        assert evaluation.is_pinned == schedule.is_pinned
        assert evaluation.datasets == schedule.datasets
        self._due = None
        self.evaluations.append(WatchedEvaluation(evaluation))
        self.num_issued += evaluation.num_samples

    def evaluated(self, entry: GroupEvaluated) -> None:
        """A group of one has ended."""
        watched = self._open
        assert watched is not None, "a group is evaluated, and no evaluation is open"
        place = watched.opened.place_of(entry.group_id)
        assert place is not None, f"group {entry.group_id} is of another evaluation"
        assert entry.group_id not in watched.rows, f"group {entry.group_id} is evaluated twice"
        assert (entry.evaluation, entry.dataset, entry.row.row) == (watched.opened.number, place.dataset, place.row)
        indices = [sample.index for sample in entry.row.samples] + [end.key.index for end in entry.row.missing]
        assert sorted(indices) == list(range(place.samples_per_prompt)), indices
        for sample in entry.row.samples:
            assert sample.reward in (0.0, 1.0), sample
            assert sum(span.num_tokens for span in sample.spans) == sample.num_tokens
            self.ended[TerminalState.EVALUATED] += 1
        for end in entry.row.missing:
            assert end.state is TerminalState.FAILED, end
            assert end.key.group_id == entry.group_id
            self.ended[TerminalState.FAILED] += 1
        watched.rows[entry.group_id] = entry

    def leased(self, version: int) -> None:
        """A batch is, which makes this version."""
        schedule, open_one = self._schedule, self._open
        if schedule is None or not schedule.is_pinned:
            return
        assert open_one is None, f"batch {version} is leased while a pinned evaluation is open"
        assert self._due is None, f"batch {version} is leased while version {self._due} is to be evaluated"

    def stepped(self, version: int, *, is_last: bool) -> None:
        """A batch was trained."""
        schedule = self._schedule
        if schedule is None:
            return
        is_wanted = schedule.every is not None and version % schedule.every == 0
        if is_wanted and (self._due is None or self._open is not None):
            self._due = version
        if is_last and schedule.at_end:
            self._due = version

    def ran_out(self, version: int) -> None:
        """Nothing more can be trained."""
        schedule = self._schedule
        newest = self.evaluations[-1].opened.version if self.evaluations else -1
        if schedule is not None and schedule.at_end and newest < version:
            self._due = version

    def assert_ended(self, version: int) -> None:
        """Nothing is due or open at the end of a run that trained up to this version."""
        assert self._due is None, f"version {self._due} was to be evaluated"
        assert self._open is None, "the run ended while an evaluation was open"
        assert self.num_in_system == 0
        schedule = self._schedule
        if schedule is not None and schedule.at_end:
            assert self.evaluations, "nothing was evaluated"
            assert self.evaluations[-1].opened.version == version, "the last version was not evaluated"
        if schedule is not None and schedule.is_pinned and schedule.every:
            wanted = {v for v in range(1, version + 1) if v % schedule.every == 0}
            assert wanted <= {watched.opened.version for watched in self.evaluations}, "a pinned one was left out"
