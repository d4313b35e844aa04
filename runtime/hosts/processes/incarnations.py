"""What the supervisor knows about each process, and whether that looks like life.

Three signals, because each of them fails alone: the state of the process in ``/proc`` (a stopped process shows at
once, but on this machine only), ZeroMQ's own heartbeats (answered by a thread that needs no interpreter lock), and the
heartbeat thread with a generous deadline (it starves while C code holds the lock).

Pure: time and the facts of the kernel come in as arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.training import Activity
from penstock.runtime.shell.restarts import patience_s

if TYPE_CHECKING:
    from penstock.backends.processes.process_facts import ProcessFacts
    from penstock.messages.training import ActorReported
    from penstock.runtime.hosts.processes.control import ProcessBeat, ProcessStarted

STOPPED_GRACE_S: Final = 0.5
"""A debugger, or a shell that stops and continues a whole group, may stop a process for a moment."""
GONE_GRACE_S: Final = 5.0
"""Who started a process tells when it has ended, and how: the kernel alone cannot tell an end from a death."""
LINE_GRACE_S: Final = 3.0
"""A line that was cut comes back within this time if the process lives."""
START_TIMEOUT_S: Final = 120.0
IMPORT_SILENCE_S: Final = 60.0
"""While a process imports torch on a busy machine its heartbeat thread may not get the interpreter for long."""
SLOW_AFTER_S: Final = 20.0
"""A turn that takes so long is worth a word and a look at what the loop does. Backends work on threads of their own,
so a turn takes milliseconds."""
STUCK_AFTER_S: Final = 300.0
"""The longest turn."""


class Incarnation:
    """One process of one actor, from the order to start it to its loss."""

    def __init__(self, name: str, epoch: int, now_s: float) -> None:
        self.name = name
        self.epoch = epoch
        self.process: ProcessStarted | None = None
        """None until it has announced itself."""
        self.beat: ProcessBeat | None = None
        self.directory_sent_s = now_s
        self._slow_turn = -1
        self.has_reported = False
        """Its loop runs: everything heavy is imported."""
        self.activity: Activity | None = None
        """The last one that it reported; None for an actor whose time is not accounted."""
        self.start_s: float | None = None
        """From the order to start it until what it had to load was loaded; None: it is not, or it loads nothing."""
        self._heard_s = now_s
        self._since_s = now_s
        self._down_since_s: float | None = None
        self._stopped_since_s: float | None = None
        self._gone_since_s: float | None = None

    def heard(self, now_s: float) -> None:
        """Something came from it."""
        self._heard_s = now_s

    def reported(self, report: ActorReported, now_s: float, *, timeout_s: float) -> str:
        """It says what it does. What people are to know of that: that its start took so long that it may be silent for
        longer than ``timeout_s``; mostly nothing."""
        self.has_reported = True
        if report.activities:
            self.activity = report.activities[-1].activity
        if self.start_s is not None or self.activity in (None, Activity.STARTING):
            return ""
        self.start_s = now_s - self._since_s
        given_s = patience_s(timeout_s, self.start_s)
        took = f"{self.name} took {self.start_s:.0f} s to start, as another one would"
        return f"{took}: it is replaced when it is silent for {given_s:.0f} s" if given_s > timeout_s else ""

    @property
    def is_ready(self) -> bool:
        """Its loop runs, and what it had to load is loaded."""
        return self.has_reported and self.activity is not Activity.STARTING

    def line_is(self, now_s: float, *, up: bool) -> None:
        """The line to it was cut, or is there again."""
        if up:
            self._down_since_s = None
        elif self._down_since_s is None:
            self._down_since_s = now_s

    def forgive(self, now_s: float) -> None:
        """The supervisor itself was asleep, so nobody is late: everyone gets a fresh period."""
        self._heard_s = self._since_s = now_s
        self._stopped_since_s = self._gone_since_s = None
        if self._down_since_s is not None:
            self._down_since_s = now_s

    def has_become_slow(self) -> bool:
        """Whether its loop is in a turn that takes too long; true once for each such turn."""
        beat = self.beat
        if beat is None or beat.turn_s < SLOW_AFTER_S or beat.num_turns == self._slow_turn:
            return False
        self._slow_turn = beat.num_turns
        return True

    def cause_of_loss(self, now_s: float, facts: ProcessFacts | None, *, timeout_s: float, is_local: bool) -> str:
        """Why this incarnation has to be given up; empty while it looks alive.

        Args:
            now_s: on the clock of every other call.
            facts: what the kernel says about its process, if that is on this machine.
            timeout_s: deadline of the heartbeat, of one whose start took no longer than usual.
            is_local: whether ``facts`` would be there if the process was.
        """
        if self.process is None:
            late_s = now_s - self._since_s
            return f"it did not start within {START_TIMEOUT_S:.0f} s" if late_s > START_TIMEOUT_S else ""
        if is_local:
            if facts is None or facts.state in "ZX" or facts.start_ticks != self.process.start_ticks:
                return "its process was killed" if self._is_gone_for_long(now_s) else ""
            if self._is_stopped(now_s, facts):
                return "its process was stopped"
        limit_s = timeout_s if self.has_reported else max(timeout_s, IMPORT_SILENCE_S)
        if now_s - self._heard_s > patience_s(limit_s, self.start_s):
            return f"it was not heard for {now_s - self._heard_s:.0f} s"
        down_s = self._down_since_s
        if down_s is not None and now_s - down_s > patience_s(LINE_GRACE_S, self.start_s) and self._heard_s <= down_s:
            return f"its line was cut {now_s - down_s:.0f} s ago"
        if self.beat is not None and self.beat.turn_s > STUCK_AFTER_S:
            return f"its loop has been stuck in one turn for {self.beat.turn_s:.0f} s"
        return ""

    def _is_gone_for_long(self, now_s: float) -> bool:
        if self._gone_since_s is None:
            self._gone_since_s = now_s
        return now_s - self._gone_since_s >= GONE_GRACE_S

    def _is_stopped(self, now_s: float, facts: ProcessFacts) -> bool:
        if facts.state != "T":
            self._stopped_since_s = None
            return False
        if self._stopped_since_s is None:
            self._stopped_since_s = now_s
        return now_s - self._stopped_since_s >= STOPPED_GRACE_S
