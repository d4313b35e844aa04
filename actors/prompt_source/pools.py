"""The engines that generate and those that answer with responses of rows: a router for each kind.

Invariants:

* A sample whose row holds its response goes to an engine that knows the rows, any other to one that generates.
* What waits for an engine of one kind never holds up what is for the other.
"""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING

from penstock.actors.prompt_source.routing import Router

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.actors.prompt_source.policies import RoutedSample, RoutingPolicy
    from penstock.actors.prompt_source.routing import Cache, EngineView
    from penstock.messages.weights import EngineReady


class EnginePools:
    """All engines of the run; see :class:`~penstock.actors.prompt_source.routing.Router` for each kind."""

    def __init__(
        self,
        *,
        recorded: Collection[str],
        is_affine: bool,
        max_load: float,
        num_generating: int = 0,
        policy: RoutingPolicy | None = None,
    ) -> None:
        """``recorded``: the names of the engines that answer with responses of rows; ``num_generating``, ``policy``: of
        those that generate."""
        self._recorded_names = frozenset(recorded)
        self._generating = Router(is_affine=is_affine, max_load=max_load, num_engines=num_generating, policy=policy)
        self._recorded = Router(is_affine=is_affine, max_load=max_load, num_engines=len(recorded))
        self.engines: Mapping[str, EngineView] = ChainMap(self._generating.engines, self._recorded.engines)

    @property
    def num_engines(self) -> int:
        """Of both kinds. A ``ChainMap`` makes a set of all keys to count them, and this is asked for every sample."""
        return len(self._generating.engines) + len(self._recorded.engines)

    def has_room(self, num_waiting: int, *, is_recorded: bool) -> bool:
        """Whether any engine of this kind takes one of so many samples."""
        return (self._recorded if is_recorded else self._generating).has_room(num_waiting)

    def join(self, name: str, epoch: int, load: int) -> None:
        """A new incarnation."""
        self._of(name).join(name, epoch, load)

    def ready(self, event: EngineReady, sweep: int) -> None:
        """This incarnation takes requests, or serves another version."""
        self._of(event.engine).ready(event, sweep)

    def retire(self, name: str) -> None:
        """It is to leave."""
        self._of(name).retire(name)

    def lose(self, name: str) -> None:
        """It is gone."""
        self._of(name).lose(name)

    def load(self, name: str, change: int) -> None:
        """It has so many samples more, or fewer."""
        router = self._recorded if name in self._recorded_names else self._generating  # as _of, twice for each sample
        router.load(name, change)

    def load_at(self, name: str) -> int:
        """Samples that are at this engine, whether it is there or not."""
        return self._of(name).load_at(name)

    def progressed(self, name: str, sweep: int) -> None:
        """Something has come of what this engine does."""
        self._of(name).progressed(name, sweep)

    def announced(self, version: int) -> None:
        """Enough engines serve this version."""
        self._generating.announced(version)
        self._recorded.announced(version)

    def choose(
        self, sample: RoutedSample, *, is_recorded: bool, avoids: str, cache: Cache | None, num_waiting: int
    ) -> EngineView | None:
        """The engine for a sample; None when it has to wait. ``is_recorded``: its row holds its response."""
        return self._kind(is_recorded).choose(sample, avoids=avoids, cache=cache, num_waiting=num_waiting)

    def _kind(self, is_recorded: bool) -> Router:
        return self._recorded if is_recorded else self._generating

    def _of(self, name: str) -> Router:
        return self._kind(name in self._recorded_names)

    def validate(self, loads: Mapping[str, int]) -> None:
        """Assert the invariants, and that these are the loads."""
        for router in (self._generating, self._recorded):
            router.validate({name: load for name, load in loads.items() if name in router.engines})
        assert not self._generating.engines.keys() & self._recorded_names
        assert self._recorded.engines.keys() <= self._recorded_names
