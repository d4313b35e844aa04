"""Who is alive, and what a census asks and answers."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from penstock.messages.base import Delivery, Event, Value
from penstock.messages.samples import Part, SampleKey


class ActorEpoch(Value, frozen=True, array_like=True):
    """One incarnation of an actor. A replacement has a higher epoch than what it replaces."""

    name: str
    epoch: int


class ActorLost(Event, frozen=True, kw_only=True):
    """This incarnation is given up: nothing that it still says counts."""

    delivery: ClassVar[Delivery] = Delivery.LOCAL
    name: str
    epoch: int


class ActorReturned(Event, frozen=True, kw_only=True):
    """A new incarnation is there; implies the loss of every earlier one."""

    delivery: ClassVar[Delivery] = Delivery.LOCAL
    name: str
    epoch: int


class EngineLost(Event, frozen=True, kw_only=True):
    """As ``ActorLost``, for an EngineWorker. Of one on the learner's devices nothing is left by then that could hold
    them."""

    delivery: ClassVar[Delivery] = Delivery.LOCAL
    name: str
    epoch: int


class EngineJoined(Event, frozen=True, kw_only=True):
    """As ``ActorReturned``, for an EngineWorker; also at its first start."""

    delivery: ClassVar[Delivery] = Delivery.LOCAL
    name: str
    epoch: int


class EngineLeaving(Event, frozen=True, kw_only=True):
    """This incarnation is to leave the run: it is given nothing more, and hands back what it has. It counts until
    ``EngineLost``."""

    delivery: ClassVar[Delivery] = Delivery.LOCAL
    name: str
    epoch: int


class EngineEmptied(Event, frozen=True, kw_only=True):
    """PromptSource → supervisor: an engine that is to leave has nothing left that others do not have. If this is lost,
    it stays until its time is up."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    engine: str
    engine_epoch: int


class EngineNoticed(Event, frozen=True, kw_only=True):
    """EngineWorker, or supervisor → Buffer: how this incarnation came up, where that is worth a line in the ledger:
    that it has taken over a server, or why it has not; that it waits for GPUs. If this is lost, the line is missing."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    engine: str
    engine_epoch: int
    text: str


class EnginesWanted(Event, frozen=True, kw_only=True):
    """Buffer → supervisor: the engines that the run is to have, as recorded. Who is missing is started, any other
    leaves."""

    engines: tuple[str, ...]
    given_up: tuple[ActorEpoch, ...] = ()
    """Incarnations of which is recorded that they were given up. An engine of the run that is among these was asked for
    again since."""


class EngineGivenUp(Event, frozen=True, kw_only=True):
    """Supervisor → Buffer: this engine was lost too often, the last time as this incarnation, and is started no more;
    the run is to go on without it. Repeated until ``EnginesWanted`` no longer names it, or says that this is
    recorded."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    engine: str
    engine_epoch: int
    reason: str


class LineRestored(Event, frozen=True, kw_only=True):
    """The line to this peer carries again after it was cut: what was said once and not kept may be lost."""

    delivery: ClassVar[Delivery] = Delivery.LOCAL
    name: str


class LeaseStage(StrEnum):
    """How far the holder of a sample has come with it."""

    WAITING = "waiting"
    """At an engine that does not serve its ``min_version`` yet, or is taking new weights."""
    RUNNING = "running"
    """At an engine, being generated; or at the Scorer, being scored."""
    FAILED = "failed"
    """Ended as ``infra_error``, or was revoked; PromptSource decides what next."""
    HANDED_BACK = "handed_back"
    """Given up unfinished by an engine that leaves; another goes on from its tokens."""
    PASSED_ON = "passed_on"
    """Finished here and sent on, kept until it is settled."""


class HeldLease(Value, frozen=True, array_like=True):
    """One sample that somebody holds."""

    key: SampleKey
    attempt: int
    stage: LeaseStage
    num_tokens: int = 0
    prefix: Part | None = None
    """At an engine, and only if it was asked for: what was reported of the response, so that a new PromptSource can let
    another engine go on."""


class LeasesAsked(Event, frozen=True, kw_only=True):
    """The census: what do you hold? Its ``members`` fence every earlier incarnation before the answer is given.
    PromptSource repeats it itself until everyone has answered."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    round: int
    members: tuple[ActorEpoch, ...]
    """Every live actor as PromptSource knows it."""
    lost: tuple[ActorEpoch, ...] = ()
    """The newest incarnation of each actor that was given up; filled in by the runtime. Who is merely missing from
    ``members`` may be new and not known there yet."""
    with_prefixes: bool = False
    """Whether the asker, who has just taken another's place, needs what there is of each response. Those who were there
    before have heard it."""


class LeasesHeld(Event, frozen=True, kw_only=True):
    """The answer: everything that this actor works on or keeps, and how much it knows to be settled."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    actor: ActorEpoch
    round: int
    asker_epoch: int
    settled_sequence: int
    leases: tuple[HeldLease, ...]
