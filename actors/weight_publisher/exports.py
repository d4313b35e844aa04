"""The publishes that the WeightPublisher knows: which an engine has passed, which have failed, and which to take next.

Invariants:

* A publish that failed is never staged again. One that an engine has passed fails only when it can be fetched no more.
* The newest publish and the best that was passed are kept, and so is whatever an engine serves or takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.actors.weight_publisher.engines import EngineState
    from penstock.messages.weights import WeightsExported


class ExportTable:
    """Publishes by number."""

    def __init__(self) -> None:
        self.newest: WeightsExported | None = None
        self.num_failed_in_a_row = 0
        self._exports: dict[int, WeightsExported] = {}
        self._passed: set[int] = set()
        """Publishes with which an engine has passed the canary."""
        self._failed: set[int] = set()
        self._checksums: dict[int, dict[str, str]] = {}
        """By publish: the checksum that the first engine of each layout had of it."""
        self._num_unfetchable: dict[int, int] = {}
        """Engine incarnations that gave up fetching a publish."""

    def add(self, export: WeightsExported) -> bool:
        """The Learner has published; whether this is news."""
        publish = export.manifest.publish
        if self.newest is not None and publish <= self.newest.manifest.publish:
            return False
        self.newest = self._exports[publish] = export
        return True

    def get(self, publish: int) -> WeightsExported | None:
        """This publish, if it is known here."""
        return self._exports.get(publish)

    def has_passed(self, publish: int) -> bool:
        """Whether an engine has passed the canary with it."""
        return publish in self._passed

    def passes(self, publish: int) -> bool:
        """An engine has; whether it is the first."""
        if publish in self._passed or publish in self._failed:
            return False
        self._passed.add(publish)
        self.num_failed_in_a_row = 0
        return True

    def loads(self, publish: int, layout: str, checksum: str) -> None:
        """An engine has loaded it, and nothing is wrong with that."""
        if checksum:
            self._checksums.setdefault(publish, {}).setdefault(layout, checksum)

    def checksum_of(self, publish: int, layout: str) -> str:
        """What others of this layout have loaded; empty: none has."""
        return self._checksums.get(publish, {}).get(layout, "")

    def has_failed(self, publish: int) -> bool:
        """Whether no engine is to take it any more."""
        return publish in self._failed

    def fails(self, publish: int) -> None:
        """No engine is to take it from now on."""
        self._failed.add(publish)
        self._passed.discard(publish)

    def unfetchable(self, publish: int) -> int:
        """One more engine gave up fetching it; how many have."""
        self._num_unfetchable[publish] = self._num_unfetchable.get(publish, 0) + 1
        return self._num_unfetchable[publish]

    def best(self) -> WeightsExported | None:
        """Of those that have passed, that of the newest version."""
        return max((self._exports[publish] for publish in self._passed), key=_rank, default=None)

    def next_for(self, engine: EngineState, *, goes_first: bool) -> WeightsExported | None:
        """What this engine is to take, if it lacks it: the newest version that has not failed, and one that has passed
        if the engine may not go first. While a Learner goes over old batches again, that is not always the newest
        publish."""
        usable = (export for publish, export in self._exports.items() if publish not in self._failed)
        best = max(usable, key=_rank, default=None) if goes_first else self.best()
        return best if best is not None and engine.lacks(best.manifest) else None

    def forget_old(self, used: Collection[int]) -> None:
        """Drop publishes that no engine serves or takes any more, and that none would be given."""
        kept = {export.manifest.publish for export in (self.newest, self.best()) if export is not None}
        for publish in [publish for publish in self._exports if publish not in used and publish not in kept]:
            del self._exports[publish]
            self._passed.discard(publish)
            self._failed.discard(publish)
            self._num_unfetchable.pop(publish, None)
            self._checksums.pop(publish, None)

    def validate(self) -> None:
        """Assert the invariants."""
        assert not (self._passed & self._failed)
        assert self._passed <= self._exports.keys()
        assert self._failed <= self._exports.keys()


def _rank(export: WeightsExported) -> tuple[int, int]:
    return export.manifest.version, export.manifest.publish
