"""The events between Buffer and Learner, and those that change or end the run."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from penstock.messages.base import Delivery, Event, Metric, Value
from penstock.messages.reasons import ReasonCount
from penstock.messages.samples import Group


class UpdateMode(StrEnum):
    """How an engine takes new weights."""

    DRAIN = "drain"
    """Submit nothing more, let what runs come to its end, then swap."""
    INTERRUPT = "interrupt"
    """Stop what runs, swap, go on from the tokens so far with a cache made by the new weights."""
    IN_FLIGHT = "in_flight"
    """Swap between two decode steps; what runs goes on with its cache."""


class OnStale(StrEnum):
    """What the Buffer does about groups that could become older than the bound."""

    WAIT = "wait"
    """Never let it happen: pace grants and batches so that each group is trained in time."""
    DROP = "drop"
    """A group past its deadline becomes terminal ``stale``."""
    REQUEUE = "requeue"
    """The same, and its prompt is granted anew under a new group id, a limited number of times."""
    MASK = "mask"
    """Tokens beyond the bound are left out of the loss."""


class LearnerReady(Event, frozen=True, kw_only=True):
    """Learner → Buffer: a Learner has started (version −1: it has loaded nothing and waits for ``CheckpointNamed``), or
    stands at this version."""

    epoch: int
    version: int


class CheckpointNamed(Event, frozen=True, kw_only=True):
    """Buffer → Learner: load this one and no other, whatever lies on the disk."""

    learner_epoch: int
    """The incarnation that asked."""
    version: int
    path: str
    """Empty: there is no checkpoint yet; start from the model of the scenario, at version 0."""
    announced_version: int
    """The newest version that engines were told of; −1: none. Nothing older needs to be published."""


class CheckpointsKept(Event, frozen=True, kw_only=True):
    """Buffer → Learner: the run may be resumed from this checkpoint and newer ones; older ones may go."""

    oldest_version: int


class BatchReady(Event, frozen=True, kw_only=True):
    """Buffer → Learner: the lease on the batch that makes ``version``. Offered again, unchanged, until its receipt
    is recorded."""

    version: int
    """The version that training it makes; it is consumed at ``version − 1``."""
    groups: tuple[Group, ...]
    announced_version: int
    """The newest version that enough engines serve."""
    max_staleness: int
    mask_stale: bool = False
    """Tokens older than ``version − 1 − max_staleness`` are left out of the loss (``on_stale: mask``)."""
    mask_old_tokens: bool = False
    """Tokens of a sample that are older than its newest ones are left out of the loss (``mask_old_tokens``)."""
    update_mode: UpdateMode
    is_last: bool = False
    num_waiting_groups: int = 0
    """Complete groups that are left in the Buffer after this batch."""
    uses: tuple[int, ...] = ()
    """Of each group, which use of it this is, from 1; empty: the first of every one."""


class StepFinished(Event, frozen=True, kw_only=True):
    """Learner → Buffer, WeightPublisher: the receipt. These groups are trained and made this version. Repeated
    until it is recorded."""

    version: int
    group_ids: tuple[int, ...]
    num_trained_tokens: int
    num_masked_tokens: int = 0
    max_staleness: int
    """Age of the oldest trained token, in versions, at the moment of consumption."""
    metrics: tuple[Metric, ...] = ()
    uses: tuple[int, ...] = ()
    """As in the batch."""


class CheckpointDemanded(Event, frozen=True, kw_only=True):
    """Buffer → Learner: save as soon as you stand at this version or a later one."""

    version: int
    ends_run: bool = False
    """Nothing is trained any more: the run ends, or stops, when this one is there."""


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """Learner → Buffer: this version is on disk, whole."""

    version: int
    path: str


class StopAsked(Event, frozen=True, kw_only=True):
    """Supervisor → Buffer: grant and offer nothing more; what is in the system stays accounted for."""

    reason: str


class CauseCount(Value, frozen=True, kw_only=True):
    """Samples and tokens that ended in one state for one cause."""

    state: str
    cause: str
    num_samples: int
    num_tokens: int
    """Of their responses."""
    num_given_tokens: int = 0
    """Of these, tokens that the model did not make."""

    @property
    def num_made_tokens(self) -> int:
        """Tokens that the model made."""
        return self.num_tokens - self.num_given_tokens


class Balance(Value, frozen=True, kw_only=True):
    """The ledger's balance, in samples and in the tokens that the model made: ``issued = Σ ended + in_system``, and
    ``generated_tokens = Σ made tokens of ended + in_system_tokens``. Every figure of tokens that anybody is shown is
    one of these."""

    issued: int
    in_system: int
    ended: tuple[CauseCount, ...]
    generated_tokens: int | None = None
    """Of every response that has come to the Buffer, counted as it came and not as it ended. None: it was written
    before they were counted."""
    in_system_tokens: int = 0
    """Of responses that have come and not ended."""

    @property
    def is_balanced(self) -> bool:
        if self.issued != self.in_system + sum(count.num_samples for count in self.ended):
            return False
        accounted = self.in_system_tokens + sum(count.num_made_tokens for count in self.ended)
        return self.generated_tokens is None or self.generated_tokens == accounted


class StepReported(Event, frozen=True, kw_only=True):
    """Buffer → supervisor: a recorded step, for trackers and the terminal."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    version: int
    num_steps: int
    group_ids: tuple[int, ...]
    metrics: tuple[Metric, ...]
    staleness_counts: tuple[int, ...]
    """Trained samples of this batch by age (index = staleness)."""
    response_lengths: tuple[int, ...]
    """Response tokens of each sample of the batch."""
    balance: Balance
    policy: str = ""
    """Staleness policy that new grants follow when it is recorded."""


