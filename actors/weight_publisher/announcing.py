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
        self.newcomer_serves = False
        """Since then: it gets nothing to do before PromptSource knows."""
        self._told: VersionAnnounced | None = None

    def again(self) -> None:
        """Somebody who was told of as serving does so no more, and may again before that is said: say it all then."""
        self.serving_changed, self._told = True, None

    def advance(self) -> list[Send]:
        """Announce the newest version that enough engines serve. PromptSource also hears who serves what once no engine
        is on its way, and of a newcomer's first version at once: with a thousand engines it would otherwise hear of
        each of a thousand swaps."""
        engines = self._engines
        newest = engines.served_by(self._fraction)
        is_new = newest > self.version
        has_news = self.newcomer_serves or (self.serving_changed and not engines.num_moving)
        if not is_new and (not has_news or self.version < 0):
            return []
        self.serving_changed = self.newcomer_serves = False
        self.version = max(self.version, newest)
        ready = engines.ready()
        event = VersionAnnounced(
            version=self.version,
            publish=max((e.publish for e in ready if e.version <= self.version), default=-1),
            serving=tuple(ServingEngine(e.name, e.version, e.epoch) for e in ready if e.version >= 0),
        )
        if event == self._told or not event.serving:
            return []
        self._told = event
        return [Send(name, event) for name in ((PROMPT_SOURCE, BUFFER, LEARNER) if is_new else (PROMPT_SOURCE,))]
