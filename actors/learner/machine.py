"""The Learner: when to train, when to publish, when to write a checkpoint.

Invariants:

* The version counts trained batches. It goes up by one with each batch, and only then.
* A batch is trained if it makes ``version + 1``. One that is trained already is answered with its receipt.
* No token beyond the bound is trained: a batch that holds one stops the run, unless the policy masks such tokens.
* The backend does one thing at a time, in the order asked for: a version is exported or copied for that, and its state
  is copied for a checkpoint, before the next batch changes it. Writing the copy of a checkpoint, and the digest of an
  export, go on meanwhile, one of each at a time: no version that is due for a checkpoint is trained away before that.
* It loads the checkpoint that the Buffer names, and no other, and does not write that one again.
* Where it shares devices with engines, it loads, trains and publishes in its own turn only. It gives the turn away
  after each publish, asleep, and says then what it has published: engines that wake find newer weights than theirs.
* Where it only lends them, it gives the turn away when it has waited ``lend_after_s`` for a batch and an engine is
  there to take it, and asks for it as soon as there is anything to do.

What its backend does, and what follows on what, stands in ``phases.py``.

| waits for | who ends it |
|---|---|
| the name of a checkpoint | the Buffer; ``start_timeout_s``, then another Learner takes its place |
| its backend to open (model, warm start) | the backend; ``start_timeout_s``, likewise |
| a batch | the Buffer |
| a step, an export, its digest, a checkpoint, its sleep, its waking | the backend; ``step_timeout_s``, likewise |
| engines that share its devices to yield | each, when what runs has ended; ``yield_timeout_s``, then it is replaced |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never, final

from penstock.actors.learner.batches import oldest_age, receipt_of, training_of
from penstock.actors.learner.looks import learner_activity, learner_waits
from penstock.actors.learner.phases import LEARNER as LEARNER_STEPS
from penstock.actors.learner.phases import Phase
from penstock.actors.learner.publishing import PUBLISH_DEADLINE, Publishing
from penstock.actors.learner.saving import SAVE_DEADLINE, Saving
from penstock.actors.learner.turns import Turns
from penstock.actors.transitions import Steps
from penstock.messages.commands import (
    DeleteCheckpoints,
    FailRun,
    OpenLearner,
    ReleaseWeights,
    ReplaceActor,
    Send,
    SleepLearner,
    StartTimer,
    StopTimer,
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
    WeightsCopied,
    WeightsPublished,
)
from penstock.messages.membership import EngineJoined, EngineLost
from penstock.messages.names import BUFFER, LEARNER, SUPERVISOR, WEIGHT_PUBLISHER
from penstock.messages.training import (
    Activity,
    BatchReady,
    CheckpointDemanded,
    CheckpointNamed,
    CheckpointsKept,
    DeviceYielded,
    Holder,
    LearnerReady,
    NoticeGiven,
    StepFinished,
    UpdateMode,
)
from penstock.messages.weights import PublishFailed, VersionAnnounced, WeightsExported

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.actors.learner.settings import LearnerSettings
    from penstock.messages.base import Metric
    from penstock.messages.commands import AnyCommand
    from penstock.messages.inboxes import LearnerEvent
    from penstock.messages.waits import Wait

DEADLINE: Final = "deadline"
YIELD_DEADLINE: Final = "yield"
LEND_TIMER: Final = "lend"


@final
class Learner:
    """The Learner's state machine."""

    def __init__(self, settings: LearnerSettings) -> None:
        self.settings = settings
        self.phase = Phase.STARTING
        self.version = -1
        """−1: nothing is loaded; no batch makes version 0."""
        self.turns = Turns(settings.shares_with, settings.epoch)
        self.is_awake = False
        """On its device."""
        self.publishing = Publishing(settings)
        self.saving = Saving(settings.step_timeout_s)
        self._steps = Steps(LEARNER_STEPS)
        self._batch: BatchReady | None = None
        """In training."""
        self._oldest_age = 0
        """Of its tokens; see :func:`.oldest_age`."""
        self._next: BatchReady | None = None
        """Came while the backend was busy."""
        self._receipt: StepFinished | None = None
        self._named: CheckpointNamed | None = None
        """To be loaded."""
        self._exported: WeightsExported | None = None
        """To be told when the engines have the devices."""
        self._lends = settings.lend_after_s is not None
        self._is_waiting = False
        """For a batch, with devices that it could lend."""
        self._out: list[AnyCommand] = []

    @property
    def state(self) -> str:
        """For people."""
        if self.phase is not Phase.IDLE:
            return self.phase.value
        if not self.is_awake:
            return "asleep"
        return "checkpointing" if self._is_held_up else self.phase.value

    @property
    def shows(self) -> tuple[Activity, float, float]:
        """See :class:`penstock.actors.machine.Accounted`; a learner that works works on all it has."""
        is_awake, is_held_up = self.is_awake, self._is_held_up
        return learner_activity(self.phase, version=self.version, is_awake=is_awake, is_held_up=is_held_up), 1.0, 0.0

    @property
    def _is_held_up(self) -> bool:
        """By the checkpoint that is being written, unless its backend does something else."""
        return self.saving.holds_up(has_batch=self._next is not None)

    def leases(self) -> tuple[()]:
        """Samples in a batch are settled; the Learner holds none."""
        return ()

    def handle(self, event: LearnerEvent) -> list[AnyCommand]:
        """Take one event; see :class:`penstock.actors.machine.Machine`."""
        self._steps.cause = type(event)
        match event:
            case BatchReady():
                self._on_batch(event)
            case BatchTrained():
                self._on_trained(event)
            case WeightsCopied():
                self._on_copied(event)
            case WeightsPublished():
                self._on_published(event)
            case CheckpointDemanded():
                self._out += self.saving.demanded(event, version=self.version)
            case PublishDemanded():
                self.publishing.demanded(event.version, version=self.version)
            case CheckpointWritten():
                self._out += self.saving.done(event)
            case CheckpointsKept():
                self._out.append(DeleteCheckpoints(event.oldest_version))
            case VersionAnnounced():
                if self.publishing.announced(event.version):
                    self._out.append(ReleaseWeights(event.version))
            case PublishFailed():
                self.publishing.failed(event.publish)
            case CheckpointNamed():
                self._on_named(event)
            case LearnerOpened():
                self._on_opened(event)
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
        if self._lends:
            self._look_at_wait()
        out, self._out = self._out, []
        return out

    # --- events -----------------------------------------------------------------------------------------------

    def _on_named(self, event: CheckpointNamed) -> None:
        if self.phase is not Phase.STARTING or event.learner_epoch != self.settings.epoch:
            return  # said again, or to a predecessor
        self.publishing.announced(event.announced_version)
        self._named = event
        self._ask()

    def _on_opened(self, event: LearnerOpened) -> None:
        self._done()
        version = self.version = event.version
        self.is_awake = True
        self._tell(event.notices)
        self._out.append(Send(BUFFER, LearnerReady(epoch=self.settings.epoch, version=version)))
        self.publishing.opened(version)
        self.saving.is_due = version == 0 and self.settings.saves_first

    def _tell(self, notices: Iterable[str]) -> None:
        self._out.extend(Send(SUPERVISOR, NoticeGiven(name=LEARNER, text=text, is_warning=True)) for text in notices)

    def _on_late(self, key: str) -> None:
        doing = self.phase.value
        if key == LEND_TIMER:
            self._lend()
            return
        if key == SAVE_DEADLINE:
            doing = "" if self.saving.writing is None else "checkpointing"
        elif key == PUBLISH_DEADLINE:
            doing = "" if self.publishing.copied is None else "publishing"
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
        if event.version <= self.version:
            stand = self._receipt or LearnerReady(epoch=self.settings.epoch, version=self.version)
            self._out.append(Send(BUFFER, stand))
        elif event.version == self.version + 1 and self._batch is None:
            self._next = event

    def _on_trained(self, event: BatchTrained) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        assert event.version == batch.version
        self._done()
        self.version = event.version
        self._receipt = receipt_of(batch, event, self._oldest_age)
        self._out.extend((Send(BUFFER, self._receipt), Send(WEIGHT_PUBLISHER, self._receipt)))
        if self.settings.publishes or event.version == 1:  # recorded tokens are its own only at first
            self._tell(event.notices)
        self.publishing.trained(batch, are_shared=self.turns.are_taken and not self._lends)
        self.saving.is_due |= self.version % self.settings.save_every == 0 and not batch.is_last

    def _on_copied(self, event: WeightsCopied) -> None:
        if self.turns.are_taken and not self._lends:
            return  # its turn ends with the publish, so there is no batch to train meanwhile
        self._done()
        self._out += self.publishing.copy_taken(event.version)

    def _on_published(self, event: WeightsPublished) -> None:
        if self.publishing.copied is None:
            self._done()
        else:
            assert event.manifest.version == self.publishing.copied
            self._out += self.publishing.copy_published()
        exported = self.publishing.done(event.manifest)
        if self.turns.are_taken and not self._lends:
            self._exported = exported
        else:
            self._out.append(Send(WEIGHT_PUBLISHER, exported))

    def _on_slept(self) -> None:
        self._done()
        exported, self._exported = self._exported, None
        assert (exported is None) == self._lends
        self.is_awake = False
        told = () if exported is None else (Send(WEIGHT_PUBLISHER, exported),)
        self._out.extend((*told, *self.turns.free()))

    # --- devices that are lent --------------------------------------------------------------------------------

    def _look_at_wait(self) -> None:
        """Count how long the Learner waits for a batch, while an engine could have its devices."""
        waits = self.phase is Phase.IDLE and self.is_awake and self._next is None and self.turns.has_takers
        if self.settings.lend_after_s is None or waits == self._is_waiting:
            return
        self._is_waiting = waits
        self._out.append(StartTimer(LEND_TIMER, self.settings.lend_after_s) if waits else StopTimer(LEND_TIMER))

    def _lend(self) -> None:
        if self._is_waiting:
            self._start(Phase.SLEEPING)
            self._out.append(SleepLearner())

    # --- what follows from the state --------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.phase is Phase.ASKING and self.turns.is_ours:
            self._take_turn()
        if self.phase is not Phase.IDLE:
            return
        is_needed = self.publishing.is_due or self._next is not None
        if self._lends:
            is_needed |= self.saving.is_wanted(self.version)
        if not self.is_awake and is_needed:
            self._ask()
            self._advance()
            return
        if self.publishing.is_due:
            self._start(Phase.PUBLISHING)
            self._out.append(self.publishing.start(self.version))
            return
        self._out += self.saving.start(self.version)
        if self._exported is not None:
            self._start(Phase.SLEEPING)
            self._out.append(SleepLearner())
        elif self._next is not None and not self.saving.is_due:
            batch, self._next = self._next, None
            self._train(batch)

    def _ask(self) -> None:
        """The device is needed; ``_advance`` goes on when it is there."""
        self._turn(Phase.ASKING)
        interrupts = self._lends or (self._next is not None and self._next.update_mode is not UpdateMode.DRAIN)
        self._out.extend(self.turns.ask(interrupts=interrupts))
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
        self._turn(Phase.OPENING)
        self.saving.loads(named)
        if self.turns.are_taken:  # the time that it waited for engines does not count
            self._out.append(StartTimer(DEADLINE, self.settings.start_timeout_s))
        self._out.append(OpenLearner(version=named.version, path=named.path))

    def _train(self, batch: BatchReady) -> None:
        age, bound = oldest_age(batch), batch.max_staleness
        if age > bound:
            self._out.append(FailRun(f"batch {batch.version} holds a token of age {age}, the bound is {bound}"))
            return
        self._batch, self._oldest_age = batch, age
        self._start(Phase.TRAINING)
        self._out.append(training_of(batch))

    def _turn(self, phase: Phase) -> None:
        self._steps.take(self.phase, phase)
        self.phase = phase

    def _start(self, phase: Phase) -> None:
        self._turn(phase)
        self._out.append(StartTimer(DEADLINE, self.settings.step_timeout_s))

    def _done(self) -> None:
        self._turn(Phase.IDLE)
        self._out.append(StopTimer(DEADLINE))

    def validate(self) -> None:
        """Assert the invariants."""
        self._steps.validate()
        assert (self.phase is Phase.TRAINING) == (self._batch is not None)
        assert self._batch is None or self._batch.version == self.version + 1
        assert self.publishing.version <= self.version or self.version < 0
        assert self.publishing.copied is None or self.publishing.copied == self.publishing.version
        self.turns.validate()
        assert not self.is_awake or self.turns.holder is Holder.LEARNER
        assert self._next is None or self.phase is not Phase.IDLE or self.saving.is_due
        assert self.is_awake or self.phase not in (Phase.TRAINING, Phase.PUBLISHING, Phase.SLEEPING)
        assert self.is_awake or self.turns.are_taken or self.phase is not Phase.IDLE

    def waits(self) -> tuple[Wait, ...]:
        """The Buffer, or its backend."""
        held = self._is_held_up
        return tuple(
            learner_waits(self.phase, self.turns, self.saving, self.publishing, version=self.version, is_held_up=held)
        )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Nothing: the backend has gauges."""
        return ()
