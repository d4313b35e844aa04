"""One tagged union per inbox: everything that an actor can hear, and nothing else.

``…Event`` is what ``handle`` matches exhaustively. ``…Wire`` is the part of it that other actors may send, plus
what the runtime handles before the actor (settlements, the census); the socket decodes exactly that.
"""

from __future__ import annotations

from penstock.messages.evaluation import EvaluationDue, EvaluationFinished, PublishDemanded
from penstock.messages.flow import (
    DemandGranted,
    FailuresTold,
    GenerationClosed,
    GenerationProgressed,
    GroupAdmitted,
    GroupRejected,
    PlacesGivenUp,
    RefillAsked,
    RowsChosen,
    SampleFailed,
    SampleGenerated,
    SampleIssued,
    SampleRevoked,
    SampleScored,
    SamplesSettled,
    ScoringFailed,
)
from penstock.messages.local import (
    BatchFetched,
    BatchTrained,
    CheckpointWritten,
    EngineOpened,
    EngineSlept,
    EpisodeMoved,
    GenerationAdvanced,
    GenerationEnded,
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
    ScoringMoved,
    Started,
    TimerFired,
    WeightsCopied,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.membership import (
    ActorLost,
    ActorReturned,
    EngineEmptied,
    EngineGivenUp,
    EngineJoined,
    EngineLeaving,
    EngineLost,
    EngineNoticed,
    EnginesWanted,
    LeasesAsked,
    LeasesHeld,
    LineRestored,
)
from penstock.messages.operator import EnginesAsked, GrantsPaused, OperatorAnswered, PolicyChanged, SaveAsked
from penstock.messages.teaching import TeacherAnswered, TeacherAsked
from penstock.messages.training import (
    ActorReported,
    BatchReady,
    CheckpointDemanded,
    CheckpointNamed,
    CheckpointSaved,
    CheckpointsKept,
    DeviceTurned,
    DeviceYielded,
    FailuresCounted,
    LearnerReady,
    NoticeGiven,
    RunFinished,
    StepFinished,
    StepReported,
    StopAsked,
)
from penstock.messages.waits import WaitsReported
from penstock.messages.weights import (
    DrainFinished,
    EngineOpening,
    EngineReady,
    PublishFailed,
    VersionAnnounced,
    WeightsApplied,
    WeightsCommitted,
    WeightsExported,
    WeightsFetched,
    WeightsStaged,
)

PromptSourceWire = (
    DemandGranted
    | EvaluationDue
    | SamplesSettled
    | GenerationProgressed
    | GenerationClosed
    | RefillAsked
    | LeasesHeld
    | EngineReady
    | VersionAnnounced
)
PromptSourceEvent = (
    PromptSourceWire
    | Started
    | TimerFired
    | PromptsFetched
    | RowsDrawn
    | EngineJoined
    | EngineLeaving
    | EngineLost
    | ActorLost
    | ActorReturned
    | LineRestored
)

EngineWorkerWire = (
    SampleIssued | SampleRevoked | SamplesSettled | WeightsStaged | WeightsCommitted | DeviceTurned | LeasesAsked
)
EngineWorkerEvent = (
    SampleIssued
    | SampleRevoked
    | SamplesSettled
    | WeightsStaged
    | WeightsCommitted
    | DeviceTurned
    | EngineLeaving
    | Started
    | TimerFired
    | EngineOpened
    | EngineSlept
    | GenerationAdvanced
    | GenerationEnded
    | EpisodeMoved
    | WeightsStagedLocally
    | WeightsSwapped
)

TeacherWire = TeacherAsked
TeacherEvent = TeacherAsked | Started | EngineOpened | LogprobsComputed

RewardModelEvent = Started | EngineOpened | ScoringMoved
"""Nobody sends it anything: the processes of reward functions ask its backend."""

ScorerWire = (
    SampleGenerated | SampleFailed | SamplesSettled | LeasesAsked | EngineReady | TeacherAnswered | PlacesGivenUp
)
ScorerEvent = (
    SampleGenerated
    | SampleFailed
    | SamplesSettled
    | PlacesGivenUp
    | EngineReady
    | TeacherAnswered
    | Started
    | TimerFired
    | SampleJudged
    | GroupScored
    | ActorLost
    | ActorReturned
    | LineRestored
)

FilterWire = SampleScored | ScoringFailed | SampleFailed | SamplesSettled | LeasesAsked
FilterEvent = (
    SampleScored
    | ScoringFailed
    | SampleFailed
    | SamplesSettled
    | Started
    | TimerFired
    | GroupJudged
    | SamplesJudged
    | ActorReturned
)

BufferWire = (
    GroupAdmitted
    | GroupRejected
    | FailuresTold
    | RowsChosen
    | LearnerReady
    | StepFinished
    | CheckpointSaved
    | VersionAnnounced
    | PolicyChanged
    | GrantsPaused
    | SaveAsked
    | EnginesAsked
    | EngineGivenUp
    | EngineNoticed
    | StopAsked
    | LeasesAsked
)
BufferEvent = (
    GroupAdmitted
    | GroupRejected
    | FailuresTold
    | RowsChosen
    | LearnerReady
    | StepFinished
    | CheckpointSaved
    | VersionAnnounced
    | PolicyChanged
    | GrantsPaused
    | SaveAsked
    | EnginesAsked
    | EngineGivenUp
    | EngineNoticed
    | StopAsked
    | Started
    | TimerFired
    | BatchFetched
    | SamplesArchived
)

LearnerWire = (
    BatchReady
    | CheckpointNamed
    | CheckpointsKept
    | CheckpointDemanded
    | PublishDemanded
    | VersionAnnounced
    | PublishFailed
    | DeviceYielded
)
LearnerEvent = (
    LearnerWire
    | Started
    | TimerFired
    | LearnerOpened
    | LearnerSlept
    | LearnerWoken
    | BatchTrained
    | WeightsCopied
    | WeightsPublished
    | CheckpointWritten
    | EngineJoined
    | EngineLost
)

WeightPublisherWire = (
    StepFinished | WeightsExported | WeightsFetched | WeightsApplied | DrainFinished | EngineOpening | EngineReady
)
WeightPublisherEvent = WeightPublisherWire | Started | TimerFired | EngineJoined | EngineLeaving | EngineLost

SupervisorWire = (
    StepReported
    | EvaluationFinished
    | RunFinished
    | ActorReported
    | FailuresCounted
    | NoticeGiven
    | WaitsReported
    | OperatorAnswered
    | EngineEmptied
    | EnginesWanted
)
