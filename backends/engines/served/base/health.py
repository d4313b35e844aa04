"""Whether a server lives: a pure state machine. Facts and the time go in, changes with their cause come out.

```
starting ── Ready ──► healthy ◄──► suspect ──► dead
    └───────────────── Ended ────────────────────┘
```

Invariants:

* Every change has a cause in words. ``dead`` is final.
* A token that arrives proves the whole way, so it ends every suspicion but that of a stopped process.
* Silence counts against a server only where it could have spoken. What the scheduler answers waits behind a long
  forward pass and behind a compilation, so its deadline is generous, and longer until the server has made its first
  token; while a control call occupies the scheduler, up to the call's own deadline, nothing is counted; while it is
  paused no tokens are expected.
* What is stopped by a signal is seen in the process table and needs no long wait.

How each part shows that it hangs:

| hangs | main process | scheduler | tokens |
|---|---|---|---|
| main process (HTTP, tokenizer) | no answer | no answer | none |
| scheduler | answers | no answer | none |
| detokenizer | answers | answers | none |
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.messages.texts import counted, does

if TYPE_CHECKING:
    from collections.abc import Mapping


class HealthState(StrEnum):
    """What can be asked of a server."""

    STARTING = "starting"
    """It takes no requests yet."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Something is silent or stopped. It gets no new work; it may recover."""
    DEAD = "dead"
    """It has ended, or has been silent for too long: it is to be ended and replaced."""


class Check(StrEnum):
    """A part that is asked again and again whether it still answers."""

    FRONT = "main process"
    """It answers alone."""
    SCHEDULER = "scheduler"
    """It answers past the detokenizer."""


class HealthLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long silence is borne."""

    suspect_after_s: float = 10.0
    dead_after_s: float = 120.0
    cold_dead_after_s: float = 900.0
    """Before the first token: kernels are compiled and graphs captured meanwhile."""
    stopped_dead_after_s: float = 15.0
    """A process that a signal has stopped."""

    def __post_init__(self) -> None:
        if not 0 < self.suspect_after_s < self.dead_after_s <= self.cold_dead_after_s:
            raise ValueError(
                "health limits must be 0 < suspect_after_s < dead_after_s <= cold_dead_after_s, got "
                f"{self.suspect_after_s:g}, {self.dead_after_s:g} and {self.cold_dead_after_s:g}"
            )
        if self.stopped_dead_after_s <= 0:
            raise ValueError(f"stopped_dead_after_s must be > 0, got {self.stopped_dead_after_s:g}")


class Ready(NamedTuple):
    """It takes requests."""


class Asked(NamedTuple):
    """A check was sent."""

    check: Check


class Answered(NamedTuple):
    """A check was answered, whatever the answer was."""

    check: Check


class Failed(NamedTuple):
    """A check got no answer: refused, cut, or given up. The silence goes on from when it was first asked."""

    check: Check
    reason: str


class Progress(NamedTuple):
    """A token arrived."""


class InFlight(NamedTuple):
    """So many requests have been submitted and not answered to the end."""

    num_requests: int


class Paused(NamedTuple):
    """Generation is paused, or goes on."""

    is_paused: bool


class Occupied(NamedTuple):
    """A control call that may block the scheduler was begun."""

    call: str
    until_s: float
    """Its own deadline; silence counts again from then on."""


class Released(NamedTuple):
    """The control call has ended."""


class Overslept(NamedTuple):
    """Whoever feeds the facts was held up, and answers may have lain unread."""


class Stopped(NamedTuple):
    """The processes that a signal has stopped; empty: all run."""

    names: tuple[str, ...]


class Ended(NamedTuple):
    """It is no more."""

    cause: str


class Tick(NamedTuple):
    """Time has passed."""


Fact = (
    Ready | Asked | Answered | Failed | Progress | InFlight | Paused
    | Occupied | Released | Overslept | Stopped | Ended | Tick
)  # fmt: skip


class HealthChange(NamedTuple):
    """The state has changed."""

    before: HealthState
    after: HealthState
    cause: str
    at_s: float


class Complaint(NamedTuple):
    """Something that speaks against a server, and from when on it means what."""

    what: str
    suspect_at_s: float
    dead_at_s: float


class Health:
    """One server. All times are seconds of one clock that never goes back."""

    def __init__(self, limits: HealthLimits, now_s: float, questions: Mapping[Check, str]) -> None:
        self.limits = limits
        self._questions = questions
        self.state = HealthState.STARTING
        self.cause = "it was launched"
        self._is_warm = False
        self._asked_s: dict[Check, float] = {}
        """When each check was sent that has not been answered."""
        self._reasons: dict[Check, str] = {}
        self._num_in_flight = 0
        self._is_paused = False
        self._occupied: Occupied | None = None
        self._stopped = Stopped(())
        self._stopped_s = now_s
        self._excused_s = now_s
        """Silence before this is not counted."""
        self._tokens_due_s = now_s
        """Silence of tokens before this is not counted."""

    def feed(self, fact: Fact, now_s: float) -> HealthChange | None:
        """Take note of a fact; the change that follows from it and from the time, if any."""
        if self.state is HealthState.DEAD:
            return None
        if isinstance(fact, Ended):
            return self._change(HealthState.DEAD, fact.cause, now_s)
        self._note(fact, now_s)
        if isinstance(fact, Ready) and self.state is HealthState.STARTING:
            return self._change(HealthState.HEALTHY, "it takes requests", now_s)
        return None if self.state is HealthState.STARTING else self._judge(now_s)

    def next_s(self) -> float | None:
        """When time alone would change the state; None when it would not."""
        if self.state in (HealthState.STARTING, HealthState.DEAD):
            return None
        complaints = self._complaints()
        times = [complaint.dead_at_s for complaint in complaints]
        if self.state is HealthState.HEALTHY:
            times += [complaint.suspect_at_s for complaint in complaints]
        return min(times, default=None)

    def misses_tokens(self, now_s: float) -> bool:
        """Whether requests are in flight and have been silent for long enough to try one of our own."""
        return (
            self._num_in_flight > 0 and not self._is_paused and self._occupied is None
            and now_s >= self._counted_from(self._tokens_due_s) + self.limits.suspect_after_s
        )  # fmt: skip

    def _note(self, fact: Fact, now_s: float) -> None:
        match fact:
            case Asked(check):
                self._asked_s.setdefault(check, now_s)
            case Answered(check):
                self._asked_s.pop(check, None)
                self._reasons.pop(check, None)
            case Failed(check, reason):
                self._asked_s.setdefault(check, now_s)
                self._reasons[check] = reason
            case Progress():
                self._is_warm = True
                self._excused_s = now_s
            case InFlight(num_requests):
                if not self._num_in_flight:
                    self._tokens_due_s = now_s
                self._num_in_flight = num_requests
            case Paused(is_paused):
                if self._is_paused and not is_paused:
                    self._tokens_due_s = now_s
                self._is_paused = is_paused
            case Occupied():
                self._occupied = fact
            case Released():
                self._occupied = None
                self._excused_s = now_s
            case Overslept():
                self._excused_s = self._stopped_s = now_s
            case Stopped(names):
                if names and not self._stopped.names:
                    self._stopped_s = now_s
                self._stopped = fact
            case Ready() | Ended() | Tick():
                pass

    def _judge(self, now_s: float) -> HealthChange | None:
        grave = [complaint for complaint in self._complaints() if now_s >= complaint.suspect_at_s]
        if grave:
            is_dead = any(now_s >= complaint.dead_at_s for complaint in grave)
            return self._change(HealthState.DEAD if is_dead else HealthState.SUSPECT, grave[0].what, now_s)
        return self._change(HealthState.HEALTHY, "it answers again", now_s)

    def _complaints(self) -> list[Complaint]:
        """The gravest first: what is behind a silent part is silent as well, and not to blame."""
        limits = self.limits
        found: list[Complaint] = []
        if self._stopped.names:
            what = f"a signal has stopped its {' and '.join(self._stopped.names)} process"
            found.append(Complaint(what, self._stopped_s, self._stopped_s + limits.stopped_dead_after_s))
        dead_after_s = limits.dead_after_s if self._is_warm else limits.cold_dead_after_s
        for check, allowed_s in ((Check.FRONT, limits.dead_after_s), (Check.SCHEDULER, dead_after_s)):
            if check in self._asked_s:
                since_s = self._counted_from(self._asked_s[check])
                found.append(Complaint(self._silence(check), since_s + limits.suspect_after_s, since_s + allowed_s))
        if self._num_in_flight and not self._is_paused:
            since_s = self._counted_from(self._tokens_due_s)
            flying = f"{counted(self._num_in_flight, 'request')} {does(self._num_in_flight, 'are')} in flight"
            what = (
                f"no token arrives though {flying}; while "
                f"{self._questions[Check.SCHEDULER]} is answered that points to the detokenizer"
            )
            found.append(Complaint(what, since_s + limits.suspect_after_s, since_s + dead_after_s))
        return found

    def _counted_from(self, silent_s: float) -> float:
        until_s = self._occupied.until_s if self._occupied is not None else silent_s
        return max(silent_s, self._excused_s, until_s)

    def _silence(self, check: Check) -> str:
        reason = f" ({self._reasons[check]})" if check in self._reasons else ""
        late = f", and {self._occupied.call} has not ended in its time" if self._occupied is not None else ""
        return f"its {check} does not answer {self._questions[check]}{reason}{late}, and no token arrives"

    def _change(self, after: HealthState, cause: str, now_s: float) -> HealthChange | None:
        if after is self.state:
            return None
        change = HealthChange(self.state, after, cause, now_s)
        self.state, self.cause = after, cause
        return change
