"""Which engine gets a sample.

The rules, the first that applies:

1. *Sticky.* A sample that is issued again goes on where its cache is, if that very incarnation lives.
2. *Prefix-affine* (``routing: prefix_affine``). The samples of a group go where the last one of them went, since they
   share the cache of their prompt; and a slot that becomes free takes the next of the group that its engine was last
   given, before another group is begun there (:mod:`.queues`).
3. *Least loaded.* The engine that would have the smallest share of its slots taken, so that engines of unequal size are
   loaded in proportion. One that serves the version that the sample needs goes before one that does not yet, unless
   only the latter has a free slot; one that the sample is to avoid is taken only when no other has room.

With a policy (:mod:`.policies`) that takes the place of the second rule and the third: it says which engine of those
that may take the sample.

A sample is bound late: it waits here for the slot that becomes free first, wherever that is, since what is bound to an
engine early waits there while others become idle. It queues at an engine, so that a slot need not wait for the way here
and back, only while so many wait behind it that they keep every other engine busy until it starts.

Invariants:

* No engine is given more than its capacity, ``slots × max_load``.
* Without a policy the first two rules never let a sample queue while an engine that the third would take has a free
  slot: a group that is larger than the room spreads.
* Every engine with room has one valid entry in the heap, and one in that of engines that serve the newest version
  which a group has asked for, if it does. Choosing costs O(log n), but O(n) once for each such version.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.actors.prompt_source.policies import RoutedEngine, RoutedSample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.actors.prompt_source.policies import RoutingPolicy
    from penstock.messages.weights import ServingEngine


class Cache(NamedTuple):
    """Where the keys and values of some tokens are."""

    engine: str
    epoch: int


class EngineView(msgspec.Struct):
    """One engine as PromptSource sees it."""

    name: str
    epoch: int
    num_slots: int = 0
    """0 until it is ready, and while a device that it is lent is the learner's."""
    capacity: int = 0
    version: int = -1
    group_id: int | None = None
    """The group that was last begun or gone on with here."""
    load: int = 0
    progressed: int = 0
    """Sweep in which it was last heard to have made a token, or an end of one of its requests."""
    entry: int = 0
    """Number of its valid entry in the heaps."""
    is_newcomer: bool = False
    """It came when others served already: it is sent nothing before it serves something itself, since what would wait
    there for weights can start elsewhere."""
    is_leaving: bool = False
    """It is sent nothing more."""
    turn: int = 0
    """The last one that it was heard in, where it is lent its devices."""

    @property
    def has_room(self) -> bool:
        """Whether more may be sent."""
        return self.load < self.capacity and not (self.is_newcomer and self.version < 0)

    @property
    def has_free_slot(self) -> bool:
        """Whether what is sent now starts at once."""
        return self.load < self.num_slots and self.has_room

    @property
    def share(self) -> float:
        """Of its slots, that one sample more would leave taken."""
        return (self.load + 1) / self.num_slots


_Heap = list[tuple[float, str, int]]
"""(share, name, number of the entry), with entries that are out of date."""


