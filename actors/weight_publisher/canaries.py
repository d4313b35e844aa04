"""Which engine takes a publish first, and how it is seen that what an engine has loaded is wrong.

Invariants:

* There is one canary for each publish, and it is an engine that is there.
* An engine on which a publish failed is suspect until one passes: it may be the engine, so another goes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.canary import canary_difference, divergence

if TYPE_CHECKING:
    from penstock.actors.weight_publisher.engines import EngineState, EngineTable
    from penstock.actors.weight_publisher.exports import ExportTable
    from penstock.actors.weight_publisher.settings import WeightPublisherSettings
    from penstock.messages.weights import WeightManifest, WeightsApplied


class Canaries:
    """By publish."""

    def __init__(self, settings: WeightPublisherSettings, engines: EngineTable, exports: ExportTable) -> None:
        self._settings, self._engines, self._exports = settings, engines, exports
        self._by_publish: dict[int, str] = {}
        self.suspects: set[str] = set()

    def of(self, publish: int) -> str | None:
        """The engine that goes first with it, if one has been chosen."""
        return self._by_publish.get(publish)

    def may_commit(self, engine: EngineState, publish: int) -> bool:
        """Whether this engine need not wait: another has passed, or it goes first itself."""
        return self._exports.has_passed(publish) or self._is_canary(engine, publish)

    def _is_canary(self, engine: EngineState, publish: int) -> bool:
        if not self.can_go_first(engine):
            return False
        if publish not in self._by_publish and engine.name in self.suspects:
            others = (other for other in self._engines.ready() if self.can_go_first(other))
            if any(other.name not in self.suspects for other in others):
                return False
        return self._by_publish.setdefault(publish, engine.name) == engine.name

    def can_go_first(self, engine: EngineState) -> bool:
        """Whether it may be a canary: what has no weights proves nothing of them, and for a newcomer nobody waits while
        another can go first, and there is something for it that has passed."""
        if engine.is_new and self._exports.best() is not None and any(map(self.can_go_first, self._engines.ready())):
            return False
        return not self._settings.has_models or engine.name not in self._settings.weightless

    def free(self, name: str) -> None:
        """Whoever waited for this engine to go first need not."""
        self._by_publish = {publish: canary for publish, canary in self._by_publish.items() if canary != name}

    def done(self, publish: int) -> None:
        """It has gone first."""
        self._by_publish.pop(publish, None)

    def what_is_wrong(self, manifest: WeightManifest, event: WeightsApplied) -> str:
        """With what an engine has loaded; empty: nothing."""
        settings, options = self._settings, self._settings.options
        assert options.canary_tolerance is not None, "scenarios are resolved"
        if event.digest != manifest.digest:
            return f"it loaded the digest {event.digest}, {manifest.digest} was exported"
        others = self._exports.checksum_of(event.publish, event.layout)
        if others not in ("", event.checksum):
            return (
                f"what it loaded has the checksum {event.checksum}, on engines that are laid out alike it is {others}"
            )
        has_weights = event.engine not in settings.weightless
        if options.canary and has_weights and manifest.canary is not None:
            difference = canary_difference(manifest.canary, event.canary_logprobs)
            if difference > options.canary_tolerance:
                off = f"its canary is off by {difference:.3g} of its spread, {options.canary_tolerance:g} is allowed"
                return divergence(manifest.canary) or off
        return ""

    def validate(self) -> None:
        """Assert the invariants."""
        for publish, canary in self._by_publish.items():
            assert canary in self._engines.by_name, (publish, canary)
