"""Which engines pass the bytes of a publish on to which others, so that the learner's link carries them about once.

Each piece takes a tree of its own: from the learner to one engine, from there to all others. So every link carries the
weights about once, however many engines there are, and no piece goes further than over two of them.

Invariants:

* A source serves the publish, has fetched it, or was told to fetch it in this turn or an earlier one. An engine that is
  given up, leaves, was no help with two of a few publishes, or gave wrong bytes, is none.
* Nobody waits for who waits for it: those who are told in one turn are told of the same sources, and others only of
  those who were told before them. Who fetches a second time, or goes back to an older publish, takes all from the
  learner: others may wait for it since it was first told.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from penstock.actors.weight_publisher.phases import Phase
from penstock.messages.weights import WeightSource

if TYPE_CHECKING:
    from penstock.actors.weight_publisher.engines import EngineState, EngineTable
    from penstock.messages.weights import WeightDetour, WeightsFetched

MOST_SOURCES: Final = 32
"""Of one engine, which has a line to each. More engines take the weights in groups of so many."""
MOST_DETOURS: Final = 2
"""Publishes of which a source did not give what it was asked for, until it is asked no more."""
RARE_PUBLISHES: Final = 8
"""What lies further apart does not add up: over a long run everyone is late now and then."""


class FanOut:
    """Of all engines."""

    def __init__(self, engines: EngineTable, *, is_tree: bool) -> None:
        self._engines = engines
        self._is_tree = is_tree
        self.num_detours = 0
        self._having: dict[int, list[WeightSource]] = {}
        """By publish, within a turn: who has it or takes it, by name."""
        self._told: dict[str, tuple[int, int]] = {}
        """By source: its epoch, and the publish that it was last said to be no help with."""

    def sources_for(self, engine: EngineState, publish: int) -> tuple[WeightSource, ...]:
        """For an engine that is told to fetch, when all that are told so in this turn have turned to it."""
        if not self._is_tree or publish <= engine.told_publish:
            return ()
        having = self._having.get(publish)
        if having is None:
            having = self._having[publish] = self._who_has(publish)
        place = bisect_left(having, engine.name, key=lambda source: source.engine)
        first = place // MOST_SOURCES * MOST_SOURCES
        near = having[first : first + MOST_SOURCES]
        return tuple(near) if any(source.engine != engine.name for source in near) else ()

    def end_turn(self) -> None:
        """Engines will move."""
        self._having.clear()

    def heard(self, event: WeightsFetched) -> list[str]:
        """What people should know of how an engine has fetched."""
        notices: list[str] = []
        for detour in event.detours:
            self.num_detours += 1
            if self._told.get(detour.engine) == (detour.epoch, event.publish):
                continue  # another engine has said so
            self._told[detour.engine] = (detour.epoch, event.publish)
            text = f"{event.engine} took part of version {event.version} from the learner, not from {detour.engine}"
            notices.append(f"{text}: {detour.cause}{self._blame(detour, event.publish)}")
        return notices

    def _blame(self, detour: WeightDetour, publish: int) -> str:
        """What follows for the source, if it is still there."""
        source = self._engines.live(detour.engine, detour.epoch)
        if source is None:
            return ""
        is_rare = publish - source.detour_of > RARE_PUBLISHES
        source.num_detours = MOST_DETOURS if detour.is_wrong else 1 if is_rare else source.num_detours + 1
        source.detour_of = publish
        if source.num_detours < MOST_DETOURS or not source.passes_on_at:
            return ""
        source.passes_on_at = ""
        return f"; {source.name} passes on no more weights"

    def _who_has(self, publish: int) -> list[WeightSource]:
        return [
            WeightSource(engine.name, engine.epoch, engine.passes_on_at)
            for _, engine in sorted(self._engines.by_name.items())
            if engine.passes_on_at and _has(engine, publish)
        ]


def _has(engine: EngineState, publish: int) -> bool:
    if engine.phase in (Phase.STARTING, Phase.QUARANTINED):
        return False
    # Who is on its way to other weights lets go of those that it serves.
    return engine.publish == publish if engine.target is None else engine.takes(publish)