class Router:
    """The engines, and which of them is next."""

    def __init__(
        self, *, is_affine: bool, max_load: float, num_engines: int = 0, policy: RoutingPolicy | None = None
    ) -> None:
        """``num_engines``: of a whole run; ``policy``: what chooses in place of the rules; None: they do."""
        self._policy = policy
        self.engines: dict[str, EngineView] = {}
        self._is_affine = is_affine
        self._max_load = max_load
        self._by_load: _Heap = []
        self._serving: _Heap = []
        """Only those that serve ``_newest``."""
        self._newest = -1
        """The highest version that a sample has needed."""
        self._absent: dict[str, int] = {}
        """Loads of engines that are not there: of those that were lost, until it is known what became of it."""
        self._num_serving = 0
        """Engines that serve some version."""
        self._num_entries = 0
        self._told: dict[str, ServingEngine] = {}
        """What was said last of who serves what: word on an incarnation may come before the word that it is there."""
        self._num_slots = 0
        """Of all engines that stay."""
        self._num_ready = 0
        self._num_engines = num_engines

    def has_room(self, num_waiting: int) -> bool:
        """Whether any engine takes one of so many samples."""
        first = self._top(self._by_load)
        return first is not None and self._takes(first, num_waiting)

    def _takes(self, view: EngineView, num_waiting: int) -> bool:
        """Whether one of so many samples may go here: it starts at once, or behind it enough wait for the slots of all
        other engines, should they become free as often as this one's have to until it starts. Nothing queues while an
        engine is missing."""
        if view.has_free_slot:
            return True
        if self._num_ready < self._num_engines or not view.has_room:
            return False
        return num_waiting > view.load // view.num_slots * (self._num_slots - view.num_slots)

    # --- what is known of engines -----------------------------------------------------------------------------

    def join(self, name: str, epoch: int, load: int) -> None:
        """A new incarnation; what its predecessor had stays in its load until it is known what became of it."""
        self.lose(name)
        self._absent.pop(name, None)
        is_newcomer = self._num_serving > 0
        told = self._told.get(name)
        version = -1 if told is None or told.epoch != epoch else told.version
        self.engines[name] = EngineView(name, epoch, load=load, version=version, is_newcomer=is_newcomer)
        self._num_serving += version >= 0

    def ready(self, name: str, epoch: int, num_slots: int, sweep: int, turn: int = 0) -> None:
        """This incarnation takes requests; none where ``num_slots`` is 0: its lent device was taken back. In a later
        ``turn`` of such a device it serves nothing at first."""
        view = self.engines.get(name)
        if view is not None and view.epoch == epoch and not view.is_leaving:
            self._num_ready += bool(num_slots) - bool(view.num_slots)
            if turn > view.turn:
                is_first = not view.turn  # that is heard of here: who serves what may have been said before
                if not (is_first and num_slots):
                    self._num_serving -= view.version >= 0
                    view.version = -1
                view.is_newcomer, view.turn = True, turn
            self._num_slots += num_slots - view.num_slots
            view.num_slots, view.progressed = num_slots, sweep
            view.capacity = max(num_slots, math.ceil(num_slots * self._max_load))
            self._note(view)

    def retire(self, name: str) -> None:
        """It is to leave."""
        view = self.engines.get(name)
        if view is not None:
            self._discount(view)
            view.is_leaving, view.capacity = True, 0
            self._note(view)

    def lose(self, name: str) -> None:
        """It is gone, and its entries with it."""
        view = self.engines.pop(name, None)
        if view is not None:
            self._absent[name] = view.load
            self._num_serving -= view.version >= 0
            self._discount(view)

    def _discount(self, view: EngineView) -> None:
        """Its slots are counted no more."""
        if not view.is_leaving:
            self._num_ready -= bool(view.num_slots)
            self._num_slots -= view.num_slots

    def load(self, name: str, change: int) -> None:
        """It has so many samples more, or fewer."""
        view = self.engines.get(name)
        if view is None:
            self._absent[name] = self._absent.get(name, 0) + change
            return
        view.load += change
        self._note(view)

    def load_at(self, name: str) -> int:
        """Samples that are at this engine, whether it is there or not."""
        view = self.engines.get(name)
        return self._absent.get(name, 0) if view is None else view.load

    def progressed(self, name: str, sweep: int) -> None:
        """Something has come of what this engine does."""
        view = self.engines.get(name)
        if view is not None:
            view.progressed = sweep

    def serves(self, serving: Iterable[ServingEngine]) -> None:
        """These engines serve these versions."""
        self._told = {engine.engine: engine for engine in serving}
        for engine in self._told.values():
            view = self.engines.get(engine.engine)
            if view is not None and view.epoch == engine.epoch and view.version != engine.version:
                self._num_serving += (engine.version >= 0) - (view.version >= 0)
                view.version = engine.version
                self._note(view)

    # --- the choice -------------------------------------------------------------------------------------------

    def choose(self, sample: RoutedSample, *, avoids: str, cache: Cache | None, num_waiting: int) -> EngineView | None:
        """The engine for a sample; None when it has to wait.

        Args:
            sample: with the version that it needs, and the engine that the last sample of its group went to.
            avoids: the engine on which it did not get on; may be empty.
            cache: where what there is of it was made.
            num_waiting: samples that wait for engines of this kind, with this one.
        """
        min_version, group = sample.min_version, sample.group_engine
        if min_version > self._newest:
            self._newest = min_version
            self._serving = [self._entry(view) for view in self.engines.values() if self._is_serving(view)]
            heapq.heapify(self._serving)
        first = self._least_loaded(min_version, avoids)
        # One that avoids an engine queues elsewhere, rather than that it holds up those that may go there.
        if first is None or not (avoids or self._takes(first, num_waiting)):
            return None
        for view in self._preferred(cache, group):
            if view.name != avoids and (view.has_free_slot or (view.has_room and not first.has_free_slot)):
                return view
        if self._policy is not None:
            return self._by_policy(self._policy, sample, avoids, first, num_waiting)
        return first

    def _by_policy(
        self, policy: RoutingPolicy, sample: RoutedSample, avoids: str, first: EngineView, num_waiting: int
    ) -> EngineView:
        given = [
            RoutedEngine(
                name=view.name, num_slots=view.num_slots, capacity=view.capacity, load=view.load, version=view.version
            )
            for view in self.engines.values()
            if (view.has_room if avoids else self._takes(view, num_waiting))
            and (view.name != avoids or first.name == avoids)
        ]
        name = policy.choose(sample, given)
        return first if name is None else self.engines[name]

    def _preferred(self, cache: Cache | None, group: str) -> list[EngineView]:
        found: list[EngineView] = []
        if cache is not None:
            view = self.engines.get(cache.engine)
            if view is not None and view.epoch == cache.epoch:
                found.append(view)
        if self._is_affine and (view := self.engines.get(group)) is not None:
            found.append(view)
        return found

    def _least_loaded(self, min_version: int, avoids: str) -> EngineView | None:
        first = self._top(self._by_load, avoids)
        if first is None:
            return self._top(self._by_load)
        if first.version >= min_version:
            return first
        serving = self._top(self._serving, avoids)
        return first if serving is None or (first.has_free_slot and not serving.has_free_slot) else serving

    # --- the heaps --------------------------------------------------------------------------------------------

    def _note(self, view: EngineView) -> None:
        """Its load, room or version is another."""
        self._num_entries = number = view.entry = self._num_entries + 1
        load = view.load
        if load >= view.capacity or (view.is_newcomer and view.version < 0):  # as has_room, twice for each sample
            return
        entry = ((load + 1) / view.num_slots, view.name, number)
        heapq.heappush(self._by_load, entry)
        if view.version >= self._newest:
            heapq.heappush(self._serving, entry)
        most = 64 + 4 * len(self.engines)
        if len(self._by_load) > most:
            self._clear(self._by_load)
        if len(self._serving) > most:
            self._clear(self._serving)

    def _clear(self, heap: _Heap) -> None:
        """Drop what is out of date."""
        engines = self.engines
        heap[:] = [each for each in heap if (view := engines.get(each[1])) is not None and view.entry == each[2]]
        heapq.heapify(heap)

    def _is_serving(self, view: EngineView) -> bool:
        return view.has_room and view.version >= self._newest

    def _entry(self, view: EngineView) -> tuple[float, str, int]:
        return view.share, view.name, view.entry

    def _top(self, heap: _Heap, avoids: str = "") -> EngineView | None:
        """The first of the heap that is not avoided. Drops what is out of date on the way."""
        avoided: tuple[float, str, int] | None = None
        found: EngineView | None = None
        while heap:
            entry = heap[0]
            view = self.engines.get(entry[1])
            if view is not None and view.entry == entry[2]:
                if entry[1] != avoids:
                    found = view
                    break
                avoided = entry
            heapq.heappop(heap)
        if avoided is not None:
            heapq.heappush(heap, avoided)
        return found

    def validate(self, loads: dict[str, int]) -> None:
        """Assert the invariants, and that these are the loads."""
        if not self.engines:  # as mostly one of two routers is: asked after every event of every trial
            assert not loads
            assert not any((self._num_slots, self._num_ready, self._num_serving))
            return
        assert loads == {name: view.load for name, view in self.engines.items()}, loads
        staying = [view for view in self.engines.values() if not view.is_leaving]
        assert self._num_slots == sum(view.num_slots for view in staying)
        assert self._num_ready == sum(bool(view.num_slots) for view in staying)
        assert self._num_serving == sum(view.version >= 0 for view in self.engines.values())
        assert not self._absent.keys() & self.engines.keys()
        with_room = [view for view in self.engines.values() if view.has_room]
        current = {(view.name, view.entry) for view in self.engines.values()}
        for heap, views in (
            (self._by_load, with_room),
            (self._serving, [view for view in with_room if view.version >= self._newest]),
        ):
            valid = [entry for entry in heap if entry[1:] in current]
            assert sorted(valid) == sorted(map(self._entry, views)), (valid, views)
