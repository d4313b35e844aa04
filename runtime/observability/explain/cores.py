"""What it costs a run on CPUs that no core is free when its engines or its Learner could go on.

An actor's process says what CPU time it took, and how long its threads could have run and had no core
(``metrics.jsonl``: ``cpu_s``, ``core_wait_s``). With cores enough, its work would have taken ``cpu ÷ (cpu + wait)`` of
the time that it took; that holds for work of several threads as well. Work that does not compute, but waits for a GPU,
is held up for as long as its threads waited, at most.

Of engines, what they were held up counts as far as the Learner waited for samples; the rest was hidden behind its work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.names import Role
from penstock.runtime.observability.explain.facts import CoreTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.observability.explain.facts import EngineTime, LearnerTime
    from penstock.runtime.observability.trackers import StepRow


def core_time(rows: Sequence[StepRow], learner: LearnerTime, engines: Sequence[EngineTime]) -> CoreTime | None:
    """Of the steps after the first one; None where the run did not record it."""
    first, last = rows[0], rows[-1]
    if not (first.core_wait_s and last.core_wait_s):
        return None
    took_s = last.at_s - first.at_s

    def held_up(role: Role, working: float, num_actors: int) -> float:
        """Share of the time of one such actor; ``working``: share of it in which it worked."""
        cpu_s = last.cpu_s.get(role, 0.0) - first.cpu_s.get(role, 0.0)
        wait_s = last.core_wait_s.get(role, 0.0) - first.core_wait_s.get(role, 0.0)
        if wait_s <= 0.0:
            return 0.0
        return min(working * wait_s / (cpu_s + wait_s), wait_s / (took_s * num_actors))

    working = sum(engine.working for engine in engines) / len(engines)
    used_s = sum(last.cpu_s.values()) - sum(first.cpu_s.values())
    return CoreTime(
        learner=held_up(Role.LEARNER, learner.training, 1),
        engines=held_up(Role.ENGINE_WORKER, working, len(engines)),
        used=used_s / took_s,
    )
