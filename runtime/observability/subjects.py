"""What an event is about: one sample, one group, one step or one version of the weights, or nothing in particular.

Traces put an event's span into the trace of its subject, and the event log names the subject beside the event.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.messages.flow import (
    GenerationClosed,
    GenerationProgressed,
    GroupAdmitted,
    GroupRejected,
    SampleFailed,
    SampleGenerated,
    SampleIssued,
    SampleScored,
    ScoringFailed,
)
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EpisodeMoved,
    GenerationAdvanced,
    GenerationEnded,
    GroupJudged,
    GroupScored,
    SampleJudged,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import SampleKey, group_name
from penstock.messages.training import (
    BatchReady,
    CheckpointDemanded,
    CheckpointSaved,
    LearnerReady,
    StepFinished,
    StepReported,
)
from penstock.messages.weights import (
    DrainFinished,
    VersionAnnounced,
    WeightsApplied,
    WeightsCommitted,
    WeightsExported,
    WeightsFetched,
    WeightsStaged,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.base import Event


class GroupSubject(msgspec.Struct, frozen=True, gc=False):
    """All samples of a group, by their indices."""

    group_id: int
    indices: tuple[int, ...]

    def __str__(self) -> str:
        return group_name(self.group_id)


class StepSubject(msgspec.Struct, frozen=True, gc=False):
    """The step that makes this version."""

    version: int

    def __str__(self) -> str:
        return f"step {self.version}"


class VersionSubject(msgspec.Struct, frozen=True, gc=False):
    """This version on its way to the engines."""

    version: int

    def __str__(self) -> str:
        return f"version {self.version}"


Subject = SampleKey | GroupSubject | StepSubject | VersionSubject

_OfStep = (
    BatchReady
    | StepFinished
    | StepReported
    | CheckpointDemanded
    | CheckpointSaved
    | LearnerReady
    | BatchTrained
    | CheckpointWritten
)
_OfVersion = (
    WeightsFetched
    | WeightsCommitted
    | WeightsApplied
    | DrainFinished
    | VersionAnnounced
    | WeightsStagedLocally
    | WeightsSwapped
)
_WithManifest = WeightsExported | WeightsStaged | WeightsPublished


def _of_admitted(event: GroupAdmitted) -> GroupSubject:
    """Of a group that goes on."""
    return GroupSubject(event.group.group_id, tuple(sample.key.index for sample in event.group.samples))


def _of_rejected(event: GroupRejected) -> GroupSubject:
    return GroupSubject(event.group_id, tuple(end.key.index for end in event.ended))


def _of_judged(event: GroupJudged) -> GroupSubject:
    return GroupSubject(event.group_id, (0,))


def _of_group_scored(event: GroupScored) -> GroupSubject:
    return GroupSubject(event.group_id, tuple(judged.key.index for judged in event.samples))


def _of_step(event: _OfStep) -> StepSubject:
    return StepSubject(event.version)


def _of_version(event: _OfVersion) -> VersionSubject:
    return VersionSubject(event.version)


def _of_manifest(event: _WithManifest) -> VersionSubject:
    return VersionSubject(event.manifest.version)


_key: Final[Callable[[Any], SampleKey]] = attrgetter("key")
_key_of_sample: Final[Callable[[Any], SampleKey]] = attrgetter("sample.key")
KEY_OF: Final[dict[type[Event], Callable[[Any], SampleKey]]] = {
    SampleIssued: _key,
    GenerationProgressed: _key,
    GenerationClosed: _key,
    ScoringFailed: _key,
    SampleFailed: _key,
    GenerationAdvanced: _key,
    GenerationEnded: _key,
    EpisodeMoved: _key,
    SampleJudged: _key,
    SampleGenerated: _key_of_sample,
    SampleScored: _key_of_sample,
}
"""Of events about one sample, nearly all of a run: so no Python code runs for one. Such an event comes without the
context of a trace where its sender has left its group out."""
OF_ONE_GROUP: Final[frozenset[type[Event]]] = frozenset((SampleGenerated, SampleJudged, SampleScored))
"""Of these, events that are heard where what follows is about the group of the sample or about nothing in particular:
Scorer and Filter. Elsewhere one sample makes room for another."""
SUBJECTS: Final[dict[type[Event], Callable[[Any], Subject]]] = {
    **KEY_OF,
    GroupScored: _of_group_scored,
    GroupAdmitted: _of_admitted,
    GroupRejected: _of_rejected,
    GroupJudged: _of_judged,
    BatchReady: _of_step,
    StepFinished: _of_step,
    StepReported: _of_step,
    CheckpointDemanded: _of_step,
    CheckpointSaved: _of_step,
    LearnerReady: _of_step,
    BatchTrained: _of_step,
    CheckpointWritten: _of_step,
    WeightsFetched: _of_version,
    WeightsCommitted: _of_version,
    WeightsApplied: _of_version,
    DrainFinished: _of_version,
    VersionAnnounced: _of_version,
    WeightsStagedLocally: _of_version,
    WeightsSwapped: _of_version,
    WeightsExported: _of_manifest,
    WeightsStaged: _of_manifest,
    WeightsPublished: _of_manifest,
}
"""By exact class: an inbox never hears a subclass, and a dictionary is what a hot path can afford."""


def subject_text(event: Event) -> str:
    """The subject for the event log: ``12/3``, ``12``, ``step 4``, ``version 4``; nothing for timers, membership,
    demand, settlements and the like."""
    find = SUBJECTS.get(type(event))
    return "" if find is None else str(find(event))
