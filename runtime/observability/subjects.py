"""What an event is about: one sample, one group, one step or one version of the weights, or nothing in particular.

The event log names it beside the event, and whoever reads the log finds by it what was handled for a sample.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

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
    WeightsCopied,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import group_name
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
    from penstock.messages.samples import SampleKey


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
    | WeightsCopied
    | WeightsStagedLocally
    | WeightsSwapped
)
_WithManifest = WeightsExported | WeightsStaged | WeightsPublished


def _of_admitted(event: GroupAdmitted) -> str:
    return group_name(event.group.group_id)


def _of_group(event: GroupRejected | GroupJudged | GroupScored) -> str:
    return group_name(event.group_id)


def _of_step(event: _OfStep) -> str:
    """The step that makes this version."""
    return step_subject(event.version)


def _of_version(event: _OfVersion) -> str:
    """This version on its way to the engines."""
    return version_subject(event.version)


def _of_manifest(event: _WithManifest) -> str:
    return version_subject(event.manifest.version)


def step_subject(version: int) -> str:
    """What events about the step that makes this version are about."""
    return f"step {version}"


def version_subject(version: int) -> str:
    """What events about this version on its way to the engines are about."""
    return f"version {version}"


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
"""Of events about one sample, nearly all of a run: so no Python code runs for one."""
SUBJECTS: Final[dict[type[Event], Callable[[Any], object]]] = {
    **KEY_OF,
    GroupScored: _of_group,
    GroupAdmitted: _of_admitted,
    GroupRejected: _of_group,
    GroupJudged: _of_group,
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
    WeightsCopied: _of_version,
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