class RunFinished(Event, frozen=True, kw_only=True):
    """Buffer → supervisor: the run is over. Said again when samples that were under way change the balance."""

    completed: bool
    story: str
    version: int
    max_staleness: int
    balance: Balance
    checkpoint: str = ""


class FailuresCounted(Event, frozen=True, kw_only=True):
    """Buffer → supervisor: how many samples have failed, or were dropped by an error, for which reason, over the whole
    run. The most frequent reasons, most frequent first; a full snapshot each time."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    counts: tuple[ReasonCount, ...]
    num_samples: int
    """Of all reasons, those that are not named too."""


class NoticeGiven(Event, frozen=True, kw_only=True):
    """Any actor → supervisor: one line of the run's story, for the terminal and the log."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    name: str
    text: str
    is_warning: bool = False
    """Something is wrong with the run, and it goes on: it stands in the summary and in the report as well."""


class Holder(StrEnum):
    """Whose turn it is on devices that learner and engines share."""

    LEARNER = "learner"
    ENGINES = "engines"


class DeviceTurned(Event, frozen=True, kw_only=True):
    """Learner → EngineWorker, when they share devices: whose turn it is. Under the Learner's an engine gives its memory
    up, and says so, when nothing runs any more; under the engines' it opens, and wakes with the next weights."""

    turn: int
    """Goes up with every change, also over incarnations of the Learner."""
    holder: Holder
    interrupts: bool = False
    """What runs is broken off for the Learner, and goes on in the next turn of the engines."""


class DeviceYielded(Event, frozen=True, kw_only=True):
    """EngineWorker → Learner: this engine holds no device memory, and takes none before a later turn."""

    engine: str
    engine_epoch: int
    turn: int


class Activity(StrEnum):
    """What an engine or a learner spends its time on; exactly one at each moment."""

    WORKING = "working"
    WAITING_FOR_SAMPLES = "waiting_for_samples"
    WAITING_FOR_DEMAND = "waiting_for_demand"
    WAITING_FOR_WEIGHTS = "waiting_for_weights"
    WAITING_FOR_TOOLS = "waiting_for_tools"
    APPLYING_WEIGHTS = "applying_weights"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    ASLEEP = "asleep"
    STARTING = "starting"
    DOWN = "down"
    ABSENT = "absent"
    """It is not in the run: an engine that has not joined yet, or has left."""


class ActivitySpan(Value, frozen=True, array_like=True):
    """One stretch of time in one state. Times are seconds since the start of the run."""

    activity: Activity
    start_s: float
    end_s: float
    occupancy: float = 1.0
    """Mean of running ÷ capacity while working."""
    outside: float = 0.0
    """Mean of those that wait for tools, environments and agents ÷ capacity, in every state."""


class ActorReported(Event, frozen=True, kw_only=True):
    """Any actor → supervisor, with the heartbeat: what it did and its counters."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    name: str
    epoch: int
    state: str
    """One word for the terminal: what it does now."""
    activities: tuple[ActivitySpan, ...] = ()
    metrics: tuple[Metric, ...] = ()
    """Running totals (``engine/generated_tokens``) and gauges (``engine/running``)."""
