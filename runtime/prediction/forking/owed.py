"""What a backend still owes: each command that it answers, and the answer, by a key that both have.

Requests for generation are not among them: an engine's own books know how far each has come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.commands import (
    ApplyWeights,
    ArchiveGroups,
    ArchiveSamples,
    ChooseRows,
    ComputeLogprobs,
    FetchBatch,
    FetchPrompts,
    FetchWeights,
    JudgeGroup,
    JudgeSamples,
    OpenEngine,
    OpenLearner,
    PublishWeights,
    SaveCheckpoint,
    Score,
    ScoreGroup,
    SleepEngine,
    SleepLearner,
    Train,
    WakeLearner,
)
from penstock.messages.local import (
    BatchFetched,
    BatchTrained,
    CheckpointWritten,
    EngineOpened,
    EngineSlept,
    GroupJudged,
    GroupScored,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    LogprobsComputed,
    PromptsFetched,
    RowsDrawn,
    SampleJudged,
    SamplesArchived,
    SamplesJudged,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)

if TYPE_CHECKING:
    from collections.abc import Hashable

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand


def owed_by(command: AnyCommand) -> Hashable:
    """By what the answer to this command is known; None: a backend answers it at once, not at all, or it is none."""
    match command:
        case FetchPrompts():
            return PromptsFetched, frozenset(request.group_id for request in command.requests)
        case ChooseRows():
            return RowsDrawn, frozenset(command.group_ids)
        case FetchWeights():
            return WeightsStagedLocally, command.manifest.version, command.manifest.publish
        case ApplyWeights():
            return WeightsSwapped, command.manifest.version, command.manifest.publish
        case ComputeLogprobs():
            return LogprobsComputed, command.key, command.attempt
        case Score():
            return SampleJudged, command.sample.key, command.sample.attempt
        case ScoreGroup():
            return GroupScored, command.samples[0].key.group_id
        case JudgeGroup():
            return GroupJudged, command.group.group_id
        case JudgeSamples():
            return SamplesJudged, command.group.group_id
        case OpenEngine():
            return (EngineOpened,)
        case OpenLearner():
            return (LearnerOpened,)
        case SleepEngine():
            return (EngineSlept,)
        case SleepLearner():
            return (LearnerSlept,)
        case WakeLearner():
            return (LearnerWoken,)
        case Train():
            return BatchTrained, command.version
        case PublishWeights():
            return WeightsPublished, command.version, command.publish
        case SaveCheckpoint():
            return CheckpointWritten, command.version
        case FetchBatch():
            return BatchFetched, command.version
        case ArchiveSamples():
            return SamplesArchived, command.last_version
        case ArchiveGroups():
            return SamplesArchived, 0
        case _:
            return None


def answered_by(event: Event) -> Hashable:
    """By what the command is known that this event answers; None: it answers none."""
    match event:
        case PromptsFetched():
            return PromptsFetched, frozenset(each.group_id for each in event.prompts)
        case RowsDrawn():
            return RowsDrawn, frozenset(each.group_id for each in event.rows)
        case WeightsStagedLocally() | WeightsSwapped():
            return type(event), event.version, event.publish
        case LogprobsComputed() | SampleJudged():
            return type(event), event.key, event.attempt
        case GroupScored() | GroupJudged() | SamplesJudged():
            return type(event), event.group_id
        case EngineOpened() | LearnerOpened() | EngineSlept() | LearnerSlept() | LearnerWoken():
            return (type(event),)
        case BatchTrained() | CheckpointWritten() | BatchFetched():
            return type(event), event.version
        case WeightsPublished():
            return WeightsPublished, event.manifest.version, event.manifest.publish
        case SamplesArchived():
            return SamplesArchived, event.last_version
        case _:
            return None
