"""The Learner: when to train, when to publish, when to write a checkpoint.

Invariants:

* The version counts trained batches. It goes up by one with each batch, and only then.
* A batch is trained if it makes ``version + 1``. One that is trained already is answered with its receipt.
* No token beyond the bound is trained: a batch that holds one stops the run, unless the policy masks such tokens.
* The backend does one thing at a time, in the order asked for: a version is exported before the next batch changes it.

States: ``starting`` → ``idle`` ⇄ ``training`` → ``publishing`` → ``idle``; ``idle`` ⇄ ``checkpointing``.

| waits for | who ends it |
|---|---|
| its backend to open (model, warm start) | the backend; ``start_timeout_s`` |
| a batch | the Buffer |
| a step, an export, a checkpoint | the backend; ``step_timeout_s`` |
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never, final

from penstock.messages.commands import (
    FailRun,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    SaveCheckpoint,
    Send,
    StartTimer,
    StopTimer,
    Train,
)
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    LearnerOpened,
    Started,
    TimerFired,
    WeightsPublished,
)
from penstock.messages.names import BUFFER, WEIGHT_PUBLISHER
from penstock.messages.training import (
    Activity,
    BatchReady,
    CheckpointDemanded,
    CheckpointSaved,
    LearnerReady,
    StepFinished,
    UpdateMode,
)
from penstock.messages.weights import VersionAnnounced, WeightsExported

if TYPE_CHECKING:
    from penstock.actors.learner.settings import LearnerSettings
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import LearnerEvent

PUBLISHES_PER_EPOCH: Final = 1_000_000
"""Publish numbers go up over incarnations too, so that an engine never takes an old one for a new one."""
DEADLINE: Final = "deadline"


class Phase(StrEnum):
    """What the backend does."""

    STARTING = "starting"
    IDLE = "idle"
    TRAINING = "training"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"


@final
class Learner:
    """The Learner's state machine."""

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings
        self.phase = Phase.STARTING
        self.version = 0
        self.published_version = -1
        self._publish = settings.epoch * PUBLISHES_PER_EPOCH
        self._update_mode = UpdateMode.DRAIN
        self._announced = -1
        self._batch: BatchReady | None = None
        """In training."""
        self._next: BatchReady | None = None
        """Came while the backend was busy."""
        self._receipt: StepFinished | None = None
        self._checkpoint_due: int | None = None
        self._saved: CheckpointSaved | None = None
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        return self.phase.value

    @property
    def activity(self) -> Activity:
        """What the learner's time is spent on."""
        match self.phase:
            case Phase.STARTING:
                return Activity.STARTING
            case Phase.IDLE:
                return Activity.WAITING_FOR_SAMPLES
            case Phase.TRAINING:
                return Activity.WORKING
            case Phase.PUBLISHING:
                return Activity.PUBLISHING
            case Phase.CHECKPOINTING:
                return Activity.CHECKPOINTING
            case _:
                assert_never(self.phase)

    @property
    def occupancy(self) -> float:
        """A learner that works works on all it has."""
        return 1.0

    def leases(self) -> tuple[()]:
        """Samples in a batch are settled; the Learner holds none."""
        return ()

    def handle(self, event: LearnerEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        match event:
            case BatchReady():
                self._on_batch(event)
            case BatchTrained():
                self._on_trained(event)
            case WeightsPublished():
                self._on_published(event)
            case CheckpointDemanded():
                self._on_demand(event)
            case CheckpointWritten():
                self._done()
                self._saved = CheckpointSaved(version=event.version, path=event.path)
                self._out.append(Send(BUFFER, self._saved))
                if self._checkpoint_due == event.version:
                    self._checkpoint_due = None  # demanded again while it was written
            case VersionAnnounced():
                if event.version > self._announced:
                    self._announced = event.version
                    self._out.append(ReleaseWeights(event.version))
            case LearnerOpened():
                self._done()
                self.version = event.version
                self._out.append(Send(BUFFER, LearnerReady(epoch=self.settings.epoch, version=event.version)))
                self._start_publish()
            case Started():
                self._out.extend((OpenLearner(), StartTimer(DEADLINE, self.settings.start_timeout_s)))
            case TimerFired():
                if self.phase is not Phase.IDLE:  # it ran out while what it was for came to its end
                    self._out.append(FailRun(f"the learner is {self.phase.value} for longer than it may; see its log"))
            case _:
                assert_never(event)
        self._advance()
        out, self._out = self._out, []
        return out

    # --- events -----------------------------------------------------------------------------------------------

    def _on_batch(self, event: BatchReady) -> None:
        if event.version <= self.version:
            if self._receipt is not None and self._receipt.version == event.version:
                self._out.append(Send(BUFFER, self._receipt))
        elif event.version == self.version + 1 and (self._batch is None or self._batch.version != event.version):
            self._next = event

    def _on_trained(self, event: BatchTrained) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        assert event.version == batch.version
        self._done()
        self.version = event.version
        self._receipt = StepFinished(
            version=event.version,
            group_ids=tuple(group.group_id for group in batch.groups),
            num_trained_tokens=event.num_trained_tokens,
            num_masked_tokens=event.num_masked_tokens,
            max_staleness=oldest_age(batch),
            metrics=event.metrics,
        )
        self._out.extend((Send(BUFFER, self._receipt), Send(WEIGHT_PUBLISHER, self._receipt)))
        self._update_mode = batch.update_mode
        due = self.version - self.published_version >= self.settings.publish_every
        # An engine may have been told of a version that this incarnation has not published: off the grid, then.
        missing = self.version >= batch.announced_version > self.published_version
        if (due or missing) and not batch.is_last:
            self._start_publish()

    def _on_published(self, event: WeightsPublished) -> None:
        self._done()
        self.published_version = event.manifest.version
        exported = WeightsExported(manifest=event.manifest, update_mode=self._update_mode)
        self._out.append(Send(WEIGHT_PUBLISHER, exported))

    def _on_demand(self, event: CheckpointDemanded) -> None:
        if self._saved is not None and self._saved.version == event.version:
            self._out.append(Send(BUFFER, self._saved))
        else:
            self._checkpoint_due = event.version

    # --- what follows from the state --------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.phase is not Phase.IDLE:
            return
        if self._next is not None:
            batch, self._next = self._next, None
            self._train(batch)
        elif self._checkpoint_due == self.version:
            self._checkpoint_due = None
            self._start(Phase.CHECKPOINTING)
            self._out.append(SaveCheckpoint(self.version))

    def _train(self, batch: BatchReady) -> None:
        bound = batch.max_staleness
        if not batch.mask_stale and (age := oldest_age(batch)) > bound:
            self._out.append(FailRun(f"batch {batch.version} holds a token of age {age}, the bound is {bound}"))
            return
        self._batch = batch
        self._start(Phase.TRAINING)
        oldest = max(0, batch.version - 1 - bound) if batch.mask_stale else 0
        self._out.append(Train(version=batch.version, groups=batch.groups, min_token_version=oldest))

    def _start_publish(self) -> None:
        self._start(Phase.PUBLISHING)
        self._out.append(PublishWeights(self.version, self._publish))
        self._publish += 1

    def _start(self, phase: Phase) -> None:
        self.phase = phase
        self._out.append(StartTimer(DEADLINE, self.settings.step_timeout_s))

    def _done(self) -> None:
        self.phase = Phase.IDLE
        self._out.append(StopTimer(DEADLINE))

    def validate(self) -> None:
        """Assert the invariants."""
        assert (self.phase is Phase.TRAINING) == (self._batch is not None)
        assert self._batch is None or self._batch.version == self.version + 1
        assert self.published_version <= self.version


def oldest_age(batch: BatchReady) -> int:
    """Age of the oldest token that is trained, in versions, when the batch is consumed."""
    consumed_at = batch.version - 1
    least = consumed_at - batch.max_staleness if batch.mask_stale else -1
    spans = (
        span
        for group in batch.groups
        for sample in group.samples
        for part in sample.parts
        for span in part.spans
        if span.num_tokens and span.version >= least
    )
    return max((consumed_at - span.version for span in spans), default=0)
