"""Injects the faults of a plan into a run, each when the run has come so far, and drives the run to its end.

Invariants:

* A fault whose target is not there (it is being replaced) waits until it is.
* What a fault with a duration has changed is undone at its end, and in any case before the controller leaves.
* A run that a fault has ended (a killed driver, a full disk) is resumed; any other end is the end.

| waits for | who ends it |
|---|---|
| the progress at which the next fault comes | the run, by a step or by its end |
| the target of a fault | the supervisor, by its replacement |
| the end of the run | the run; else ``timeout_s`` |
"""

from __future__ import annotations

import heapq
import itertools
import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from penstock.backends.processes.process_facts import kill
from penstock.runtime.chaos.faults import DRIVER, LINK_FAULTS, ChaosFault, ChaosKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.runtime.chaos.disk import SmallDisk
    from penstock.runtime.chaos.nodes import TwoNodes
    from penstock.runtime.chaos.switchboard import Switchboard
    from penstock.runtime.chaos.watch import WatchedRun

POLL_S: Final = 0.02
SLOW_STOP_S: Final = 0.25
"""Half of the time for which a process may be stopped without being given up."""
SLOW_GO_S: Final = 0.25
"""At least so long it runs in between, longer than the supervisor's pause between two looks at it."""


class Injected(msgspec.Struct, kw_only=True):
    """What came of one fault."""

    fault: ChaosFault
    unix_s: float | None = None
    """When it was brought about; None when the run was over before."""
    version: int = 0
    """Steps that were recorded then."""
    pid: int | None = None
    """The process that was hit."""
    epoch: int | None = None
    """Incarnation of the actor that the fault hit."""
    was_lost: bool = False
    """That incarnation was given up, for this or any other reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What some kinds of faults need; None where no such fault is planned."""

    switchboard: Switchboard | None = None
    orders: Path | None = None
    disk: SmallDisk | None = None
    nodes: TwoNodes | None = None


