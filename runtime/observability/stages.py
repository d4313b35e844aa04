"""The stages of a sample, a step and a version, found in the events and commands of one actor.

Invariants:

* Stages follow from what one actor hears and returns; actors tell each other nothing for them.
* Everything kept between events is bounded. The oldest entry goes first, and its span is then missing, not wrong.

The stages of a sample, each in the sample's own trace, and who records them:

===========  =================  ==========================================================================
stage        recorded by        from, to
===========  =================  ==========================================================================
issue        PromptSource       its group was granted, ``SampleIssued`` sent. The first one is the root
queue        EngineWorker       ``SampleIssued`` (or an interruption), ``Generate``
generate     EngineWorker       ``Generate``, ``GenerationEnded``; the attribute ``versions`` has the spans
score        Scorer             ``SampleGenerated``, the result sent
filter       Filter             ``SampleScored``, its group sent on
buffer_wait  Buffer             ``GroupAdmitted``, ``BatchReady`` sent; linked to the step. It has the bound
train        Learner            ``Train``, ``BatchTrained``; linked to the step
===========  =================  ==========================================================================

Below ``generate`` stand the turns and calls of an episode, each recorded as soon as it is over: ``chat`` or
``text_completion`` for a turn of the model (one that an interruption cut in two stands in both), ``execute_tool NAME``
for a call. The stages of an attempt after the first stand below its ``issue``, which is linked to that of the attempt
before it; the ids of both follow from the trace and the number of the attempt, so that no actor has to be told.

A step has a trace of its own: its root ``step`` links to its samples and to the version that it makes, and it holds
what an operator changed since the batch before was offered: ``policy`` and ``pause``. So has a version: its root
``version`` lasts from the export to the announcement and links back to the step, and holds ``publish``,
``fetch_weights`` and ``apply_weights``.
"""

from __future__ import annotations

from bisect import bisect_right
from math import isnan
from typing import TYPE_CHECKING, Any

from penstock.messages.commands import (
    ApplyWeights,
    FetchWeights,
    Generate,
    PublishWeights,
    Record,
    SaveCheckpoint,
    Train,
)
from penstock.messages.evaluation import EvaluationDue
from penstock.messages.flow import (
    DemandGranted,
    GroupAdmitted,
    GroupRejected,
    SampleGenerated,
    SampleIssued,
    SampleScored,
    ScoringFailed,
)
from penstock.messages.ledger import PauseRecorded, PolicyRecorded
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EpisodeMoved,
    GenerationEnded,
    PromptsFetched,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import is_evaluation
from penstock.messages.training import BatchReady
from penstock.messages.weights import VersionAnnounced, WeightsExported
from penstock.runtime.observability.generations import GenerationStages, Open
from penstock.runtime.observability.spans import SPAN_ID_BYTES, attempt_span_id, root_span_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.messages.base import Command, Event
    from penstock.messages.samples import SampleKey
    from penstock.runtime.observability.spans import Attributes, SpanLink, SpanRecorder
    from penstock.runtime.observability.trace_ids import TraceIds


