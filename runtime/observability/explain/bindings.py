"""What binds a run: causes in the order of what they cost, as pure functions of the measured facts.

The time in which the Learner waits for samples is divided among what it waited for (``waits.py``):

* *While no slot was free* it is the generation: first what of it was for nothing (groups that a filter turned away),
  slots that were held while a tool ran, what slow engines and swaps of weights cost; the rest is that there are too few
  slots.
* *While slots were free* it is the stages that samples were in. What of the generation is neither the tail nor a slow
  engine's says that too few groups are under way, by the bound of staleness or by a limit.

What the Learner does besides training, and a training that leaves engines idle, cost what they take. So does the time
for which engines and Learner want a core (``cores.py``), which is a part of the others and stands beside them.

A cost is what a step would gain at most if the cause vanished; another bound may come first. What is below
:data:`FLOOR` of a step is told, and does not bind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.runtime.observability.explain.causes import Binding, Cause
from penstock.runtime.observability.explain.stories import story_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.observability.explain.facts import Facts, Waits

FLOOR: Final = 0.15
"""Share of a step from which on a cause binds."""
SHOWN: Final = 0.05
"""Share from which on it is told at all."""
EMPTY: Final = 0.6
FULL: Final = 0.9
AT_LIMIT: Final = 0.85
"""Of a limit of groups, from which on it is what keeps them back."""


def bindings_of(facts: Facts) -> tuple[Binding, ...]:
    """The causes that cost :data:`SHOWN` of a step or more, the dearest first; where none binds, that stands first."""
    shown = [(cost_s, cause) for cause, cost_s in costs_of(facts).items() if cost_s >= SHOWN * facts.step_s]
    found = [_binding(facts, cause, cost_s) for cost_s, cause in sorted(shown, key=lambda each: -each[0])]
    if not any(binding.binds for binding in found):
        found.insert(0, _binding(facts, Cause.HARDWARE, 0.0))
    return tuple(found)


def costs_of(facts: Facts) -> dict[Cause, float]:
    """Seconds of a step that each cause costs at most. Those of the Learner's wait add up to it, but for
    :attr:`.Cause.FEW_CORES`, which is in them."""
    costs: dict[Cause, float] = {}
    for cause, cost_s in (*_learners(facts), *_waits(facts)):
        costs[cause] = costs.get(cause, 0.0) + cost_s
    if (cores := facts.cores) is not None:
        costs[Cause.FEW_CORES] = facts.step_s * (cores.learner + min(facts.learner.waiting, cores.engines))
    return costs


# --- costs, in seconds of a step -----------------------------------------------------------------------------------


def _learners(facts: Facts) -> Iterator[tuple[Cause, float]]:
    """What the Learner's own time costs."""
    learner, step_s = facts.learner, facts.step_s
    yield Cause.SLOW_PUBLISH, step_s * learner.publishing
    yield Cause.CHECKPOINTS, step_s * learner.checkpointing
    if not facts.is_colocated:
        yield (
            Cause.HEAVY_LEARNER,
            step_s * max(0.0, learner.training - max(facts.occupied + facts.outside, learner.waiting)),
        )
    yield Cause.LOST_TIME, step_s * learner.down


def _waits(facts: Facts) -> Iterator[tuple[Cause, float]]:
    """What the Learner's wait is made of."""
    wait_s = facts.step_s * facts.learner.waiting
    if facts.waits is None:
        # Without traces only the lanes say whether slots were free, as a mean over the time.
        full = min(1.0, max(0.0, (facts.occupied - EMPTY) / (FULL - EMPTY)))
        yield from _of_full_engines(facts, wait_s * full)
        yield Cause.UNKNOWN, wait_s * (1 - full)
        return
    yield from _of_full_engines(facts, wait_s * facts.waits.full)
    yield from _with_free_slots(facts, facts.waits, wait_s)


def _of_full_engines(facts: Facts, wait_s: float) -> Iterator[tuple[Cause, float]]:
    generation_s, left_s = facts.generation_s, wait_s
    swap_s = facts.step_s * facts.for_weights + (facts.samples.swap if facts.samples else 0.0)
    down = sum(engine.down for engine in facts.engines) / len(facts.engines)
    parts = (
        (Cause.LOST_TIME, facts.step_s * down),
        (Cause.FILTER, generation_s * facts.rejected),
        (Cause.SLOW_TOOL, facts.step_s * facts.outside),
        (Cause.SLOW_ENGINE, generation_s * facts.lost_speed),
        (Cause.SLOW_PUBLISH, swap_s),
        (Cause.EVALUATION, generation_s * facts.evaluated),
    )
    for cause, part_s in parts:
        taken_s = min(left_s, part_s)
        left_s -= taken_s
        yield cause, taken_s
    if not facts.is_colocated:  # on one device the Learner has to wait while engines generate
        yield Cause.FEW_ENGINES, left_s


def _with_free_slots(facts: Facts, waits: Waits, wait_s: float) -> Iterator[tuple[Cause, float]]:
    yield Cause.SLOW_PUBLISH, wait_s * (waits.weights + waits.announce)
    kept_s = wait_s * (1 - facts.rejected)
    held = facts.outside + facts.occupied
    outside = facts.outside / held if held else 0.0
    under_way = waits.rows + waits.placing + waits.early + waits.generate + waits.tail + waits.score + waits.nothing
    yield Cause.FILTER, wait_s * facts.rejected * under_way
    yield Cause.SLOW_ROWS, kept_s * waits.rows
    yield Cause.FEW_ENGINES, kept_s * waits.placing
    yield Cause.EARLY_BOUND, kept_s * waits.early
    yield Cause.SLOW_REWARD, kept_s * waits.score
    yield Cause.SLOW_TOOL, kept_s * (waits.generate + waits.tail) * outside
    model_s = kept_s * (1 - outside)
    yield Cause.SLOW_ENGINE, model_s * (waits.generate + waits.tail) * facts.slow_share
    yield Cause.LONG_TAIL, model_s * waits.tail * (1 - facts.slow_share)
    yield _limit(facts), model_s * waits.generate * (1 - facts.slow_share) + kept_s * waits.nothing


def _limit(facts: Facts) -> Cause:
    """What keeps more groups from being under way."""
    limits = ((facts.in_generation, facts.max_concurrent), (facts.outstanding, facts.target_outstanding))
    is_limited = any(found is not None and limit is not None and found >= AT_LIMIT * limit for found, limit in limits)
    return Cause.LOW_CONCURRENCY if is_limited else Cause.SMALL_BOUND


def _binding(facts: Facts, cause: Cause, cost_s: float) -> Binding:
    story = story_of(facts, cause)
    return Binding(
        cause=cause,
        who=story.who,
        cost_s=cost_s,
        share=cost_s / facts.step_s,
        binds=cause is not Cause.HARDWARE and cost_s >= FLOOR * facts.step_s,
        text=story.text,
        evidence=story.evidence,
    )
