"""Which version is announced.

Invariant: the announced version never goes down. Enough of the engines that are ready served it when it was announced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.commands import Send
from penstock.messages.names import BUFFER, LEARNER, PROMPT_SOURCE
from penstock.messages.weights import VersionAnnounced

if TYPE_CHECKING:
    from penstock.actors.weight_publisher.engines import EngineTable


class Announcing:
    """What was announced."""

    def __init__(self, engines: EngineTable, fraction: float) -> None:
        """``fraction``: of the engines that are ready, those that have to serve a version."""
        self._engines, self._fraction = engines, fraction
        self.version = -1

    def advance(self) -> list[Send]:
        """Announce the newest version that enough engines serve. Who serves what each engine tells PromptSource."""
        newest = self._engines.served_by(self._fraction)
        if newest <= self.version:
            return []
        self.version = newest
        publish = max(engine.publish for engine in self._engines.ready() if 0 <= engine.version <= newest)
        event = VersionAnnounced(version=newest, publish=publish)
        return [Send(name, event) for name in (PROMPT_SOURCE, BUFFER, LEARNER)]
