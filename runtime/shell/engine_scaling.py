"""``engines.scale: by_bound``: how many engines a run is to have, by which of its two halves it waits for.

With ``n'`` engines a step takes ``max(g·n/n', t + s)``, where ``g`` is what ``n`` engines take to generate a batch with
all slots in use, ``t`` the training and ``s`` the export of weights. So

* generation binds while the Learner waits for samples and the engines are full. It would wait no more with
  ``n·g/(t + s) = n/(1 - waited)`` engines;
* training binds while it does not wait. The engines that are left use ``used·n/n'`` of their slots, and do not bind
  while that stays below :data:`ROOM`. Where it waits all the same when some have gone (slots were free as a mean, and
  not when they were needed), they come back.

Where the Learner waits and slots are free, it waits for something that engines do not change, so they stay.

Engines that are lent the Learner's devices (``engines.lent``) come last and go first. What they cost (sleep, waking,
weights that are fetched once more, samples that go on elsewhere) is not modelled but measured: where the first reading
with them has not :data:`PAYS` more steps in the same time than the last one without, they go.

Invariants:

* A change is followed by a reading of which every second lies after whoever came was ready, and ``hold_s`` beside: what
  a newcomer's start costs is in no reading.
* Between the load at which an engine comes and that at which the same one goes lies a gap: ``1/(1 - WAITS)`` and
  ``ROOM`` of what the engines without it make. Noise within it changes nothing.
* One reading changes nothing, unless the Learner waits so much that chance does not explain it; :data:`READINGS` in a
  row do. An engine that was let go and had to come back makes the next one stay for four times as many, and go alone.
* Lending that did not pay is tried again after :data:`LEND_AGAIN` readings, and after four times as many each time that
  it does not pay again.

Pure: readings and reports come in, numbers and orders go out.

| waits for | who ends it |
|---|---|
| every engine of the run to be ready | the supervisor, which replaces it or fails the run |
| a reading | steps, and a report of each of them up to its end; a run without these changes nothing |
| an order to be recorded | nobody: what still holds is decided again |
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.engines.options import fewest_engines, lent_engines, most_engines
from penstock.messages.names import LEARNER
from penstock.messages.operator import EnginesAsked
from penstock.messages.training import Activity
from penstock.runtime.shell.engine_membership import resized

if TYPE_CHECKING:
    from penstock.backends.engines.options import EnginesOptions
    from penstock.messages.training import ActivitySpan, ActorReported

WAITS: Final = 0.15
"""Share of the Learner's time that it waits for samples, from which on generation binds: as in ``penstock explain``."""
MISSED: Final = 0.1
"""By so much more of its time the Learner waits where engines are missed that were let go, though slots are free."""
FULL: Final = 0.85
"""Share of their slots' time that engines use, from which on they are full."""
ROOM: Final = 0.8
"""That engines may use when some of them have gone."""
WAITS_LONG: Final = 2 * WAITS
"""From which on one reading is enough."""
READINGS: Final = 2
"""In a row that agree, before engines come or go."""
MAX_READINGS: Final = 64
"""Likewise, at most, after some that went had to come back."""
PAYS: Final = 0.03
"""More steps in the same time, at least, with devices that are lent: else nobody is lent any."""
LEND_AGAIN: Final = 8
"""Readings after lending that did not pay, before it is tried again."""
MIN_STEPS: Final = 4
"""Of a reading."""
SETTLING_STEPS: Final = 2
"""Before one: their samples were made by the engines of before."""
_WAITING: Final = frozenset((Activity.WAITING_FOR_SAMPLES, Activity.ASLEEP))
_SWAPS: Final = frozenset((Activity.APPLYING_WEIGHTS, Activity.WAITING_FOR_WEIGHTS))


class ScalingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario says of it."""

    fewest: int
    most: int
    hold_s: float
    """Length of a reading, and of the time before it, at least."""
    lent: frozenset[str] = frozenset()
    """Of the engines those that are lent the learner's devices."""


