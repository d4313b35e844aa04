"""The stages of a sample, a step and a version, found in the events and commands of one actor.

Invariants:

* Stages follow from what one actor hears and returns; actors tell each other nothing for them. A stage begins and ends
  when the actor has handled what begins and ends it.
* An event about a sample of a group that is left out costs a look-up. Its commands are looked at in PromptSource, and
  in an engine that has others: see ``_others_after``. The clock is read and anything kept for the other groups alone.
* What is the same for all samples of a group is recorded once: :mod:`.group_spans`.
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

import time
from bisect import bisect_right
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from penstock.actors.settled import KnownSettled
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
    SamplesSettled,
    ScoringFailed,
)
from penstock.messages.ledger import GroupClosed, PauseRecorded, PolicyRecorded
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    EpisodeMoved,
    GenerationAdvanced,
    GenerationEnded,
    PromptsFetched,
    SampleJudged,
    WeightsCopied,
    WeightsPublished,
    WeightsStagedLocally,
    WeightsSwapped,
)
from penstock.messages.samples import is_evaluation
from penstock.messages.training import BatchReady
from penstock.messages.weights import VersionAnnounced, WeightsExported, WeightsStaged
from penstock.runtime.observability.generations import GenerationStages, Open
from penstock.runtime.observability.group_spans import record_together
from penstock.runtime.observability.spans import (
    SPAN_ID_BYTES,
    attempt_span_id,
    root_span_id,
    sample_trace_id,
    trace_id_of,
)
from penstock.runtime.observability.subjects import KEY_OF

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.messages.base import Command, Event
    from penstock.messages.samples import SampleKey
    from penstock.runtime.observability.spans import Attributes, SpanRecorder
    from penstock.runtime.observability.trace_ids import TraceIds

Stages = tuple[bool, "Callable[[Any], None] | None", "Collection[object]"]
"""Of a class of events: see :meth:`StageRecorder.after`."""
_ANYTHING: Final[Collection[object]] = (True,)
_NOTHING: Final[Collection[object]] = ()


class StageRecorder:
    """Records the stages that one actor sees the beginning and the end of.

    What takes an event about a sample (:data:`.subjects.KEY_OF`) is for groups that are ``kept``.
    """

    def __init__(self, recorder: SpanRecorder, ids: TraceIds, now_ns: Callable[[], int] = time.time_ns) -> None:
        """
        Args:
            recorder: where the spans go.
            ids: of the run.
            now_ns: Unix time in nanoseconds.
        """
        self._now_ns = now_ns
        self.kept: Final = ids.kept
        """Whether a group is traced, by its id."""
        self._recorder = recorder
        self._record = recorder.record
        self._record_root = recorder.record_root
        self._ids = ids
        self._granted: list[tuple[int, int]] = []
        """Totals of ``DemandGranted`` with the time each was first heard, ascending."""
        self._evaluation = (-1, 0)
        """Number of the newest evaluation, and when it was first heard of."""
        self._fetched: Open[int, int] = Open()
        """When the rows of groups came that are not settled: until then a sample of theirs may be issued."""
        self._settled = KnownSettled()
        self._issuing: tuple[int | None, int | None, Attributes] = (None, None, ())
        """The group that was issued last, and what was found of its waits."""
        self._arrived: Open[SampleKey | int, int] = Open()
        """Samples that came to an engine, the Scorer or the Filter, and weights that an engine was told of."""
        self._named: Open[int, None] = Open()
        """The publishes among these."""
        self._buffered: Open[int, int] = Open()
        self._operated: list[tuple[str, int, Attributes]] = []
        """What an operator has changed since a batch was offered."""
        self._offered = -1
        """Version of the newest batch."""
        self._working: Open[tuple[str, int], int] = Open()
        self._training: Open[int, tuple[int, int, dict[int, list[int]]]] = Open()
        """When a step began, with how many samples, and the groups that are traced with the indices of theirs."""
        engine = GenerationStages(recorder, ids, now_ns, self._arrived)
        # What the observer of the shell looks up and calls itself, as each event would pay for a call on the way.
        self._on_event = self._of_events(engine)
        self.on_command = self._of_commands(engine)
        self.on_sent = self._of_sent()

    def _of_events(self, engine: GenerationStages) -> dict[type[Event], Callable[[Any], None]]:
        return {
            DemandGranted: self._demand_granted,
            EvaluationDue: self._evaluation_due,
            SamplesSettled: self._groups_settled,
            PromptsFetched: self._rows_fetched,
            SampleIssued: engine.sample_arrived,
            GenerationEnded: engine.ended,
            EpisodeMoved: engine.episode_moved,
            SampleGenerated: self._sample_arrived,
            SampleScored: self._sample_arrived,
            ScoringFailed: self._failure_arrived,
            GroupAdmitted: self._group_buffered,
            BatchTrained: self._batch_trained,
            CheckpointWritten: self._checkpoint_written,
            WeightsCopied: self._weights_copied,
            WeightsPublished: self._weights_published,
            WeightsExported: self._weights_exported,
            WeightsStaged: self._weights_named,
            WeightsStagedLocally: self._weights_fetched,
            WeightsSwapped: self._weights_swapped,
        }

    def _of_commands(self, engine: GenerationStages) -> dict[type[Command], Callable[[Any], None]]:
        return {
            Record: self._recorded,
            Generate: engine.begins,
            Train: self._training_begins,
            SaveCheckpoint: partial(self._begins, "checkpoint"),
            PublishWeights: partial(self._begins, "publish"),
            FetchWeights: partial(self._begins, "fetch_weights"),
            ApplyWeights: partial(self._begins, "apply_weights"),
        }

    def after(self, kind: type[Event]) -> Stages:
        """What there is to record of an event of this class: whether that depends on the group of the sample that it is
        about, what takes the event, if anything, and what its commands may be about where the group is left out."""
        act, others = self._on_event.get(kind), self._others_after(kind)
        return kind in KEY_OF and not (act is None and others is _ANYTHING), act, others

    def _others_after(self, kind: type[Event]) -> Collection[object]:
        """Of an event about a sample of a group that is left out: while this is empty, no command that follows on it
        begins or ends a stage of another group.

        Scorer and Filter send on samples of the same group alone. An engine also submits samples that have come to it,
        and swaps to weights that it was told of. PromptSource may issue any.
        """
        if kind in (SampleGenerated, SampleJudged, SampleScored, ScoringFailed):
            return _NOTHING
        if kind in (SampleIssued, GenerationAdvanced, GenerationEnded, EpisodeMoved):
            return self._arrived
        return _ANYTHING

    def _of_sent(self) -> dict[type[Event], Callable[[Any, str], None]]:
        return {
            SampleIssued: self._sample_issued,
            SampleScored: self._sample_scored,
            ScoringFailed: self._scoring_failed,
            GroupAdmitted: self._group_admitted,
            GroupRejected: self._group_rejected,
            BatchReady: self._batch_offered,
            VersionAnnounced: self._version_announced,
        }

    # --- PromptSource -----------------------------------------------------------------------------------------

    def _demand_granted(self, event: DemandGranted) -> None:
        granted = self._granted
        if not granted or event.total > granted[-1][0]:
            granted.append((event.total, self._now_ns()))
        while len(granted) > 1 and granted[0][0] <= event.settled.floor:
            del granted[0]
        self._groups_settled(event)

    def _groups_settled(self, event: DemandGranted | EvaluationDue | SamplesSettled) -> None:
        for group_id in self._settled.newly(event.settled, self._fetched):
            del self._fetched[group_id]
        self._arrived.settle(self._settled)

    def _evaluation_due(self, event: EvaluationDue) -> None:
        self._groups_settled(event)
        if event.evaluation is not None and event.evaluation.number > self._evaluation[0]:
            self._evaluation = (event.evaluation.number, self._now_ns())

    def _rows_fetched(self, event: PromptsFetched) -> None:
        for prompt in event.prompts:
            if self.kept[prompt.group_id] and prompt.group_id not in self._settled:
                self._fetched.begin(prompt.group_id, self._now_ns())

    def _granted_ns(self, group_id: int) -> int | None:
        """When PromptSource first heard that this group may start; None: before this incarnation."""
        if is_evaluation(group_id):
            return self._evaluation[1] or None
        place = bisect_right(self._granted, group_id, key=lambda grant: grant[0])
        return self._granted[place][1] if place < len(self._granted) else None

    def _waited(self, group_id: int) -> tuple[int | None, Attributes]:
        """When this group was granted, and how long its row was waited for, where both are known."""
        since_ns, fetched_ns = self._granted_ns(group_id), self._fetched.get(group_id)
        if since_ns is None or fetched_ns is None:
            return since_ns, ()
        return since_ns, (("row_wait_s", max(0, fetched_ns - since_ns) / 1e9),)

    def _sample_issued(self, sent: SampleIssued, to: str) -> None:
        key = sent.key
        if not self.kept[key.group_id]:
            return
        trace_id, now_ns = trace_id_of(self._ids.salt, key.group_id, key.index), self._now_ns()
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
            self._record(trace_id, parent_id, "issue", now_ns, now_ns, attributes, (before,), span_id=span_id)
            return
        if key.group_id != self._issuing[0]:  # its samples follow each other
            self._issuing = key.group_id, *self._waited(key.group_id)
        _, since_ns, row_wait = self._issuing
        since_ns = now_ns if since_ns is None else since_ns
        self._record_root(trace_id, "issue", since_ns, now_ns, (*attributes, *row_wait))

    # --- Scorer and Filter ------------------------------------------------------------------------------------

    def _sample_arrived(self, event: SampleGenerated | SampleScored) -> None:
        self._arrived.begin(event.sample.key, self._now_ns())

    def _failure_arrived(self, event: ScoringFailed) -> None:
        self._arrived.begin(event.key, self._now_ns())

    def _sample_scored(self, sent: SampleScored, _to: str) -> None:
        sample = sent.sample
        if self.kept[sample.key.group_id]:
            reward = sample.reward
            attributes = () if reward is None or not isfinite(reward) else (("reward", reward),)  # as JSON has it
            self._leaves("score", sample.key, attributes)

    def _scoring_failed(self, sent: ScoringFailed, _to: str) -> None:
        if self.kept[sent.key.group_id]:
            self._leaves("score", sent.key, (("failure", sent.reason),))

    def _group_admitted(self, sent: GroupAdmitted, _to: str) -> None:
        if self.kept[sent.group.group_id]:
            keys = [sample.key for sample in sent.group.samples]
            arrived = [(key.index, at_ns) for key in keys if (at_ns := self._arrived.pop(key, None)) is not None]
            first = self._ids.first_trace(sent.group.group_id)
            record_together(self._recorder, first, "filter", arrived, self._now_ns(), (("kept", True),))
            for end in sent.group.ended:
                self._leaves("filter", end.key, (("kept", False), ("cause", end.cause)))

    def _group_rejected(self, sent: GroupRejected, _to: str) -> None:
        if self.kept[sent.group_id]:
            for end in sent.ended:
                self._leaves("filter", end.key, (("kept", False), ("cause", sent.cause)))

    def _leaves(self, name: str, key: SampleKey, attributes: Attributes) -> None:
        """The stage of a sample that had come here is over."""
        arrived_ns = self._arrived.pop(key, None)
        if arrived_ns is not None:
            trace_id = trace_id_of(self._ids.salt, key.group_id, key.index)
            self._record(trace_id, trace_id[:SPAN_ID_BYTES], name, arrived_ns, self._now_ns(), attributes)

    # --- Buffer -----------------------------------------------------------------------------------------------

    def _group_buffered(self, event: GroupAdmitted) -> None:
        group_id = event.group.group_id
        if self.kept[group_id] and not is_evaluation(group_id):
            self._buffered.begin(group_id, self._now_ns())

    def _recorded(self, command: Record) -> None:
        for entry in command.entries:
            if type(entry) is PolicyRecorded:
                attributes: Attributes = (
                    ("policy", entry.policy),
                    ("max_staleness", entry.max_staleness),
                    ("update_mode", entry.update_mode.value),
                    ("on_stale", entry.on_stale.value),
                )
                self._operated.append(("policy", self._now_ns(), attributes))
            elif type(entry) is PauseRecorded:
                self._operated.append(("pause", self._now_ns(), (("is_paused", entry.is_paused),)))
            elif type(entry) is GroupClosed:  # no batch will have it
                self._buffered.pop(entry.group_id, None)

    def _batch_offered(self, sent: BatchReady, _to: str) -> None:
        link, now_ns = self._ids.step_link(sent.version), self._now_ns()
        if sent.version > self._offered:
            self._offered, operated, self._operated = sent.version, self._operated, []
            for name, began_ns, attributes in operated:
                self._record(link[0], link[1], name, began_ns, now_ns, attributes)
        attributes = (("version", sent.version), ("max_staleness", sent.max_staleness))
        for group in sent.groups:
            since_ns = self._buffered.pop(group.group_id, None)
            if since_ns is None:  # left out, or offered before
                continue
            starts_ns = [(sample.key.index, since_ns) for sample in group.samples]
            first = self._ids.first_trace(group.group_id)
            record_together(self._recorder, first, "buffer_wait", starts_ns, now_ns, attributes, (link,))

    # --- Learner ----------------------------------------------------------------------------------------------

    def _training_begins(self, command: Train) -> None:
        num_samples = sum(len(group.samples) for group in command.groups)
        kept = {
            group.group_id: [sample.key.index for sample in group.samples]
            for group in command.groups
            if self.kept[group.group_id]
        }
        self._training.begin(command.version, (self._now_ns(), num_samples, kept))

    def _batch_trained(self, event: BatchTrained) -> None:
        begun = self._training.pop(event.version, None)
        if begun is None:
            return
        (began_ns, num_samples, kept), now_ns = begun, self._now_ns()
        link = self._ids.step_link(event.version)
        links = [self._ids.version_link(event.version)]
        told = (("version", event.version),)
        for group_id, indices in kept.items():
            first = self._ids.first_trace(group_id)
            starts_ns = [(index, began_ns) for index in indices]
            record_together(self._recorder, first, "train", starts_ns, now_ns, told, (link,))
            traces = [sample_trace_id(first, index) for index in indices]
            links += [(trace_id, trace_id[:SPAN_ID_BYTES]) for trace_id in traces]
        attributes = (
            ("version", event.version),
            ("num_samples", num_samples),
            ("num_trained_tokens", event.num_trained_tokens),
            ("num_masked_tokens", event.num_masked_tokens),
        )
        self._record_root(link[0], "step", began_ns, now_ns, attributes, tuple(links))

    def _checkpoint_written(self, event: CheckpointWritten) -> None:
        self._worked("checkpoint", event.version, self._ids.step(event.version))

    # --- weights ----------------------------------------------------------------------------------------------

    def _weights_copied(self, event: WeightsCopied) -> None:
        self._exported(event.version, event.size_bytes)
        self._working.begin(("digest", event.version), self._now_ns())

    def _weights_published(self, event: WeightsPublished) -> None:
        self._exported(event.manifest.version, event.manifest.size_bytes)

    def _exported(self, version: int, size_bytes: int) -> None:
        """As far as the learner was held up, or beside it."""
        for name in ("publish", "digest"):
            self._worked(name, version, self._ids.version(version), (("size_bytes", size_bytes),))

    def _weights_exported(self, event: WeightsExported) -> None:
        self._working.begin(("version", event.manifest.version), self._now_ns())

    def _version_announced(self, sent: VersionAnnounced, _to: str) -> None:
        exported_ns = self._working.pop(("version", sent.version), None)
        if exported_ns is not None:  # it is told to several, and repeated
            attributes = (("version", sent.version),)
            link = self._ids.step_link(sent.version)
            version = self._ids.version(sent.version)
            self._record_root(version, "version", exported_ns, self._now_ns(), attributes, (link,))

    def _weights_named(self, event: WeightsStaged) -> None:
        self._named.begin(event.manifest.publish, None)
        self._arrived.begin(event.manifest.publish, self._now_ns())

    def _weights_fetched(self, event: WeightsStagedLocally) -> None:
        attributes = (("error", event.error),) if event.error else ()
        self._worked("fetch_weights", event.version, self._ids.version(event.version), attributes)

    def _weights_swapped(self, event: WeightsSwapped) -> None:
        self._worked("apply_weights", event.version, self._ids.version(event.version))
        for publish in [one for one in self._named if one <= event.publish]:
            del self._named[publish]
            self._arrived.pop(publish, None)

    def _begins(self, name: str, command: SaveCheckpoint | PublishWeights | FetchWeights | ApplyWeights) -> None:
        """Work for a version, which :meth:`_worked` ends."""
        version = command.manifest.version if isinstance(command, FetchWeights | ApplyWeights) else command.version
        self._working.begin((name, version), self._now_ns())

    def _worked(self, name: str, version: int, trace_id: bytes, attributes: Attributes = ()) -> None:
        began_ns = self._working.pop((name, version), None)
        if began_ns is not None:
            told = (("version", version), *attributes)
            self._record(trace_id, root_span_id(trace_id), name, began_ns, self._now_ns(), told)
