"""What the supervisor and the processes of the actors say to each other, beside the events of the actors.

These travel on the same wire. They concern processes, so the host handles them and no actor ever sees one.

| says | who | when |
|---|---|---|
| ``ProcessStarted`` | a process | as soon as its inbox is bound |
| ``ProcessBeat`` | its heartbeat thread | every ``heartbeat_s`` |
| ``DirectoryChanged`` | supervisor | on every change; the whole to a new process, or one that missed something |
| ``EndAsked`` | supervisor | at the end of the run |
| ``MachineNoticed`` | an engine's process | from word that its machine is taken until it hears that it is to leave |
| ``ReplacementAsked``, ``RunFailureAsked`` | a process | when its actor returns ``ReplaceActor`` or ``FailRun`` |
"""

from __future__ import annotations

from typing import ClassVar, Final

from penstock.messages.base import Delivery, Event, Value
from penstock.messages.inboxes import SupervisorWire
from penstock.messages.membership import ActorEpoch

DISMISSED: Final = b"dismissed"
"""What the supervisor answers to the heartbeat of an incarnation that it has given up."""


class Address(Value, frozen=True, array_like=True):
    """Where an incarnation can be reached."""

    name: str
    epoch: int
    endpoint: str
    """``tcp://host:port``."""
    server_key: bytes
    """CURVE public key of the inbox (Z85), empty when nothing is encrypted."""


class ProcessStarted(Event, frozen=True, kw_only=True):
    """A process has bound its inbox; nothing of its actor runs yet."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    address: Address
    pid: int
    start_ticks: int
    """Tells this process from a later one with the same pid."""
    node_id: str


class ProcessBeat(Event, frozen=True, kw_only=True):
    """The heartbeat, from a thread of its own."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    num_turns: int
    """Turns that the loop has finished. Standing still while ``turn_s`` grows means that the loop is stuck."""
    turn_s: float
    """Age of the turn that is being worked on, 0 between turns."""
    directory_sequence: int
    """The last change of the directory that the loop has taken over without a gap."""


class DirectoryChanged(Event, frozen=True, kw_only=True):
    """Who can be reached where, and who is given up. Members and fences only ever rise, so that applying one twice,
    or two in the wrong order, is harmless."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    sequence: int
    """Counts the changes."""
    is_whole: bool
    """The whole directory, not only what this change touched."""
    members: tuple[Address, ...] = ()
    fences: tuple[ActorEpoch, ...] = ()
    """These incarnations, and every earlier one of the same name, are given up."""
    leaving: tuple[ActorEpoch, ...] = ()
    """Members that are to leave."""


class EndAsked(Event, frozen=True, kw_only=True):
    """End now: close the backend and the sockets."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    grace_s: float
    """Who is still there after this time is killed."""


class MachineNoticed(Event, frozen=True, kw_only=True):
    """The machine of this engine will be taken: it is to leave the run before."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    notice_s: float
    """From now on."""
    how: str
    """Who says so: ``SIGTERM``, the file of ``engines.notice_file``, or ``engines.notice_url``."""


class ReplacementAsked(Event, frozen=True, kw_only=True):
    """Kill this incarnation and start another in its place."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    name: str
    epoch: int
    cause: str


class RunFailureAsked(Event, frozen=True, kw_only=True):
    """Stop the run with this story."""

    delivery: ClassVar[Delivery] = Delivery.LOSSY
    story: str
    has_diverged: bool = False


ProcessControl = DirectoryChanged | EndAsked
"""What a process hears besides the wire of its actor."""

SupervisorInbox = SupervisorWire | ProcessStarted | ProcessBeat | MachineNoticed | ReplacementAsked | RunFailureAsked
"""Everything that the supervisor hears."""
