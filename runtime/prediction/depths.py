"""How much waits where in a simulated run, as a mean over time: the depths of its queues.

The clock looks at the actors some times a step, at even distances. Looking changes nothing of what happens.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.actors.buffer.machine import Buffer
from penstock.actors.engine_worker.machine import EngineWorker
from penstock.actors.filter.machine import Filter
from penstock.actors.prompt_source.machine import PromptSource
from penstock.actors.scorer.machine import Scorer

if TYPE_CHECKING:
    from penstock.runtime.hosts.virtual.host import VirtualHost

LOOKS_A_STEP: Final = 17
"""Not a divisor of what a step may be divided into."""


class Depths(NamedTuple):
    """Of the queues."""

    for_slots: float
    """Samples that wait for a slot, at PromptSource or at an engine."""
    for_rewards: float
    """Samples that the Scorer has."""
    incomplete: float
    """Groups of which the Filter has some samples and waits for others."""
    ready: float
    """Groups in the Buffer that may be trained."""


class DepthGauge:
    """Looks at the queues from now on, until it is asked what it has seen."""

    def __init__(self, host: VirtualHost, step_s: float) -> None:
        """``step_s``: virtual seconds that a step takes, about."""
        self._host = host
        self._every_s = step_s / LOOKS_A_STEP
        self._seen: list[Depths] = []
        self._look(None, None)

    def means(self) -> Depths:
        """Over the time since the start."""
        return Depths(*map(statistics.fmean, zip(*self._seen, strict=True)))

    def _look(self, _: object, __: object) -> None:
        host = self._host
        self._seen.append(depths_of(host))
        host.clock.at(host.clock.now_s + self._every_s, self._look, None, None)


def depths_of(host: VirtualHost) -> Depths:
    """At this moment."""
    for_slots = for_rewards = incomplete = ready = 0
    for process in host.supervisor.processes.values():
        match process.shell.machine:
            case PromptSource() as source:
                for_slots += source.issuing.num_waiting
            case EngineWorker() as engine:
                for_slots += engine.requests.num_waiting
            case Scorer() as scorer:
                for_rewards = len(scorer.pending)
            case Filter() as sieve:
                incomplete = len(sieve.assemblies)
            case Buffer() as buffer:
                ready = buffer.books.table.num_ready
            case _:
                pass
    return Depths(for_slots, for_rewards, incomplete, ready)