class StageRecorder:
    """Records the stages that one actor sees the beginning and the end of."""

    def __init__(self, recorder: SpanRecorder, ids: TraceIds) -> None:
        self._record = recorder.record
        self._record_root = recorder.record_root
        self._ids = ids
        self._granted: list[tuple[int, int]] = []
        """Totals of ``DemandGranted`` with the time each was first heard, ascending."""
        self._evaluation = (-1, 0)
        """Number of the newest evaluation, and when it was first heard of."""
        self._fetched: Open[int, int] = Open()
        """When the rows of groups came."""
        self._arrived: Open[SampleKey, int] = Open()
        self._buffered: Open[int, int] = Open()
        self._operated: list[tuple[str, int, Attributes]] = []
        """What an operator has changed since a batch was offered."""
        self._offered = -1
        """Version of the newest batch."""
        self._working: Open[tuple[str, int], int] = Open()
        self._training: Open[int, tuple[int, int, list[SampleKey]]] = Open()
        """When a step began, with how many samples, and those of them that are traced."""
        engine = GenerationStages(recorder, ids)
        # What the observer of the shell looks up and calls: a third call for each event would be a tenth of its cost.
        self.on_event: dict[type[Event], Callable[[Any, int, int], None]] = {
            DemandGranted: self._demand_granted,
            EvaluationDue: self._evaluation_due,
            PromptsFetched: self._rows_fetched,
            SampleIssued: engine.sample_arrived,
            GenerationEnded: engine.ended,
            EpisodeMoved: engine.episode_moved,
            SampleGenerated: self._sample_to_score,
            SampleScored: self._sample_to_filter,
            ScoringFailed: self._failure_to_filter,
            GroupAdmitted: self._group_buffered,
            BatchTrained: self._batch_trained,
            CheckpointWritten: self._checkpoint_written,
            WeightsPublished: self._weights_published,
            WeightsExported: self._weights_exported,
            WeightsStagedLocally: self._weights_fetched,
            WeightsSwapped: self._weights_swapped,
        }
        self.on_command: dict[type[Command], Callable[[Any, int], None]] = {
            Record: self._recorded,
            Generate: engine.begins,
            Train: self._training_begins,
            SaveCheckpoint: self._checkpoint_begins,
            PublishWeights: self._publish_begins,
            FetchWeights: self._fetch_begins,
            ApplyWeights: self._swap_begins,
        }
        self.on_sent: dict[type[Event], Callable[[Any, str, int, int], None]] = {
            SampleIssued: self._sample_issued,
            SampleScored: self._sample_scored,
            ScoringFailed: self._scoring_failed,
            GroupAdmitted: self._group_admitted,
            GroupRejected: self._group_rejected,
            BatchReady: self._batch_offered,
            VersionAnnounced: self._version_announced,
        }

    # --- PromptSource -----------------------------------------------------------------------------------------

    def _demand_granted(self, event: DemandGranted, start_ns: int, _end_ns: int) -> None:
        granted = self._granted
        if not granted or event.total > granted[-1][0]:
            granted.append((event.total, start_ns))
        while len(granted) > 1 and granted[0][0] <= event.settled.floor:
            del granted[0]

    def _evaluation_due(self, event: EvaluationDue, start_ns: int, _end_ns: int) -> None:
        if event.evaluation is not None and event.evaluation.number > self._evaluation[0]:
            self._evaluation = (event.evaluation.number, start_ns)

    def _rows_fetched(self, event: PromptsFetched, start_ns: int, _end_ns: int) -> None:
        for prompt in event.prompts:
            if self._ids.keeps(prompt.group_id):
                self._fetched.begin(prompt.group_id, start_ns)

    def _granted_ns(self, group_id: int) -> int | None:
        """When PromptSource first heard that this group may start; None: before this incarnation."""
        if is_evaluation(group_id):
            return self._evaluation[1] or None
        place = bisect_right(self._granted, group_id, key=lambda grant: grant[0])
        return self._granted[place][1] if place < len(self._granted) else None

    def _sample_issued(self, sent: SampleIssued, to: str, start_ns: int, end_ns: int) -> None:
        key = sent.key
        trace_id = self._ids.sample(key)
        if not trace_id:
            return
        attributes: Attributes = (
            ("group_id", key.group_id),
            ("index", key.index),
            ("attempt", sent.attempt),
            ("engine", to),
            ("min_version", sent.min_version),
            ("deadline_version", sent.deadline_version),
        )
        if sent.attempt:
            span_id = attempt_span_id(trace_id, sent.attempt)
            before = (trace_id, attempt_span_id(trace_id, sent.attempt - 1))
            parent_id = root_span_id(trace_id)
            self._record(trace_id, parent_id, "issue", start_ns, end_ns, attributes, (before,), span_id=span_id)
            return
        since_ns = self._granted_ns(key.group_id)
        fetched_ns = self._fetched.get(key.group_id)
        if since_ns is not None and fetched_ns is not None:
            attributes = (*attributes, ("row_wait_s", max(0, fetched_ns - since_ns) / 1e9))
        self._record_root(trace_id, "issue", start_ns if since_ns is None else since_ns, end_ns, attributes)

    # --- Scorer and Filter ------------------------------------------------------------------------------------

    def _sample_to_score(self, event: SampleGenerated, start_ns: int, _end_ns: int) -> None:
        self._arrived.begin(event.sample.key, start_ns)

    def _sample_scored(self, sent: SampleScored, _to: str, _start_ns: int, end_ns: int) -> None:
        arrived_ns = self._arrived.end(sent.sample.key)
        if arrived_ns is not None:
            reward = sent.sample.reward
            attributes = () if reward is None or isnan(reward) else (("reward", reward),)  # JSON has no NaN
            self._stage("score", sent.sample.key, arrived_ns, end_ns, attributes)

    def _scoring_failed(self, sent: ScoringFailed, _to: str, _start_ns: int, end_ns: int) -> None:
        arrived_ns = self._arrived.end(sent.key)
        if arrived_ns is not None:
            self._stage("score", sent.key, arrived_ns, end_ns, (("failure", sent.reason),))

    def _sample_to_filter(self, event: SampleScored, start_ns: int, _end_ns: int) -> None:
        self._arrived.begin(event.sample.key, start_ns)

    def _failure_to_filter(self, event: ScoringFailed, start_ns: int, _end_ns: int) -> None:
        self._arrived.begin(event.key, start_ns)

    def _group_admitted(self, sent: GroupAdmitted, _to: str, _start_ns: int, end_ns: int) -> None:
        for sample in sent.group.samples:
            self._filtered(sample.key, end_ns, (("kept", True),))
        for end in sent.group.ended:
            self._filtered(end.key, end_ns, (("kept", False), ("cause", end.cause)))

    def _group_rejected(self, sent: GroupRejected, _to: str, _start_ns: int, end_ns: int) -> None:
        for end in sent.ended:
            self._filtered(end.key, end_ns, (("kept", False), ("cause", sent.cause)))

    def _filtered(self, key: SampleKey, end_ns: int, attributes: Attributes) -> None:
        arrived_ns = self._arrived.end(key)
        if arrived_ns is not None:
            self._stage("filter", key, arrived_ns, end_ns, attributes)

    # --- Buffer -----------------------------------------------------------------------------------------------

    def _group_buffered(self, event: GroupAdmitted, start_ns: int, _end_ns: int) -> None:
        if not is_evaluation(event.group.group_id):
            self._buffered.begin(event.group.group_id, start_ns)

    def _recorded(self, command: Record, end_ns: int) -> None:
        for entry in command.entries:
            if isinstance(entry, PolicyRecorded):
                attributes: Attributes = (
                    ("policy", entry.policy),
                    ("max_staleness", entry.max_staleness),
                    ("update_mode", entry.update_mode.value),
                    ("on_stale", entry.on_stale.value),
                )
                self._operated.append(("policy", end_ns, attributes))
            elif isinstance(entry, PauseRecorded):
                self._operated.append(("pause", end_ns, (("is_paused", entry.is_paused),)))

    def _batch_offered(self, sent: BatchReady, _to: str, _start_ns: int, end_ns: int) -> None:
        link = self._ids.step_link(sent.version)
        if sent.version > self._offered:
            self._offered, operated, self._operated = sent.version, self._operated, []
            for name, began_ns, attributes in operated:
                self._record(link[0], link[1], name, began_ns, end_ns, attributes)
        attributes = (("version", sent.version), ("max_staleness", sent.max_staleness))
        for group in sent.groups:
            since_ns = self._buffered.end(group.group_id)
            if since_ns is None:  # offered before
                continue
            for sample in group.samples:
                trace_id = self._ids.trace_of(sample.key)
                self._record(trace_id, trace_id[:SPAN_ID_BYTES], "buffer_wait", since_ns, end_ns, attributes, (link,))

    # --- Learner ----------------------------------------------------------------------------------------------

    def _training_begins(self, command: Train, end_ns: int) -> None:
        num_samples = sum(len(group.samples) for group in command.groups)
        kept = [group for group in command.groups if self._ids.keeps(group.group_id)]
        keys = [sample.key for group in kept for sample in group.samples]
        self._training.begin(command.version, (end_ns, num_samples, keys))

    def _batch_trained(self, event: BatchTrained, start_ns: int, _end_ns: int) -> None:
        begun = self._training.end(event.version)
        if begun is None:
            return
        began_ns, num_samples, keys = begun
        link = self._ids.step_link(event.version)
        links = [self._ids.version_link(event.version)]
        told = (("version", event.version),)
        for key in keys:
            trace_id = self._ids.trace_of(key)
            root = (trace_id, trace_id[:SPAN_ID_BYTES])
            self._record(*root, "train", began_ns, start_ns, told, (link,))
            links.append(root)
        attributes = (
            ("version", event.version),
            ("num_samples", num_samples),
            ("num_trained_tokens", event.num_trained_tokens),
            ("num_masked_tokens", event.num_masked_tokens),
        )
        self._record_root(link[0], "step", began_ns, start_ns, attributes, tuple(links))

    def _checkpoint_begins(self, command: SaveCheckpoint, end_ns: int) -> None:
        self._working.begin(("checkpoint", command.version), end_ns)

    def _checkpoint_written(self, event: CheckpointWritten, start_ns: int, _end_ns: int) -> None:
        trace_id = self._ids.step(event.version)
        self._worked("checkpoint", event.version, trace_id, start_ns)

    # --- weights ----------------------------------------------------------------------------------------------

    def _publish_begins(self, command: PublishWeights, end_ns: int) -> None:
        self._working.begin(("publish", command.version), end_ns)

    def _weights_published(self, event: WeightsPublished, start_ns: int, _end_ns: int) -> None:
        version = event.manifest.version
        size = (("size_bytes", event.manifest.size_bytes),)
        self._worked("publish", version, self._ids.version(version), start_ns, size)

    def _weights_exported(self, event: WeightsExported, start_ns: int, _end_ns: int) -> None:
        self._working.begin(("version", event.manifest.version), start_ns)

    def _version_announced(self, sent: VersionAnnounced, _to: str, _start_ns: int, end_ns: int) -> None:
        exported_ns = self._working.end(("version", sent.version))
        if exported_ns is not None:  # it is told to several, and repeated
            attributes = (("version", sent.version), ("num_engines", len(sent.serving)))
            link = self._ids.step_link(sent.version)
            self._record_root(self._ids.version(sent.version), "version", exported_ns, end_ns, attributes, (link,))

    def _fetch_begins(self, command: FetchWeights, end_ns: int) -> None:
        self._working.begin(("fetch_weights", command.manifest.version), end_ns)

    def _weights_fetched(self, event: WeightsStagedLocally, start_ns: int, _end_ns: int) -> None:
        attributes = (("error", event.error),) if event.error else ()
        trace_id = self._ids.version(event.version)
        self._worked("fetch_weights", event.version, trace_id, start_ns, attributes)

    def _swap_begins(self, command: ApplyWeights, end_ns: int) -> None:
        self._working.begin(("apply_weights", command.manifest.version), end_ns)

    def _weights_swapped(self, event: WeightsSwapped, start_ns: int, _end_ns: int) -> None:
        self._worked("apply_weights", event.version, self._ids.version(event.version), start_ns)

    def _worked(self, name: str, version: int, trace_id: bytes, end_ns: int, attributes: Attributes = ()) -> None:
        began_ns = self._working.end((name, version))
        if began_ns is not None:
            self._record(trace_id, root_span_id(trace_id), name, began_ns, end_ns, (("version", version), *attributes))

    def _stage(
        self,
        name: str,
        key: SampleKey,
        start_ns: int,
        end_ns: int,
        attributes: Attributes = (),
        links: tuple[SpanLink, ...] = (),
    ) -> None:
        if self._ids.keeps(key.group_id):
            trace_id = self._ids.trace_of(key)
            self._record(trace_id, trace_id[:SPAN_ID_BYTES], name, start_ns, end_ns, attributes, links)
