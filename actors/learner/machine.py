"""The Learner: when to train, when to publish, when to write a checkpoint.

Invariants:

* The version counts trained batches. It goes up by one with each batch, and only then.
* A batch is trained if it makes ``version + 1``. One that is trained already is answered with its receipt.
* No token beyond the bound is trained: a batch that holds one stops the run, unless the policy masks such tokens.
* The backend does one thing at a time, in the order asked for: a version is exported, and its state is copied for a
  checkpoint, before the next batch changes it. Writing the copy goes on meanwhile, one checkpoint at a time.
* It loads the checkpoint that the Buffer names, and no other.
* A version that is demanded because something is evaluated, or a newer one, is published by this incarnation, on or off
  the grid, and be it the last.
* A version that engines were told of, or a newer one, is published by this incarnation before it waits for batches
  made with it; an older one is never published.
* Where it shares devices with engines, it loads, trains and publishes in its own turn only. It gives the turn away
  after each publish, asleep, and says then what it has published: engines that wake find newer weights than theirs.

States: ``starting`` (until a checkpoint is named) → ``opening`` → ``idle`` ⇄ ``training`` → ``publishing`` → ``idle``.
With shared devices: ``asking`` before ``opening``; after ``publishing`` → ``sleeping`` → ``idle``, asleep, and from
there → ``asking`` → ``waking`` → ``idle`` for the next batch.

| waits for | who ends it |
|---|---|
| the name of a checkpoint | the Buffer; ``start_timeout_s``, then another Learner takes its place |
| its backend to open (model, warm start) | the backend; ``start_timeout_s``, likewise |
| a batch | the Buffer |
| a step, an export, a checkpoint, its sleep, its waking | the backend; ``step_timeout_s``, likewise |
| engines that share its devices to yield | each, when what runs has ended; ``yield_timeout_s``, then it is replaced |
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final, assert_never, final

from penstock.actors.learner.turns import Turns
from penstock.messages.commands import (
    DeleteCheckpoints,
    FailRun,
    OpenLearner,
    PublishWeights,
    ReleaseWeights,
    ReplaceActor,
    SaveCheckpoint,
    Send,
    SleepLearner,
    StartTimer,
    StopTimer,
    Train,
    WakeLearner,
)
from penstock.messages.evaluation import PublishDemanded
from penstock.messages.local import (
    BatchTrained,
    CheckpointWritten,
    LearnerOpened,
    LearnerSlept,
    LearnerWoken,
    Started,
    TimerFired,
    WeightsPublished,
)
from penstock.messages.membership import EngineJoined, EngineLost
from penstock.messages.names import BUFFER, LEARNER, SUPERVISOR, WEIGHT_PUBLISHER
from penstock.messages.training import (
    Activity,
    BatchReady,
    CheckpointDemanded,
    CheckpointNamed,
    CheckpointSaved,
    CheckpointsKept,
    DeviceYielded,
    Holder,
    LearnerReady,
    NoticeGiven,
    StepFinished,
    UpdateMode,
)
from penstock.messages.waits import OWN_BACKEND, Wait
from penstock.messages.weights import PublishFailed, VersionAnnounced, WeightsExported

if TYPE_CHECKING:
    from penstock.actors.learner.settings import LearnerSettings
    from penstock.messages.base import Metric
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import LearnerEvent

PUBLISHES_PER_EPOCH: Final = 1_000_000
"""Publish numbers go up over incarnations too, so that an engine never takes an old one for a new one."""
DEADLINE: Final = "deadline"
SAVE_DEADLINE: Final = "save"
YIELD_DEADLINE: Final = "yield"


class Phase(StrEnum):
    """What the backend does."""

    STARTING = "starting"
    OPENING = "opening"
    IDLE = "idle"
    TRAINING = "training"
    PUBLISHING = "publishing"
    ASKING = "asking"
    """Something is to be done, and engines have the devices still."""
    WAKING = "waking"
    SLEEPING = "sleeping"


@final
class Learner:
    """The Learner's state machine."""

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings
        self.phase = Phase.STARTING
        self.version = -1
        """−1: nothing is loaded."""
        self.turns = Turns(settings.shares_with, settings.epoch)
        self.is_awake = False
        """On its device."""
        self.published_version = -1
        self._publish = settings.epoch * PUBLISHES_PER_EPOCH
        self._update_mode = UpdateMode.DRAIN
        self._announced = -1
        """The newest version that engines were told of, as far as is known here."""
        self._must_publish = False
        self._batch: BatchReady | None = None
        """In training."""
        self._next: BatchReady | None = None
        """Came while the backend was busy."""
        self._receipt: StepFinished | None = None
        self._demanded: int | None = None
        """A checkpoint of this version or a later one is wanted."""
        self._demanded_publish = -1
        """Engines are to serve this version or a later one."""
        self._save_due = False
        self._saving: int | None = None
        """Version of the checkpoint that is being written."""
        self._saved: CheckpointSaved | None = None
        self._named: CheckpointNamed | None = None
        """To be loaded."""
        self._exported: WeightsExported | None = None
        """To be told when the engines have the devices."""
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        if self.phase is not Phase.IDLE:
            return self.phase.value
        if not self.is_awake:
            return "asleep"
        return "checkpointing" if self._saving is not None else self.phase.value

    @property
    def activity(self) -> Activity:
        """What the learner's time is spent on."""
        match self.phase:
            case Phase.STARTING | Phase.OPENING:
                return Activity.STARTING
            case Phase.ASKING if self.version < 0:
                return Activity.STARTING
            case Phase.ASKING | Phase.WAKING | Phase.SLEEPING:
                return Activity.ASLEEP
            case Phase.IDLE if not self.is_awake:
                return Activity.ASLEEP
            case Phase.IDLE if self._saving is not None and self._next is None:
                return Activity.CHECKPOINTING
            case Phase.IDLE:
                return Activity.WAITING_FOR_SAMPLES
            case Phase.TRAINING:
                return Activity.WORKING
            case Phase.PUBLISHING:
                return Activity.PUBLISHING
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
            case PublishDemanded():
                self._demanded_publish = max(self._demanded_publish, event.version)
                self._see_demand()
            case CheckpointWritten():
                self._on_written(event)
            case CheckpointsKept():
                self._out.append(DeleteCheckpoints(event.oldest_version))
            case VersionAnnounced():
                if event.version > self._announced:
                    self._announced = event.version
                    self._out.append(ReleaseWeights(event.version))
            case PublishFailed():
                self._must_publish |= event.publish == self._publish - 1
            case CheckpointNamed():
                self._on_named(event)
            case LearnerOpened():
                self._on_opened(event.version)
            case DeviceYielded():
                self.turns.yielded(event)
            case EngineJoined():
                self._out.extend(self.turns.joined(event))
            case EngineLost():
                self.turns.lost(event)
            case LearnerWoken():
                self._done()
                self.is_awake = True
            case LearnerSlept():
                self._on_slept()
            case Started():
                self._out.append(Send(BUFFER, LearnerReady(epoch=self.settings.epoch, version=-1)))
                self._out.append(StartTimer(DEADLINE, self.settings.start_timeout_s))
            case TimerFired():
                self._on_late(event.key)
            case _:
                assert_never(event)
        self._advance()
        out, self._out = self._out, []
        return out

    # --- events -----------------------------------------------------------------------------------------------

    def _on_named(self, event: CheckpointNamed) -> None:
        if self.phase is not Phase.STARTING or event.learner_epoch != self.settings.epoch:
            return  # said again, or to a predecessor
        self._announced = max(self._announced, event.announced_version)
        self._named = event
        self._ask()

    def _on_opened(self, version: int) -> None:
        self._done()
        self.version, self.is_awake = version, True
        self._out.append(Send(BUFFER, LearnerReady(epoch=self.settings.epoch, version=version)))
        self._must_publish = self.settings.publishes and version >= self._announced
        self._save_due = version == 0 and self.settings.saves_first

    def _on_late(self, key: str) -> None:
        doing = self.phase.value
        if key == SAVE_DEADLINE:
            doing = "" if self._saving is None else "checkpointing"
        elif key == YIELD_DEADLINE:
            self._on_unyielding()
            doing = ""
        elif self.phase in (Phase.IDLE, Phase.ASKING):
            doing = ""
        if doing:  # otherwise it ran out while what it was for came to its end
            cause = f"it is {doing} for longer than it may"
            self._out.append(ReplaceActor(LEARNER, self.settings.epoch, cause))

    def _on_unyielding(self) -> None:
        if self.phase is Phase.ASKING:
            timeout_s = self.settings.yield_timeout_s
            self._out.extend((*self.turns.late(timeout_s), StartTimer(YIELD_DEADLINE, timeout_s)))

    def _on_batch(self, event: BatchReady) -> None:
        if self.version < 0:
            return  # offered to a predecessor; what this one is to train comes when it has loaded
        if event.version <= self.version:
            stand = self._receipt or LearnerReady(epoch=self.settings.epoch, version=self.version)
            self._out.append(Send(BUFFER, stand))
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
        if self.settings.publishes or event.version == 1:  # recorded tokens are the trained weights' own only at first
            self._out.extend(
                Send(SUPERVISOR, NoticeGiven(name=LEARNER, text=text, is_warning=True)) for text in event.notices
            )
        self._update_mode = batch.update_mode
        self._announced = max(self._announced, batch.announced_version)
        # Engines that sleep wake with new weights only, so a turn that is given away ends with a publish.
        due = self.turns.are_taken or self.version - self.published_version >= self.settings.publish_every
        # Engines may have been told of a version that this incarnation has not published: off the grid, then.
        missing = self._announced > self.published_version
        self._must_publish |= (
            self.settings.publishes and (due or missing) and self.version >= self._announced and not batch.is_last
        )
        self._see_demand()
        self._save_due |= self.version % self.settings.save_every == 0 and not batch.is_last

    def _on_published(self, event: WeightsPublished) -> None:
        self._done()
        self.published_version = event.manifest.version
        exported = WeightsExported(manifest=event.manifest, update_mode=self._update_mode)
        if self.turns.are_taken:
            self._exported = exported
        else:
            self._out.append(Send(WEIGHT_PUBLISHER, exported))

    def _on_slept(self) -> None:
        self._done()
        exported, self._exported = self._exported, None
        assert exported is not None
        self.is_awake = False
        self._out.extend((Send(WEIGHT_PUBLISHER, exported), *self.turns.free()))

    def _see_demand(self) -> None:
        """Whether this version has to be published because it is to be evaluated."""
        is_wanted = self.published_version < self._demanded_publish <= self.version
        self._must_publish |= self.settings.publishes and is_wanted and self.version >= self._announced

    def _on_demand(self, event: CheckpointDemanded) -> None:
        if self._saved is not None and self._saved.version == self.version >= event.version:
            self._out.append(Send(BUFFER, self._saved))
        else:
            self._demanded = event.version

    def _on_written(self, event: CheckpointWritten) -> None:
        self._saving = None
        self._out.append(StopTimer(SAVE_DEADLINE))
        self._saved = CheckpointSaved(version=event.version, path=event.path)
        self._out.append(Send(BUFFER, self._saved))

    # --- what follows from the state --------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.phase is Phase.ASKING and self.turns.is_ours:
            self._take_turn()
        if self.phase is not Phase.IDLE:
            return
        if not self.is_awake and (self._must_publish or self._next is not None):
            self._ask()
            self._advance()
            return
        is_demanded = self._demanded is not None and self.version >= self._demanded
        if self._must_publish:
            self._start_publish()
            return
        if (self._save_due or is_demanded) and self._saving is None:
            self._save()
        if self._exported is not None:
            self._start(Phase.SLEEPING)
            self._out.append(SleepLearner())
        elif self._next is not None:
            batch, self._next = self._next, None
            self._train(batch)

    def _ask(self) -> None:
        """The device is needed; ``_advance`` goes on when it is there."""
        self.phase = Phase.ASKING
        self._out.extend(self.turns.ask())
        if not self.turns.is_ours:
            self._out.append(StartTimer(YIELD_DEADLINE, self.settings.yield_timeout_s))

    def _take_turn(self) -> None:
        if self.turns.are_taken:
            self._out.append(StopTimer(YIELD_DEADLINE))
        if self._named is None:
            self._start(Phase.WAKING)
            self._out.append(WakeLearner())
            return
        named, self._named = self._named, None
        self.phase = Phase.OPENING
        if self.turns.are_taken:  # the time that it waited for engines does not count
            self._out.append(StartTimer(DEADLINE, self.settings.start_timeout_s))
        self._out.append(OpenLearner(version=named.version, path=named.path))

    def _save(self) -> None:
        self._save_due = False
        if self._demanded is not None and self.version >= self._demanded:
            self._demanded = None  # what is demanded of a later version is demanded still
        if self._saved is not None and self._saved.version == self.version:
            self._out.append(Send(BUFFER, self._saved))
            return
        self._saving = self.version
        self._out.extend((StartTimer(SAVE_DEADLINE, self.settings.step_timeout_s), SaveCheckpoint(self.version)))

    def _train(self, batch: BatchReady) -> None:
        bound = batch.max_staleness
        if not batch.mask_stale and (age := oldest_age(batch)) > bound:
            self._out.append(FailRun(f"batch {batch.version} holds a token of age {age}, the bound is {bound}"))
            return
        self._batch = batch
        self._start(Phase.TRAINING)
        oldest = max(0, batch.version - 1 - bound) if batch.mask_stale else 0
        self._out.append(
            Train(
                version=batch.version,
                groups=batch.groups,
                min_token_version=oldest,
                mask_old_tokens=batch.mask_old_tokens,
            )
        )

    def _start_publish(self) -> None:
        self._must_publish = False
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
        assert self.published_version <= self.version or self.version < 0
        self.turns.validate()
        assert not self.is_awake or self.turns.holder is Holder.LEARNER
        assert self.is_awake or self.phase not in (Phase.TRAINING, Phase.PUBLISHING, Phase.SLEEPING)
        assert self.is_awake or self.turns.are_taken or self.phase is not Phase.IDLE

    def waits(self) -> tuple[Wait, ...]:
        """The Buffer, or its backend."""
        match self.phase:
            case Phase.ASKING:
                return tuple(self.turns.waits())
            case Phase.STARTING:
                first = Wait("name of", "a checkpoint", BUFFER)
            case Phase.IDLE:
                first = Wait("offer of", f"batch {self.version + 1}", BUFFER)
            case Phase.TRAINING:
                first = Wait("step on", f"batch {self.version + 1}", OWN_BACKEND)
            case _:
                first = Wait(f"{self.phase.value} of", f"version {self.version}", OWN_BACKEND)
        if self._saving is None:
            return (first,)
        return first, Wait("checkpoint of", f"version {self._saving}", OWN_BACKEND)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Nothing: the backend has gauges."""
        return ()


def oldest_age(batch: BatchReady) -> int:
    """Age of the oldest token that is trained, in versions, when the batch is consumed."""
    consumed_at = batch.version - 1
    least = consumed_at - batch.max_staleness if batch.mask_stale else -1
    ages: list[int] = []
    for sample in (sample for group in batch.groups for sample in group.samples):
        versions = [span.version for part in sample.parts for span in part.spans if span.num_tokens]
        if batch.mask_old_tokens:
            versions = versions and [max(versions)]
        ages += [consumed_at - version for version in versions if version >= least]
    return max(ages, default=0)
