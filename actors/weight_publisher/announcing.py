"""Which version is announced, and who hears of it.

Invariant: the announced version never goes down. Enough of the engines that are ready served it when it was announced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.commands import Send
from penstock.messages.names import BUFFER, LEARNER, PROMPT_SOURCE
from penstock.messages.weights import ServingEngine, VersionAnnounced

if TYPE_CHECKING:
    from penstock.actors.weight_publisher.engines import EngineTable


class Announcing:
    """What was announced."""

    def __init__(self, engines: EngineTable, fraction: float) -> None:
        """``fraction``: of the engines that are ready, those that have to serve a version."""
        self._engines, self._fraction = engines, fraction
        self.version = -1
        self.serving_changed = False
        """Since PromptSource was told."""
        self._told: VersionAnnounced | None = None

    def advance(self) -> list[Send]:
        """Announce the newest version that enough engines serve. PromptSource also hears who serves what once no engine
        is on its way: with a thousand engines it would otherwise hear of each of a thousand swaps."""
        engines = self._engines
        newest = engines.served_by(self._fraction)
        is_new = newest > self.version
        if not is_new and (engines.num_moving or not self.serving_changed or self.version < 0):
            return []
        self.serving_changed = False
        self.version = max(self.version, newest)
        ready = engines.ready()
        event = VersionAnnounced(
            version=self.version,
            publish=max((e.publish for e in ready if e.version <= self.version), default=-1),
            serving=tuple(ServingEngine(e.name, e.version) for e in ready if e.version >= 0),
        )
        if event == self._told or not event.serving:
            return []
        self._told = event
        return [Send(name, event) for name in ((PROMPT_SOURCE, BUFFER, LEARNER) if is_new else (PROMPT_SOURCE,))]
