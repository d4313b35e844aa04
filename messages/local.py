"""Events that never leave their process: what backends answer to commands, and timers.

Every task that a shell starts ends in exactly one of these; no callback ever touches an actor's state.
"""

from __future__ import annotations

from typing import ClassVar

from penstock.messages.base import Delivery, Event, Metric, Value
from penstock.messages.flow import GroupRow
from penstock.messages.samples import Group, Outcome, Part, Prompt, Reward, SampleKey, VersionSpan
from penstock.messages.top_logprobs import TopLogprobs
from penstock.messages.weights import WeightDetour, WeightManifest


class LocalEvent(Event, frozen=True, kw_only=True):
    """Base of the events that stay in their process."""

    delivery: ClassVar[Delivery] = Delivery.LOCAL


class Started(LocalEvent, frozen=True, kw_only=True):
    """The first event of every actor: its shell runs."""

    epoch: int


class TimerFired(LocalEvent, frozen=True, kw_only=True):
    """The timer with this key has run out."""

    key: str


class FetchedPrompt(Value, frozen=True, array_like=True):
    """One granted group with its prompt."""

    group_id: int
    prompt: Prompt


class PromptsFetched(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``FetchPrompts``."""

    prompts: tuple[FetchedPrompt, ...]


class RowsDrawn(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``ChooseRows``."""

    rows: tuple[GroupRow, ...]


class EngineOpened(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``OpenEngine``: the engine is up (it has no weights of the run yet)."""

    num_slots: int
    notices: tuple[str, ...] = ()
    """What people should know of how it came up: sentences for the terminal, the ledger and the log."""
    passes_on_at: str = ""
    """Where its process serves the weights that it has to other engines; empty: it does not."""


class GenerationAdvanced(LocalEvent, frozen=True, kw_only=True):
    """Tokens since the last such event of this request, in steps that the engine chooses."""

    key: SampleKey
    attempt: int
    from_token: int
    chunk: Part


class GenerationEnded(LocalEvent, frozen=True, kw_only=True):
    """The end of a request, with everything it generated (its prefix included)."""

    key: SampleKey
    attempt: int
    outcome: Outcome
    """``Cancelled("interrupted")`` after ``InterruptGenerations``, ``Cancelled("aborted")`` after an abort."""
    part: Part
    parts: tuple[Part, ...] = ()
    """Where the response is several: they, and ``part`` is all their tokens in the order in which they were made."""


class TurnTaken(Value, frozen=True, kw_only=True, tag=True):
    """A turn of the model in an episode, or the stretch of one up to an interruption."""

    number: int
    """Counted from 1 over all conversations of the episode."""
    conversation: int
    begin_ns: int
    """Unix time, as ``end_ns``."""
    end_ns: int
    num_context_tokens: int
    """What the model had read before it said the first token of the turn."""
    spans: tuple[VersionSpan, ...]
    """Its tokens in this stretch, by the version that made them."""
    ending: str
    """``end_token``, ``stop_string``, ``length``, ``interrupted`` or ``cut_off``; the last ends the episode with it."""
    is_chat: bool
    is_trained: bool
    masked: str = ""
    """Why its tokens are not trained although those of its conversation are; empty: they are, or the conversation is
    not."""


class ToolCalled(Value, frozen=True, kw_only=True, tag=True):
    """A call that an episode has made of a tool, an environment or another server. What was asked and what was answered
    are not told: both are foreign text, and large."""

    after_turn: int
    """Number of the turn that it follows."""
    name: str
    call_id: str = ""
    """As the model's own call has it; empty where the function called by itself."""
    begin_ns: int
    """Unix time, as ``end_ns``."""
    end_ns: int
    error: str = ""
    """Class of the exception that it ended with."""


class EpisodeMoved(LocalEvent, frozen=True, kw_only=True):
    """An episode begins or ends a turn of the model, or has called a tool: for traces and the accounting of time."""

    key: SampleKey
    attempt: int
    num_outside: int
    """Of all requests that run here so many wait for tools, environments and agents, and ask nothing of the engine."""
    step: TurnTaken | ToolCalled | None = None
    """What has ended."""


class WeightsStagedLocally(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``FetchWeights``."""

    version: int
    publish: int
    digest: str
    """As computed over what was fetched; empty when fetching failed."""
    error: str = ""
    detours: tuple[WeightDetour, ...] = ()
    """Other engines that did not give what they were asked for."""


class WeightsSwapped(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``ApplyWeights``: tokens from here on are made by this version."""

    version: int
    publish: int
    digest: str
    canary_logprobs: bytes = b""
    layout: str = ""
    checksum: str = ""
    """See ``WeightsApplied``."""


class EngineSlept(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``SleepEngine``: it holds no device memory."""


class ScoringMoved(LocalEvent, frozen=True, kw_only=True):
    """A reward model has begun or ended the score of a sample."""

    num_open: int
    """Samples that it has now."""


class LogprobsComputed(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``ComputeLogprobs``: float32 bytes for each text, as many as it has tokens; or none of them, and the
    reason."""

    key: SampleKey
    attempt: int
    logprobs: tuple[bytes, ...] = ()
    error: str = ""
    top: tuple[TopLogprobs, ...] = ()
    """For each text, where the teacher is to say it."""


class SampleJudged(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``Score``: a reward, or the reason why there is none."""

    key: SampleKey
    attempt: int
    reward: Reward | None
    reason: str = ""


class GroupScored(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``ScoreGroup``: what each of the samples got, in their order."""

    group_id: int
    samples: tuple[SampleJudged, ...]


class GroupJudged(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``JudgeGroup``: whether a user's filter keeps the group."""

    group_id: int
    keep: bool
    cause: str = ""
    is_failure: bool = False
    """There is no verdict: the filter failed on it."""
    reason: str = ""
    """What the function failed with."""


class DroppedSample(Value, frozen=True, array_like=True):
    """A sample that a user's filter does not keep."""

    index: int
    cause: str
    reason: str = ""
    """What the filter failed with, where it did."""


class SamplesJudged(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``JudgeSamples``: which samples a user's filter drops. The others are kept."""

    group_id: int
    dropped: tuple[DroppedSample, ...]


class BatchFetched(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``FetchBatch``."""

    version: int
    groups: tuple[Group, ...]
    is_gone: bool = False
    """They were released."""


class SamplesArchived(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``ArchiveSamples``: they are on disk."""

    last_version: int


class LearnerOpened(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``OpenLearner``: model and optimizer are there as at this version."""

    version: int
    notices: tuple[str, ...] = ()
    """What people should know of how they came there: sentences for the terminal, the report and the log."""


class BatchTrained(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``Train``."""

    version: int
    num_trained_tokens: int
    num_masked_tokens: int
    metrics: tuple[Metric, ...]
    notices: tuple[str, ...] = ()
    """What people should know about it: sentences for the terminal, the report and the log."""


class WeightsCopied(LocalEvent, frozen=True, kw_only=True):
    """First answer to ``PublishWeights``, of a backend that needs the weights no longer: the next batch may change
    them, while it looks at the copy. ``WeightsPublished`` follows."""

    version: int
    size_bytes: int


class WeightsPublished(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``PublishWeights``: they lie where engines can fetch them."""

    manifest: WeightManifest


class CheckpointWritten(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``SaveCheckpoint``."""

    version: int
    path: str


class LearnerSlept(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``SleepLearner``: it holds no device memory."""


class LearnerWoken(LocalEvent, frozen=True, kw_only=True):
    """Answer to ``WakeLearner``: it is on its device again."""
