"""``actors.json``: what each actor said last, so that a run's folder alone tells who does what and who waits for whom.

Invariants:

* The file is replaced whole, at most every ``EVERY_S`` of the machine's time and once at the end, however fast the
  reports come. A run that was killed leaves what was so a second before.
* It is a picture for people; nothing in it decides anything.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.messages.training import Activity
from penstock.runtime.observability.figures import CPU_SECONDS, GENERATED_TOKENS, Rate
from penstock.runtime.observability.wait_graph import wait_graph

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.messages.training import ActorReported
    from penstock.messages.waits import WaitsReported

ACTORS_FILE: Final = "actors.json"
EVERY_S: Final = 1.0
MAX_LOSSES: Final = 50
RATE_S: Final = 10.0
ISSUED: Final = "prompt_source/issued"
ANSWERED: Final = "reward/answered"
RATES: Final = (CPU_SECONDS, GENERATED_TOKENS, ISSUED, ANSWERED)
"""Running totals whose growth a second is told too."""


class ActorNow(msgspec.Struct, frozen=True, kw_only=True):
    """One actor, as it reported last."""

    name: str
    epoch: int
    at_s: float
    """When, in seconds since the start of the run."""
    state: str
    activity: Activity | None
    """Of an engine or the learner."""
    is_down: bool
    """It was given up, and its replacement was not heard of yet."""
    num_restarts: int
    metrics: dict[str, float | None]
    rates: dict[str, float]
    """Growth a second of those of :data:`RATES` that it reports, over the last ten seconds."""


class Loss(msgspec.Struct, frozen=True):
    """An actor that was given up and replaced."""

    at_s: float
    name: str
    story: str


class ActorsNow(msgspec.Struct, frozen=True, kw_only=True):
    """What ``actors.json`` holds."""

    at_s: float
    actors: list[ActorNow]
    waits: str
    """Who waits for whom for too long, in lines; empty where nobody does."""
    losses: list[Loss]
    """The last ones, oldest first."""


class ActorsFile:
    """Writes it. For one thread."""

    def __init__(self, run_folder: Path, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._path = run_folder / ACTORS_FILE
        self._clock_s = clock_s
        self._due_s = -math.inf
        self._now_s = 0.0
        self._actors: dict[str, ActorNow] = {}
        self._rates: dict[tuple[str, int, str], Rate] = {}
        self._waits: dict[str, WaitsReported] = {}
        self._losses: deque[Loss] = deque(maxlen=MAX_LOSSES)

    def actor(self, report: ActorReported, now_s: float) -> None:
        """An actor has reported, ``now_s`` after the start of the run.

        Raises:
            OSError: the file cannot be written; here and below.
        """
        self._now_s = now_s
        before = self._actors.get(report.name)
        if before is not None and report.epoch < before.epoch:
            return
        metrics: dict[str, float | None] = {metric.name: metric.value for metric in report.metrics}
        activity = before.activity if before is not None and before.epoch == report.epoch else None
        self._actors[report.name] = ActorNow(
            name=report.name,
            epoch=report.epoch,
            at_s=now_s,
            state=report.state,
            activity=report.activities[-1].activity if report.activities else activity,
            is_down=False,
            num_restarts=before.num_restarts if before else 0,
            metrics=metrics,
            rates={
                metric.name: self._rate(report, metric.name, metric.value, now_s)
                for metric in report.metrics
                if metric.name in RATES
            },
        )
        if self._clock_s() >= self._due_s:
            self.write()

    def waits(self, report: WaitsReported) -> None:
        """An actor says what it has waited for too long."""
        self._waits[report.name] = report

    def lost(self, name: str, story: str) -> None:
        """An actor was given up."""
        self._losses.append(Loss(self._now_s, name, story))
        self._waits.pop(name, None)
        if (actor := self._actors.get(name)) is not None:
            num_restarts = actor.num_restarts + 1
            self._actors[name] = msgspec.structs.replace(actor, is_down=True, num_restarts=num_restarts)
        self.write()

    def leaves(self, name: str) -> None:
        """An engine has left the run."""
        self._waits.pop(name, None)
        self._actors.pop(name, None)
        self.write()

    def write(self) -> None:
        """Write what is so now."""
        self._due_s = self._clock_s() + EVERY_S
        now = ActorsNow(
            at_s=self._now_s,
            actors=list(self._actors.values()),
            waits=wait_graph(self._waits.values(), self._now_s),
            losses=list(self._losses),
        )
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(now))
        os.replace(partial, self._path)

    def _rate(self, report: ActorReported, name: str, total: float, now_s: float) -> float:
        if (report.name, report.epoch, name) not in self._rates:  # each incarnation counts from 0
            self._rates.pop((report.name, report.epoch - 1, name), None)
            self._rates[report.name, report.epoch, name] = Rate(RATE_S)
        rate = self._rates[report.name, report.epoch, name]
        rate.add(now_s, total)
        return rate.per_s or 0.0


def read_actors(run_folder: Path) -> ActorsNow | None:
    """What the actors of a run said last; None of a run that did not write it down, or not yet."""
    try:
        return msgspec.json.decode((run_folder / ACTORS_FILE).read_bytes(), type=ActorsNow)
    except FileNotFoundError:
        return None
