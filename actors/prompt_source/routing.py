"""Which engine gets a sample.

The rules, the first that applies:

1. *Sticky.* A sample that is issued again goes on where its cache is, if that very incarnation lives.
2. *Prefix-affine* (``routing: prefix_affine``). The samples of a group go where the last one of them went, since they
   share the cache of their prompt; and a slot that becomes free takes the next of the group that its engine was last
   given, before another group is begun there (:mod:`.queues`).
3. *Least loaded.* The engine that would have the smallest share of its slots taken, so that engines of unequal size are
   loaded in proportion. One that the sample is to avoid is taken only when no other has room.

With a policy (:mod:`.policies`) that takes the place of the second rule and the third: it says which engine of those
that may take the sample.

*Weights.* All of them choose among the engines that serve the version which the sample needs, the oldest that keeps it
within the bound by its deadline. Where none of these has a free slot it may wait for weights at an engine that has one,
if its swap should come at least one version before the deadline; else it waits here, where a slot of any engine that
serves its version, or comes to, takes it. How late an engine is, in versions, is how many had been announced when it
swapped last beyond the one that it took. Samples that waited there may have held the versions up, so such a swap makes
the engine no less late than it was. A sample that is to avoid an engine waits for weights wherever else it can.

A sample is bound late: it waits here for the slot that becomes free first, wherever that is, since what is bound to an
engine early waits there while others become idle. It queues at an engine, so that a slot need not wait for the way here
and back, only while so many wait behind it that they keep every other engine busy until it starts.

Invariants:

* No engine is given more than its capacity, ``slots × max_load``.
* Without a policy the first two rules never let a sample queue while an engine that the third would take has a free
  slot: a group that is larger than the room spreads.
* Every engine with room has one valid entry, in the heap of those that serve the same version and are as late. Choosing
  costs O(log n) for each such heap, and there are few: engines take the newest version.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.actors.prompt_source.policies import RoutedEngine, RoutedSample

if TYPE_CHECKING:
    from penstock.actors.prompt_source.policies import RoutingPolicy
    from penstock.messages.weights import EngineReady


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
    """That it serves; −1: none, or wrong weights."""
    lag: int = 0
    """Versions that it is late by."""
    awaited: int = -1
    """The highest that a sample which was sent here has needed."""
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


_Entry = tuple[float, str, int]
"""(share, name, number of the entry)."""


_Key = tuple[int, int]
"""(version, lag) of the engines in a heap."""


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
        self._heaps: dict[_Key, list[_Entry]] = {}
        """With entries that are out of date."""
        self._announced = -1
        """The newest version that enough engines serve."""
        self._absent: dict[str, int] = {}
        """Loads of engines that are not there: of those that were lost, until it is known what became of it."""
        self._num_serving = 0
        """Engines that serve some version."""
        self._num_entries = 0
        self._num_slots = 0
        """Of all engines that stay."""
        self._num_ready = 0
        self._num_engines = num_engines

    def has_room(self, num_waiting: int) -> bool:
        """Whether any engine takes one of so many samples."""
        first: EngineView | None = None
        for key in tuple(self._heaps):
            first = _less_loaded(first, self._top(key))
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
        self.engines[name] = EngineView(name, epoch, load=load, is_newcomer=self._num_serving > 0)

    def ready(self, event: EngineReady, sweep: int) -> None:
        """This incarnation takes requests, or serves another version. It takes none where it has no slots: its lent
        device was taken back, and in the next turn of that it is a newcomer."""
        view = self.engines.get(event.engine)
        if view is None or view.epoch != event.engine_epoch or view.is_leaving:
            return
        if event.turn > view.turn:
            view.is_newcomer, view.turn = True, event.turn
        num_slots = event.num_slots
        if num_slots != view.num_slots:
            self._num_ready += bool(num_slots) - bool(view.num_slots)
            self._num_slots += num_slots - view.num_slots
            view.num_slots, view.progressed = num_slots, sweep
            view.capacity = max(num_slots, math.ceil(num_slots * self._max_load))
        if event.version != view.version:
            self._serves(view, event.version)
        self._note(view)

    def _serves(self, view: EngineView, version: int) -> None:
        self._num_serving += (version >= 0) - (view.version >= 0)
        if version >= 0:
            lag, has_waited = max(0, self._announced - version), view.awaited > view.version
            view.lag = max(lag, view.lag) if has_waited else lag
        view.version = version

    def announced(self, version: int) -> None:
        """Enough engines serve this version."""
        self._announced = max(self._announced, version)

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

    # --- the choice -------------------------------------------------------------------------------------------

    def choose(self, sample: RoutedSample, *, avoids: str, cache: Cache | None, num_waiting: int) -> EngineView | None:
        """The engine for a sample; None when it has to wait.

        Args:
            sample: with the version that it needs and its deadline, and the engine that the last of its group went to.
            avoids: the engine on which it did not get on; may be empty.
            cache: where what there is of it was made.
            num_waiting: samples that wait for engines of this kind, with this one.
        """
        first = self._least_loaded(sample, avoids)
        # One that avoids an engine queues elsewhere, rather than that it holds up those that may go there.
        if first is None or not (avoids or self._takes(first, num_waiting)):
            return None
        for view in self._preferred(cache, sample.group_engine):
            has_room = view.has_free_slot or (view.has_room and not first.has_free_slot)
            if view.name != avoids and has_room and self._is_as_good(view, first, sample):
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
            and self._is_as_good(view, first, sample)
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

    def _least_loaded(self, sample: RoutedSample, avoids: str) -> EngineView | None:
        serving: EngineView | None = None
        late: EngineView | None = None
        for key in tuple(self._heaps):
            version, lag = key
            if version >= sample.min_version:
                serving = _less_loaded(serving, self._top(key, avoids))
            elif avoids or comes_in_time(lag, sample):
                late = _less_loaded(late, self._top(key, avoids))
        if serving is None or (late is not None and late.has_free_slot and not serving.has_free_slot):
            serving = late
        return self._least_loaded(sample, "") if serving is None and avoids else serving

    def _is_as_good(self, view: EngineView, first: EngineView, sample: RoutedSample) -> bool:
        """Whether a sample for which the other is the least loaded need not wait for weights because it goes here."""
        if view.version >= sample.min_version or view is first:
            return True
        return first.version < sample.min_version and comes_in_time(view.lag, sample)

    # --- the heaps --------------------------------------------------------------------------------------------

    def _note(self, view: EngineView) -> None:
        """Its load, room or version is another."""
        self._num_entries = number = view.entry = self._num_entries + 1
        load = view.load
        if load >= view.capacity or (view.is_newcomer and view.version < 0):  # as has_room, twice for each sample
            return
        key = view.version, view.lag
        heap = self._heaps.get(key)
        if heap is None:
            heap = self._heaps[key] = []
        heapq.heappush(heap, ((load + 1) / view.num_slots, view.name, number))
        if len(heap) > 64 + 4 * len(self.engines):
            self._clear(heap)

    def _clear(self, heap: list[_Entry]) -> None:
        """Drop what is out of date."""
        engines = self.engines
        heap[:] = [each for each in heap if (view := engines.get(each[1])) is not None and view.entry == each[2]]
        heapq.heapify(heap)

    def _top(self, key: _Key, avoids: str = "") -> EngineView | None:
        """The first of a heap that is not avoided. Drops what is out of date on the way, and a heap of nothing else."""
        heap = self._heaps[key]
        avoided: _Entry | None = None
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
        elif not heap:
            del self._heaps[key]
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
        current = {(view.name, view.entry) for view in self.engines.values()}
        valid = [(key, entry) for key, heap in self._heaps.items() for entry in heap if entry[1:] in current]
        with_room = [view for view in self.engines.values() if view.has_room]
        wanted = [((view.version, view.lag), (view.share, view.name, view.entry)) for view in with_room]
        assert sorted(valid) == sorted(wanted), (valid, with_room)


def _less_loaded(one: EngineView | None, other: EngineView | None) -> EngineView | None:
    if one is None or other is None:
        return one or other
    return one if (one.share, one.name) <= (other.share, other.name) else other


def comes_in_time(lag: int, sample: RoutedSample) -> bool:
    """Whether an engine that is so late should have what the sample needs a version before its deadline."""
    return sample.min_version + lag < sample.deadline_version
