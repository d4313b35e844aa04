"""Evaluation: what is asked for, what came of it, and what of it is durable.

Invariants:

* An evaluation has a number of its own, counted from 0, and at most one is open at a time.
* Its groups have ids of their own. Group ``place`` of all evaluations, counted from 0 and never reused, has the id
  ``~place``, which is negative: so the ids of training, their floor, their seeds and their prompts are what they would
  be without any evaluation. An evaluation's groups are successive: dataset by dataset, row by row.
* Each of its samples ends once: ``evaluated``, with its reward, or ``failed`` for good. Nothing replaces one that has
  failed, and no reward is made up for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from penstock.messages.base import Delivery, Entry, Event, Metric, Value
from penstock.messages.flow import SettledState
from penstock.messages.samples import SampleEnd, VersionSpan, evaluation_group_id, evaluation_place

if TYPE_CHECKING:
    from collections.abc import Iterator


class EvaluationShape(Value, frozen=True, kw_only=True):
    """How much of a dataset is evaluated."""

    name: str
    num_rows: int
    """Rows 0 … num_rows−1, each once."""
    samples_per_prompt: int

    @property
    def num_samples(self) -> int:
        return self.num_rows * self.samples_per_prompt


class EvaluatedPlace(NamedTuple):
    """What one group of an evaluation is drawn for."""

    group_id: int
    dataset: int
    """Index in the scenario's ``evaluation.datasets``."""
    row: int
    samples_per_prompt: int


class Evaluation(Value, frozen=True, kw_only=True):
    """One evaluation, as it was opened."""

    number: int
    """Counts from 0."""
    version: int
    """That was asked for: engines start its samples with this version or a newer one."""
    is_pinned: bool = False
    """Every token is made by ``version``: nothing newer is trained before it is done."""
    deadline_version: int
    """Engines that rank what they run by its deadline put training first that is granted until shortly after this one
    is opened, and later training behind it: so it waits there long, but not for ever."""
    first_place: int
    """Place of its first group in the order of all groups."""
    datasets: tuple[EvaluationShape, ...]
    """Datasets in the order of the scenario."""

    @property
    def num_groups(self) -> int:
        return sum(shape.num_rows for shape in self.datasets)

    @property
    def num_samples(self) -> int:
        return sum(shape.num_samples for shape in self.datasets)

    def places(self, from_place: int = 0) -> Iterator[EvaluatedPlace]:
        """Its groups in their order, from this place on."""
        place = self.first_place
        for dataset, shape in enumerate(self.datasets):
            for row in range(max(0, from_place - place), shape.num_rows):
                yield EvaluatedPlace(evaluation_group_id(place + row), dataset, row, shape.samples_per_prompt)
            place += shape.num_rows

    def place_of(self, group_id: int) -> EvaluatedPlace | None:
        """What this group is drawn for; None when it belongs to another evaluation."""
        offset = evaluation_place(group_id) - self.first_place
        if offset < 0:
            return None
        for dataset, shape in enumerate(self.datasets):
            if offset < shape.num_rows:
                return EvaluatedPlace(group_id, dataset, offset, shape.samples_per_prompt)
            offset -= shape.num_rows
        return None


class EvaluatedSample(Value, frozen=True, array_like=True):
    """One answer that was generated and scored."""

    index: int
    """Index of the sample in its group, from 0."""
    attempt: int
    engine: str
    outcome: str
    """``completed``, ``truncated`` or ``policy_error``."""
    num_tokens: int
    """Tokens of the response."""
    num_given_tokens: int
    """Of these, tokens that the model did not make."""
    reward: float
    spans: tuple[VersionSpan, ...]
    """Which weights made which of its tokens, in order; neighbours of one version are joined."""
    components: tuple[Metric, ...] = ()
    """Components of the reward by name, where it has some."""
    answer: str = ""
    """What the reward function took for the final answer; empty: none."""

    @property
    def num_made_tokens(self) -> int:
        """Tokens that the model made."""
        return self.num_tokens - self.num_given_tokens

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.spans), default=None)

    @property
    def newest_version(self) -> int | None:
        return max((span.version for span in self.spans), default=None)


class EvaluatedRow(Value, frozen=True, array_like=True):
    """One prompt, and what became of its samples."""

    row: int
    """Of its dataset, as it is evaluated: from 0."""
    samples: tuple[EvaluatedSample, ...]
    """Samples by index."""
    missing: tuple[SampleEnd, ...] = ()
    """Those that failed for good."""


class EvaluatedDataset(Value, frozen=True, kw_only=True):
    """One dataset of an evaluation that is done."""

    dataset: int
    """Index in the scenario's ``evaluation.datasets``."""
    name: str
    samples_per_prompt: int
    rows: tuple[EvaluatedRow, ...]
    """Every one of them, in order."""


# --- events -------------------------------------------------------------------------------------------------------


class EvaluationDue(Event, frozen=True, kw_only=True):
    """Buffer → PromptSource: the evaluation that is open, recorded before this is sent; none when it is done. A full
    snapshot each time, as ``DemandGranted`` is for training."""

    evaluation: Evaluation | None
    settled: SettledState


class PublishDemanded(Event, frozen=True, kw_only=True):
    """Buffer → Learner: publish as soon as you stand at this version or a later one, on or off the grid of
    ``publish_every``, the last one too: it is to be evaluated, or an evaluation goes on after the last step."""

    version: int


class EvaluationFinished(Event, frozen=True, kw_only=True):
    """Buffer → supervisor: every sample of this evaluation has ended, and that is durable. A Buffer that takes
    another's place says it again of the newest one, so whoever counts goes by the number."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    number: int
    version: int
    """That was asked for; the spans of the samples say which versions answered."""
    is_pinned: bool = False
    datasets: tuple[EvaluatedDataset, ...]


# --- entries of the ledger ----------------------------------------------------------------------------------------


class EvaluationOpened(Entry, frozen=True, kw_only=True):
    """The groups of this evaluation may start; written before ``EvaluationDue`` is sent."""

    evaluation: Evaluation


class GroupEvaluated(Entry, frozen=True, kw_only=True):
    """Every sample of this group of an evaluation has ended. With the last of its groups an evaluation is done."""

    group_id: int
    evaluation: int
    """Number of the evaluation that the group is of."""
    dataset: int
    row: EvaluatedRow