def scaling_of(options: EnginesOptions) -> ScalingSettings | None:
    """Of ``engines.scale: by_bound``; None where engines stay until an operator says otherwise."""
    if options.scale != "by_bound":
        return None
    return ScalingSettings(
        fewest=fewest_engines(options),
        most=most_engines(options),
        hold_s=options.scale_hold_s,
        lent=lent_engines(options),
    )


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What a stretch of a run has shown."""

    num_engines: int
    duration_s: float
    waited: float
    """Share of it in which the Learner waited for samples, its devices lent or not."""
    used: float
    """Share of the slots' time in which they decode, are held by an episode, or wait for a swap of weights."""
    num_lent: int = 0
    """Of the engines, those that are lent the learner's devices."""
    steps_per_s: float = 0.0


class Verdict(NamedTuple):
    """How many engines there are to be."""

    num_engines: int
    reason: str
    """Empty where there are as many."""


class BoundPolicy:
    """Decides, reading by reading."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._patience = READINGS
        """Readings in a row in which engines have to be superfluous, before some go."""
        self._num_short = self._num_idle = 0
        """Readings in a row, up to now, in which there were too few engines, and too many."""
        self._left: Reading | None = None
        """After which some were let go, if that was the last change."""
        self._without: Reading | None = None
        """After which devices were lent, until it is known whether that pays."""
        self._lend_again, self._num_unlent = LEND_AGAIN, LEND_AGAIN
        """Readings after lending that did not pay before it is tried again, and those since then."""
        self._has_lent = False
        """And that did not pay."""

    def verdict(self, reading: Reading) -> Verdict:
        """What this reading says, after those of before."""
        if why := self._costs_more(reading):
            return Verdict(reading.num_engines - reading.num_lent, why)
        num_now, wanted, why = reading.num_engines, self._wanted(reading), ""
        self._num_short = self._num_short + 1 if wanted > num_now else 0
        self._num_idle = self._num_idle + 1 if wanted < num_now else 0
        if wanted > num_now and (self._num_short >= READINGS or reading.waited >= WAITS_LONG):
            if self._left is not None:
                self._patience, self._left = min(4 * self._patience, MAX_READINGS), None
            why = "generation binds"
        elif wanted < num_now and self._num_idle >= self._patience:
            self._left, why = reading, "training binds"
        if not why:
            return Verdict(num_now, "")
        self._num_short = self._num_idle = 0
        if wanted > self._num_own and not reading.num_lent:
            self._without = reading
        return Verdict(
            wanted,
            f"{why}: in {reading.duration_s:.0f} s the learner waited {_percent(reading.waited)} of the time, and "
            f"engines used {_percent(reading.used)} of their slots",
        )

    @property
    def _num_own(self) -> int:
        """Engines with devices of their own, at most."""
        return self._settings.most - len(self._settings.lent)

    def _costs_more(self, reading: Reading) -> str:
        """Why nobody is to be lent devices any more, at the first reading in which some are; empty if that pays."""
        self._num_unlent += not reading.num_lent
        before, self._without = self._without, self._without if not reading.num_lent else None
        if before is None or not reading.num_lent or reading.steps_per_s >= (1 + PAYS) * before.steps_per_s:
            return ""
        if self._has_lent:
            self._lend_again *= 4
        self._has_lent, self._num_unlent = True, 0
        self._num_short = self._num_idle = 0
        return (
            f"lending does not pay: {_per_hour(reading)} steps/h with the learner's devices lent while it waits, "
            f"{_per_hour(before)} without"
        )

    def _wanted(self, reading: Reading) -> int:
        """As many as would be right if every reading were like this one."""
        num_now, fewest, most = reading.num_engines, self._settings.fewest, self._settings.most
        if not reading.num_lent and self._num_unlent < self._lend_again:
            most = max(num_now, self._num_own)
        if reading.waited >= WAITS:
            if reading.used >= FULL:
                enough = math.floor(num_now / max(1e-9, 1 - reading.waited))
                return max(num_now, min(max(num_now + 1, enough), 2 * num_now, most))
            left = self._left
            if left is not None and reading.waited >= left.waited + MISSED:
                return max(num_now, min(left.num_engines, most))
            return num_now
        keeps = -(-num_now // 2) if self._patience == READINGS else num_now - 1
        return min(num_now, max(math.ceil(reading.used * num_now / ROOM), keeps, fewest))


class EngineScaler:
    """Makes readings of what the actors report, and orders of what they say."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._settings = settings
        self._policy = BoundPolicy(settings)
        self._engines: tuple[str, ...] = ()
        self._but: frozenset[str] = frozenset()
        self._now_s = 0.0
        """The latest moment that was reported."""
        self._ready: dict[str, float] = {}
        """Engines of the run, and the Learner, that have started: up to when each was heard of."""
        self._settled_s = math.inf
        """From when on may be read, once all have started."""
        self._began_s: float | None = None
        """Of the reading; None: none has begun."""
        self._num_steps = 0
        self._learner_s = self._waited_s = self._engines_s = self._used_s = 0.0

    def engines_are(self, engines: tuple[str, ...], *, but: frozenset[str] = frozenset()) -> None:
        """These are recorded as the engines of the run, by whomever they were asked for. ``but``: those that were given
        up, for which an operator alone may ask again."""
        self._but = but
        if engines != self._engines:
            self._engines = engines
            self._ready = {name: at_s for name, at_s in self._ready.items() if name in (*engines, LEARNER)}
            self._settle()

    def step(self) -> None:
        """A step was trained."""
        self._num_steps += 1

    def hear(self, report: ActorReported) -> EnginesAsked | None:
        """An actor says what it did. The engines that the run is to have, where they are to be others."""
        if report.name != LEARNER and report.name not in self._engines:
            return None
        for span in report.activities:
            self._now_s = max(self._now_s, span.end_s)
            self._account(report.name, span)
        return self._look() if self._engines else None

    def _account(self, name: str, span: ActivitySpan) -> None:
        if span.activity is Activity.STARTING:
            self._ready.pop(name, None)
            self._settled_s, self._began_s = math.inf, None
            return
        is_new = name not in self._ready
        self._ready[name] = span.end_s
        if is_new:
            self._settle()
        if self._began_s is None:
            return
        length_s = span.end_s - max(span.start_s, self._began_s)
        if length_s <= 0:
            return
        if name == LEARNER:
            self._learner_s += length_s
            self._waited_s += length_s * (span.activity in _WAITING)
            return
        if span.activity is Activity.ASLEEP:
            return  # its device is the Learner's
        held = span.outside + (span.occupancy if span.activity is Activity.WORKING else 0.0)
        self._engines_s += length_s
        self._used_s += length_s * (1.0 if span.activity in _SWAPS else min(1.0, held))

    def _settle(self) -> None:
        """Whatever has changed: read nothing before that shows."""
        is_complete = len(self._ready) == len(self._engines) + 1
        self._settled_s = self._now_s + self._settings.hold_s if is_complete else math.inf
        self._began_s, self._num_steps = None, 0

    def _begin(self) -> None:
        self._began_s, self._num_steps = self._now_s, 0
        self._learner_s = self._waited_s = self._engines_s = self._used_s = 0.0

    def _look(self) -> EnginesAsked | None:
        if self._began_s is None:
            if self._now_s >= self._settled_s and self._num_steps >= SETTLING_STEPS:
                self._begin()
            return None
        duration_s, num_engines = min(self._ready.values()) - self._began_s, len(self._engines)
        if duration_s < self._settings.hold_s or self._num_steps < MIN_STEPS:
            return None
        reading = Reading(
            num_engines=num_engines,
            duration_s=duration_s,
            waited=self._waited_s / max(1e-9, self._learner_s),
            used=self._used_s / max(1e-9, self._engines_s),
            num_lent=len(self._settings.lent.intersection(self._engines)),
            steps_per_s=self._num_steps / duration_s,
        )
        self._begin()
        verdict = self._policy.verdict(reading)
        wanted = min(verdict.num_engines, max(num_engines, self._settings.most - len(self._but)))
        if wanted == num_engines:
            return None
        return EnginesAsked(engines=resized(self._engines, wanted, but=self._but), reason=verdict.reason)


def _per_hour(reading: Reading) -> str:
    per_hour = 3600 * reading.steps_per_s
    return f"{per_hour:,.0f}" if per_hour >= 100 else f"{per_hour:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
