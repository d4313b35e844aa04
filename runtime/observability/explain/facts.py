"""What was measured in a stretch of a run's steps: everything that the rules know, and nothing else.

Invariants:

* A figure that was not recorded is None, and ``missing`` says how to have it recorded; nothing is put in its place.
* Shares are of the stretch's wall time, stages are means over its traced samples.
"""

from __future__ import annotations

import msgspec

from penstock.messages.training import UpdateMode


class LearnerTime(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the Learner's time; they add up to 1."""

    training: float
    waiting: float
    """No batch was allowed or ready; with engines on its device also the time in which it slept."""
    publishing: float
    checkpointing: float
    down: float


class EngineTime(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of one engine's time."""

    name: str
    occupied: float
    """Working, weighted by the share of its slots that decode."""
    outside: float
    """All time, weighted by the share of its slots whose episodes wait for tools, environments and agents."""
    working: float
    for_demand: float
    for_weights: float
    """Waiting for weights, or applying them."""
    asleep: float
    down: float
    """Lost or starting."""
    tokens_per_s: float | None = None
    """Of one request, from when its generation began to when it ended; None where too few were traced."""


class SampleTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where traced samples spent their time: means in seconds."""

    num_samples: int
    rows: float | None
    """Of ``issue``: until the row was there; None where no span says it."""
    placing: float
    """The rest of ``issue``: until an engine had room."""
    queue: float
    generate: float
    generate_median: float
    generate_longest: float
    """Of the samples of a batch, as a quantile over all that are traced."""
    score: float
    swap: float
    """``apply_weights`` of one engine for one version."""
    announce: float
    """From the export of a version until enough engines served it and it was announced."""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """What the Learner waited for, in shares of its wait that add up to 1; ``waits.py`` says how they are found."""

    full: float = 0.0
    """No slot was free (it decoded, or an episode that waited for a tool held it), and more samples were under way."""
    rows: float = 0.0
    """Slots were free, as for those below: rows of groups that were granted."""
    placing: float = 0.0
    """An engine with room."""
    early: float = 0.0
    """A slot of an engine that was full, while others had free ones."""
    weights: float = 0.0
    """Weights, on an engine that holds the request."""
    generate: float = 0.0
    """Generation, up to twice its median."""
    tail: float = 0.0
    """Generation beyond that."""
    score: float = 0.0
    """Rewards."""
    announce: float = 0.0
    """Nothing was under way: a new version, whose announcement lets groups be granted."""
    nothing: float = 0.0
    """Nothing was under way, and no version either."""


class CoreTime(msgspec.Struct, frozen=True, kw_only=True):
    """What waiting for a core cost: see ``cores.py``."""

    learner: float
    """Share of its time by which the Learner's training was longer."""
    engines: float
    """Share of its time by which an engine's work was longer, a mean."""
    used: float
    """Cores that the processes of all actors used, a mean over the time."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a run."""

    first_step: int
    last_step: int
    step_s: float
    """Wall time from one step to the next, a mean."""
    policy: str
    """The one that new grants follow, as are the two below."""
    max_staleness: int
    update_mode: UpdateMode
    groups_per_batch: int
    samples_per_group: int
    max_concurrent: int | None
    target_outstanding: int | None
    """Fixed by the scenario; None: it adapts."""
    num_slots: int
    """Of all engines together."""
    is_colocated: bool
    learner: LearnerTime
    engines: tuple[EngineTime, ...]
    samples: SampleTimes | None
    waits: Waits | None
    """None without traces, and where the Learner never waited."""
    outstanding: float | None
    """Groups granted and not yet trained, a mean over the time."""
    in_generation: float | None
    """Groups granted and not yet admitted."""
    rejected: float
    """Share of the tokens of ended samples that a filter turned away."""
    evaluated: float
    """Share of them that evaluations took."""
    cores: CoreTime | None = None
    """None where it was not recorded."""
    missing: tuple[str, ...] = ()
    """What could not be measured, with the reason."""

    @property
    def occupied(self) -> float:
        """Share of all slots' time in which they decoded."""
        return _mean([engine.occupied for engine in self.engines])

    @property
    def outside(self) -> float:
        """Share of all slots' time in which they were held and did nothing, because of a tool."""
        return _mean([engine.outside for engine in self.engines])

    @property
    def for_weights(self) -> float:
        return _mean([engine.for_weights for engine in self.engines])

    @property
    def generation_s(self) -> float:
        """Time of the generation of a batch if all slots were always in use."""
        return self.step_s * self.occupied

    @property
    def training_s(self) -> float:
        return self.step_s * self.learner.training

    @property
    def exposed_s(self) -> float:
        """Time of a step in which the Learner exported weights."""
        return self.step_s * self.learner.publishing

    @property
    def slow_engines(self) -> tuple[EngineTime, ...]:
        """Those that make less than :data:`SLOW` of what the quickest makes for one request."""
        known = [engine for engine in self.engines if engine.tokens_per_s is not None]
        best = max((engine.tokens_per_s or 0.0 for engine in known), default=0.0)
        return tuple(engine for engine in known if (engine.tokens_per_s or 0.0) < SLOW * best)

    @property
    def lost_speed(self) -> float:
        """Share of the generation that slow engines cost, against all of them being as quick as the others."""
        slow = {engine.name for engine in self.slow_engines}
        quick = [e.tokens_per_s for e in self.engines if e.tokens_per_s is not None and e.name not in slow]
        if not slow or not quick:
            return 0.0
        healthy = _mean(quick)
        return sum(1 - (e.tokens_per_s or 0.0) / healthy for e in self.slow_engines) / len(self.engines)

    @property
    def slow_share(self) -> float:
        """How much shorter the generations that are waited for would be if slow engines were as quick as the others:
        the last ones of a batch are theirs."""
        slow = [engine.tokens_per_s or 0.0 for engine in self.slow_engines]
        best = max((engine.tokens_per_s or 0.0 for engine in self.engines), default=0.0)
        return 1 - min(slow) / best if slow else 0.0


SLOW = 0.75
"""Of the quickest engine's tokens a second and request."""


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
