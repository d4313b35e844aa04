"""Faults, by the names under which they are asked for, and how each is brought about.

Invariants:

* A fault names its target by the actor's name; it hits whatever incarnation is there when its time comes, and nothing
  when there is none.
* What a fault with a duration has changed is undone at its end.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from penstock.messages.names import LEARNER
from penstock.runtime.hosts.virtual.process import Process, Status, hear_restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.runtime.hosts.virtual.host import VirtualHost
    from penstock.runtime.hosts.virtual.links import LinkFaults

NEVER: Final = 1e9
"""Times as long as anything takes: beyond the end of every run."""


class FaultKind(StrEnum):
    """What can be done to a process or to a directed link."""

    KILL = "kill"
    """SIGKILL: the process and all that it had not carried out are gone."""
    STOP = "stop"
    """SIGSTOP: nothing is handled, messages wait, timers stand still."""
    CONTINUE = "continue"
    """SIGCONT."""
    SLOW = "slow"
    """Its backend takes ``amount`` times as long; :data:`NEVER`: it never answers what it was asked for meanwhile."""
    CUT = "cut"
    """What is sent over the link is lost."""
    RESTORE = "restore"
    """The link carries again."""
    DROP = "drop"
    """A share ``amount`` of the packs is lost."""
    DUPLICATE = "duplicate"
    """A share ``amount`` of the packs arrives twice."""
    REORDER = "reorder"
    """A share ``amount`` of the packs may be overtaken."""
    DELAY = "delay"
    """Every pack takes ``amount`` seconds longer."""
    NOTICE = "notice"
    """The engine's machine is taken ``duration_s`` later, and it is told."""
    MACHINE = "machine"
    """Every process and everything on its way is gone at once; the run is resumed."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault and when it happens."""

    at_s: float
    kind: FaultKind
    target: str
    """An actor; for links the sender."""
    peer: str = ""
    """For links the receiver; empty: every receiver."""
    duration_s: float | None = None
    """It ends after so long; None: never by itself."""
    amount: float = 0.0
    after_effects: int | None = None
    """``kill`` only: not at once, but when the process has carried out so many more of its effects, that is, in the
    middle of what some turn wants done."""
    as_zombie: bool = False
    """``stop`` only: the process cannot be killed while it is stopped, so when it was given up meanwhile it goes on
    afterwards as if nothing had happened."""


def inject(host: VirtualHost, faults: Iterable[Fault]) -> None:
    """Arrange for these faults to happen."""
    for fault in faults:
        host.clock.at(fault.at_s, _begin, host, fault)


def _begin(host: VirtualHost, fault: Fault) -> None:
    match fault.kind:
        case FaultKind.MACHINE:
            host.lose_machine()
        case FaultKind.KILL | FaultKind.STOP | FaultKind.CONTINUE | FaultKind.SLOW | FaultKind.NOTICE:
            process = host.supervisor.processes.get(fault.target)
            if process is not None and process.status is not Status.DEAD:
                _hit_process(host, fault, process)
        case _:
            _hit_links(host, fault)


def _hit_process(host: VirtualHost, fault: Fault, process: Process) -> None:
    match fault.kind:
        case FaultKind.KILL if fault.after_effects is not None:
            process.effects_to_live = fault.after_effects
        case FaultKind.KILL:
            process.kill()
        case FaultKind.STOP:
            process.survives_sigkill = fault.as_zombie
            process.stop()
            host.supervisor.stopped(process)
            _later(host, fault, process.go_on)
        case FaultKind.CONTINUE:
            process.go_on()
        case FaultKind.NOTICE:
            assert fault.duration_s is not None, "a notice is of some length"
            host.supervisor.noticed(process, fault.duration_s)
        case FaultKind.SLOW:
            if fault.amount < NEVER or fault.target != LEARNER or process.start_s is not None:
                _slow_down(host, fault, process)  # a Learner may take half an hour to start, and is waited for so long
        case _:
            raise AssertionError(fault)


def _slow_down(host: VirtualHost, fault: Fault, process: Process) -> None:
    process.slowness = fault.amount

    def recover() -> None:
        process.slowness = 1.0

    _later(host, fault, recover)


def _hit_links(host: VirtualHost, fault: Fault) -> None:
    peers = [fault.peer] if fault.peer else [name for name in host.names if name != fault.target]
    for peer in peers:
        _change(host, peer, fault, begins=True)
        if fault.kind is not FaultKind.RESTORE:
            _later(host, fault, partial(_change, host, peer, fault, begins=False))


def _change(host: VirtualHost, peer: str, fault: Fault, *, begins: bool) -> None:
    link = host.links.faults_of(fault.target, peer)
    was_cut = link.num_cuts > 0
    _change_link(link, fault, begins=begins)
    sender = host.supervisor.processes.get(fault.target)
    if was_cut and not link.num_cuts and sender is not None:
        host.clock.at(host.clock.now_s, hear_restored, sender, peer)


def _change_link(link: LinkFaults, fault: Fault, *, begins: bool) -> None:
    amount = fault.amount if begins else -fault.amount
    match fault.kind:
        case FaultKind.CUT:
            link.num_cuts += 1 if begins else -1
        case FaultKind.RESTORE:
            link.num_cuts = 0
        case FaultKind.DROP:
            link.drop += amount
        case FaultKind.DUPLICATE:
            link.duplicate += amount
        case FaultKind.REORDER:
            link.reorder += amount
        case FaultKind.DELAY:
            link.extra_delay_s += amount
        case (
            FaultKind.KILL | FaultKind.STOP | FaultKind.CONTINUE | FaultKind.SLOW | FaultKind.NOTICE | FaultKind.MACHINE
        ):
            raise AssertionError(fault)
        case _:
            assert_never(fault.kind)


def _later(host: VirtualHost, fault: Fault, act: Callable[[], None]) -> None:
    if fault.duration_s is not None:
        host.clock.at(host.clock.now_s + fault.duration_s, _call, act, None)


def _call(act: Callable[[], None], _: None) -> None:
    act()
