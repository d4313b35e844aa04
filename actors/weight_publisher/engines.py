"""The engines as the WeightPublisher sees them: what it waits for from each, and how many serve which version.

Invariants: every count equals what counting the engines gives; an engine that is on its way has a target, any other
has none.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.transitions import Steps
from penstock.actors.weight_publisher.phases import ENGINE, Phase
from penstock.messages.weights import WeightsExported

if TYPE_CHECKING:
    from penstock.messages.weights import WeightManifest

ROUNDING: Final = 1e-9
"""0.55 · 20 is a little more than 11 in floating point."""
_UNREADY: Final = (Phase.STARTING, Phase.QUARANTINED)
_QUARANTINED: Final = Phase.QUARANTINED
"""See :data:`penstock.messages.base.LOSSY`."""


class EngineState(msgspec.Struct):
    """One engine incarnation."""

    name: str
    epoch: int
    phase: Phase = Phase.STARTING
    version: int = -1
    publish: int = -1
    """The publish that it serves; −1: nothing yet."""
    said_version: int = -1
    """What it says it serves and this publisher does not know: since before it was there, or taken late of what was let
    go. That cannot be checked and counts for nothing. It takes nothing older."""
    target: WeightsExported | None = None
    """The publish that it is staging or committing."""
    told_publish: int = -1
    """The newest publish that it was told to fetch."""
    num_fetch_errors: int = 0
    is_newcomer: bool = False
    """It came when versions were being served already."""
    turn: int = 0
    """The last one that it was heard in, where it is lent its devices."""
    passes_on_at: str = ""
    """Where it serves what it has fetched to others; empty: it does not, or is asked no more."""
    num_detours: int = 0
    """Publishes, not far apart, of which it did not give what it was asked for."""
    detour_of: int = -1
    """The last of these."""

    @property
    def is_ready(self) -> bool:
        """Whether it counts among those that serve, or will. A newcomer counts once it serves, so that nobody waits for
        it."""
        return self.phase not in _UNREADY and not (self.is_newcomer and self.version < 0)

    @property
    def is_new(self) -> bool:
        """Whether it is a newcomer that serves nothing yet."""
        return self.is_newcomer and self.version < 0

    @property
    def is_moving(self) -> bool:
        """Whether it is on its way to other weights."""
        return self.target is not None

    def takes(self, publish: int) -> bool:
        """Whether this is what it is staging or committing."""
        return self.target is not None and self.target.manifest.publish == publish

    def lacks(self, manifest: WeightManifest) -> bool:
        """Whether these are newer than what it serves. A learner that goes over old batches again publishes old
        versions under new numbers; engines do not go back to them."""
        return self.publish < manifest.publish and max(self.version, self.said_version) <= manifest.version


class EngineTable:
    """All engines by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, EngineState] = {}
        self.steps = Steps(ENGINE)
        self._num_ready = 0
        self._num_serving: Counter[int] = Counter()
        """Ready engines by the version that they serve."""

    def live(self, name: str, epoch: int) -> EngineState | None:
        """This incarnation, if it is there and not given up."""
        engine = self.by_name.get(name)
        if engine is None or engine.epoch != epoch or engine.phase is _QUARANTINED:
            return None
        return engine

    def ready(self) -> list[EngineState]:
        """Those that serve, or will."""
        return [engine for engine in self.by_name.values() if engine.is_ready]

    def publishes(self) -> set[int]:
        """Those that any engine serves or takes."""
        engines = self.by_name.values()
        return {e.publish for e in engines} | {e.target.manifest.publish for e in engines if e.target is not None}

    def join(self, name: str, epoch: int, *, is_newcomer: bool, turn: int = 0) -> None:
        """A new incarnation, which is starting."""
        assert name not in self.by_name
        self.by_name[name] = EngineState(name, epoch, is_newcomer=is_newcomer, turn=turn)
        self.steps.take(None, Phase.STARTING)

    def drop(self, engine: EngineState) -> None:
        """It is gone."""
        self._count(engine, -1)
        del self.by_name[engine.name]
        self.steps.take(engine.phase, None)

    def turn(self, engine: EngineState, phase: Phase, target: WeightsExported | None = None) -> None:
        """The only way in which an engine changes its phase."""
        self._count(engine, -1)
        self.steps.take(engine.phase, phase)
        engine.phase, engine.target = phase, target
        self._count(engine, 1)

    def serves(self, engine: EngineState, version: int, publish: int) -> None:
        """The only way in which an engine changes what it serves."""
        self._count(engine, -1)
        engine.version, engine.publish = version, publish
        self._count(engine, 1)

    def served_by(self, fraction: float) -> int:
        """The newest version that this share of the ready engines serves, or a newer one; −1: none."""
        missing = max(1, math.ceil(fraction * self._num_ready - ROUNDING))
        for version in sorted(self._num_serving, reverse=True):
            missing -= self._num_serving[version]
            if missing <= 0:
                return version
        return -1

    def _count(self, engine: EngineState, sign: int) -> None:
        if engine.is_ready:
            self._num_ready += sign
            if engine.version >= 0:
                self._num_serving[engine.version] += sign
                if not self._num_serving[engine.version]:
                    del self._num_serving[engine.version]

    def validate(self) -> None:
        """Assert the invariants."""
        self.steps.validate()
        for engine in self.by_name.values():
            assert engine.is_moving == (engine.phase in (Phase.STAGING, Phase.STAGED, Phase.COMMITTING)), engine
        ready = self.ready()
        assert self._num_ready == len(ready)
        assert self._num_serving == Counter(engine.version for engine in ready if engine.version >= 0)