class Injector:
    """One run and its faults."""

    def __init__(
        self,
        run: WatchedRun,
        faults: Sequence[ChaosFault],
        *,
        num_steps: int,
        tools: Tools,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            run: started.
            faults: earliest first.
            num_steps: that the run is to make.
            tools: for the kinds that need any.
            tell: is called with a line for each fault when it has come, and for each end that the run goes on from.
        """
        self._tell = tell
        self.injected = [Injected(fault=fault) for fault in faults]
        self._run = run
        self._num_steps = num_steps
        self._tools = tools
        self._waiting = list(self.injected)
        self._armed: list[tuple[float, Injected]] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._may_resume = 0

    def play(self, timeout_s: float) -> bool:
        """Until the run has ended for good; False when that took too long."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self._run.look()
            if self._run.ended() is not None:
                if not self._goes_on():
                    self._run.look()
                    return True
                continue
            self._end_due(time.monotonic())
            self._begin_due(time.monotonic())
            time.sleep(POLL_S)
        return False

    def _goes_on(self) -> bool:
        """Take a run up again that a fault has ended."""
        if self._run.exit_codes[-1] == 0 or self._may_resume == 0:
            return False
        self._may_resume -= 1
        self._end_due(float("inf"))
        if self._tools.disk is not None:
            self._tools.disk.empty()
        self._tell(f"the run ended at step {self._run.version} of {self._num_steps}, and is resumed")
        self._run.resume()
        return True

    # --- when -------------------------------------------------------------------------------------------------

    def _begin_due(self, now_s: float) -> None:
        progress = self._run.version / self._num_steps
        while self._waiting and self._waiting[0].fault.progress <= progress:
            one = self._waiting.pop(0)
            self._armed.append((now_s + one.fault.delay * self._run.step_s(), one))
        for due_s, one in list(self._armed):
            if due_s <= now_s and self._begin(one):
                self._armed.remove((due_s, one))

    def _end_due(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            heapq.heappop(self._due)[2]()

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), act))

    # --- what -------------------------------------------------------------------------------------------------

    def _begin(self, one: Injected) -> bool:
        """Bring a fault about; False when that is not possible yet."""
        fault = one.fault
        at_s = time.time()
        if fault.kind in LINK_FAULTS:
            if self._run.find(fault.target) is None or self._run.find(fault.peer) is None:
                return False
            self._hit_link(fault)
        elif fault.target:
            actor = self._run.actor(fault.actor)
            one.epoch = None if actor is None else actor.epoch
            hit = self._hit_process(fault)
            if hit is None:
                return False
            one.pid = hit[0]
        else:
            self._hit_run(fault)
        one.unix_s, one.version = at_s, self._run.version
        self._tell(f"{fault} at step {one.version} of {self._num_steps}")
        return True

    def _hit_process(self, fault: ChaosFault) -> tuple[int, int] | None:
        match fault.kind:
            case ChaosKind.KILL:
                hit = self._run.signal(fault.target, signal.SIGKILL)
                if hit is not None and fault.target == DRIVER:
                    self._may_resume += 1
                return hit
            case ChaosKind.STOP:
                hit = self._run.signal(fault.target, signal.SIGSTOP)
                if hit is not None:
                    self._later(fault.duration_s, partial(_continue, hit))
                return hit
            case ChaosKind.CONTINUE:
                return self._run.signal(fault.target, signal.SIGCONT)
            case ChaosKind.NOTICE:
                return self._run.signal(fault.target, signal.SIGTERM)
            case ChaosKind.SLOW:
                hit = self._run.find(fault.target)
                if hit is not None:
                    self._slow(hit, fault.amount, time.monotonic() + fault.duration_s)
                return hit
            case _:
                raise AssertionError(fault)

    def _slow(self, process: tuple[int, int], amount: float, until_s: float) -> None:
        if time.monotonic() >= until_s or not kill(*process, signal.SIGSTOP):
            return
        go_s = max(SLOW_GO_S, SLOW_STOP_S / max(1e-3, amount - 1.0))

        def go_on() -> None:
            _continue(process)
            self._later(go_s, lambda: self._slow(process, amount, until_s))

        self._later(SLOW_STOP_S, go_on)

    def _hit_link(self, fault: ChaosFault) -> None:
        switchboard = self._tools.switchboard
        assert switchboard is not None
        link = (fault.kind, fault.target, fault.peer, fault.amount)
        switchboard.begin(*link)
        if fault.kind is not ChaosKind.RESTORE:
            self._later(fault.duration_s, lambda: switchboard.end(*link))

    def _hit_run(self, fault: ChaosFault) -> None:
        match fault.kind:
            case ChaosKind.REWARD_HANG | ChaosKind.REWARD_THROW | ChaosKind.REWARD_NAN | ChaosKind.REWARD_EXIT:
                assert self._tools.orders is not None
                (self._tools.orders / f"{fault.kind}-{next(self._order)}").touch()
            case ChaosKind.DISK_FULL:
                assert self._tools.disk is not None
                self._tools.disk.fill()
                self._may_resume += 1
            case ChaosKind.MACHINE:
                self._run.kill_all()
                self._may_resume += 1
            case ChaosKind.NODE_LOSS:
                assert self._tools.nodes is not None
                self._tools.nodes.lose()
            case (
                ChaosKind.KILL
                | ChaosKind.STOP
                | ChaosKind.CONTINUE
                | ChaosKind.SLOW
                | ChaosKind.NOTICE
                | ChaosKind.CUT
                | ChaosKind.RESTORE
                | ChaosKind.DROP
                | ChaosKind.DUPLICATE
                | ChaosKind.REORDER
                | ChaosKind.DELAY
                | ChaosKind.TRUNCATE
                | ChaosKind.GARBAGE
            ):
                raise AssertionError(fault)
            case _:
                assert_never(fault.kind)


def _continue(process: tuple[int, int]) -> None:
    kill(*process, signal.SIGCONT)
