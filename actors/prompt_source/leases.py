"""The samples that are out, and the engines that they are on.

A lease is QUEUED (waits for an engine), ISSUED (at an engine), LEFT (its engine is done with it: it is on its way
through Scorer and Filter) or FAILED (given up, ``SampleFailed`` is on its way). It ends when its group is settled.

Invariants:

* The load of an engine is the number of leases ISSUED to it; those of an incarnation that was lost count until a
  census has said what became of them.
* A lease that is ISSUED names an engine; any other names none.
* Every engine that has room has one valid entry in the heap of those that have.
"""

from __future__ import annotations

import heapq
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from penstock.actors.parts import join
from penstock.messages.samples import Part, Prompt, SampleKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class LeaseState(Enum):
    """Where a sample is, as far as PromptSource knows."""

    QUEUED = "queued"
    ISSUED = "issued"
    LEFT = "left"
    FAILED = "failed"


class Lease(msgspec.Struct):
    """One sample that is out."""

    key: SampleKey
    attempt: int = 0
    state: LeaseState = LeaseState.QUEUED
    engine: str = ""
    round: int = 0
    """The census round in which it was last issued; a census judges only what was issued before it."""
    num_engine_losses: int = 0
    num_vanished: int = 0
    """Attempts that cost no retry: their engine was lost, or a message was, or they were another incarnation's."""
    sweep: int = 0
    """Sweep of the overdue timer in which it last showed progress, or somebody said that he holds it."""
    num_seen: int = 0
    """Tokens that its engine has said it has."""
    running_since: int | None = None
    """Sweep in which a census first found it running with ``num_seen`` tokens."""
    avoids: str = ""
    """The engine on which it stood still."""
    chunks: list[Part] = []
    num_tokens: int = 0
    """In ``chunks``."""

    def add_progress(self, from_token: int, chunk: Part) -> None:
        """Take over a report. One that does not follow what is there is left out: the prefix just stays shorter."""
        if from_token == self.num_tokens and chunk.num_tokens:
            self.chunks.append(chunk)
            self.num_tokens += chunk.num_tokens

    def has(self, num_tokens: int) -> bool:
        """Its engine has so many tokens of it; whether that is progress."""
        if num_tokens <= self.num_seen:
            return False
        self.num_seen, self.running_since = num_tokens, None
        return True

    def found_prefix(self, prefix: Part | None) -> None:
        """Its engine has told what there is of it."""
        if prefix is not None and prefix.num_tokens > self.num_tokens:
            self.chunks, self.num_tokens = [prefix], prefix.num_tokens

    def forget_response(self) -> None:
        """What is known of it here is of no use any more."""
        self.chunks, self.num_tokens = [], 0

    def catch_up(self, attempt: int) -> None:
        """Somebody knows of this attempt, which may be later than ours; then ours may have had other tokens."""
        if attempt > self.attempt:
            self.num_vanished += attempt - self.attempt
            self.attempt, self.num_seen, self.running_since = attempt, 0, None
            self.forget_response()

    def prefix(self) -> Part | None:
        """What is known of the response so far, as one part."""
        if not self.chunks:
            return None
        if len(self.chunks) > 1:
            self.chunks = [join(self.chunks)]
        return self.chunks[0]


class LeasedGroup(msgspec.Struct):
    """One granted group and its leases."""

    group_id: int
    ordinal: int
    min_version: int
    deadline_version: int
    prompt: Prompt | None = None
    engine: str = ""
    """Where its samples go, so that they share the cache of their prompt."""
    leases: dict[int, Lease] = {}


class EngineView(msgspec.Struct):
    """One engine as PromptSource sees it."""

    name: str
    epoch: int
    num_slots: int = 0
    """0 until it is ready."""
    version: int = -1
    load: int = 0
    progressed: int = 0
    """Sweep in which it was last heard to have made a token, or an end of one of its requests."""
    entry: int = 0
    """Number of its valid entry in the heap of engines with room."""

    @property
    def has_room(self) -> bool:
        """Whether more may be sent; a short queue keeps its slots busy, a long one would only bind samples early."""
        return self.num_slots > 0 and self.load < self.num_slots + max(8, self.num_slots // 4)


class LeaseTable:
    """Groups, leases and the load of engines."""

    def __init__(self) -> None:
        self.groups: dict[int, LeasedGroup] = {}
        self.engines: dict[str, EngineView] = {}
        self._by_load: list[tuple[float, str, int]] = []
        """Heap of (share of its slots that is taken, name, number of the entry), with entries that are out of date."""
        self._num_entries = 0

    def lease(self, key: SampleKey) -> Lease | None:
        """The lease of a sample, if it is out."""
        group = self.groups.get(key.group_id)
        return None if group is None else group.leases.get(key.index)

    def all_leases(self) -> Iterator[tuple[LeasedGroup, Lease]]:
        """Every lease, in the order of the groups' issue."""
        for group in self.groups.values():
            for lease in group.leases.values():
                yield group, lease

    def move(self, lease: Lease, state: LeaseState, engine: str = "") -> None:
        """The only way in which a lease changes its state."""
        if lease.state is LeaseState.ISSUED and (view := self.engines.get(lease.engine)) is not None:
            view.load -= 1
            self._note_room(view)
        lease.state, lease.engine = state, engine
        if state is LeaseState.ISSUED and (view := self.engines.get(engine)) is not None:
            view.load += 1
            self._note_room(view)

    def _note_room(self, view: EngineView) -> None:
        self._num_entries = view.entry = self._num_entries + 1
        if view.has_room:
            heapq.heappush(self._by_load, (view.load / view.num_slots, view.name, view.entry))
        if len(self._by_load) > 64 + 4 * len(self.engines):
            self._by_load = [entry for entry in self._by_load if self._is_valid(entry)]
            heapq.heapify(self._by_load)

    def _is_valid(self, entry: tuple[float, str, int]) -> bool:
        view = self.engines.get(entry[1])
        return view is not None and view.entry == entry[2]

    def least_loaded(self) -> EngineView | None:
        """Of the engines with room."""
        while self._by_load:
            if self._is_valid(self._by_load[0]):
                return self.engines[self._by_load[0][1]]
            heapq.heappop(self._by_load)
        return None

    def forget(self, group_ids: Iterable[int]) -> None:
        """These groups are settled."""
        for group_id in group_ids:
            group = self.groups.pop(group_id)
            for lease in group.leases.values():
                self.move(lease, LeaseState.LEFT)

    def join_engine(self, name: str, epoch: int) -> None:
        """A new incarnation of an engine. What was on the old one stays in its load until a census moves it."""
        load = sum(1 for _, lease in self.all_leases() if lease.engine == name)
        self.engines[name] = EngineView(name, epoch, load=load)

    def engine_ready(self, name: str, epoch: int, num_slots: int, sweep: int) -> None:
        """This incarnation takes requests."""
        view = self.engines.get(name)
        if view is not None and view.epoch == epoch:
            view.num_slots, view.progressed = num_slots, sweep
            self._note_room(view)

    def lose_engine(self, name: str) -> None:
        """An engine is gone. Its leases stay ISSUED until a census has said what became of them."""
        self.engines.pop(name, None)
        for group in self.groups.values():
            if group.engine == name:
                group.engine = ""

    def engine_progressed(self, name: str, sweep: int) -> None:
        """Something has come of what this engine does."""
        view = self.engines.get(name)
        if view is not None:
            view.progressed = sweep

    def choose_engine(self, group: LeasedGroup, avoids: str = "") -> EngineView | None:
        """The group's own engine while it has room; otherwise the least loaded that serves the version, or will. One on
        which the sample stood still is taken only when no other has room."""
        own = self.engines.get(group.engine)
        if own is not None and own.has_room and own.name != avoids:
            return own
        first = self.least_loaded()
        if first is None or (first.version >= group.min_version and first.name != avoids):
            return first
        others = [view for view in self.engines.values() if view.has_room and view.name != avoids]
        serving = [view for view in others if view.version >= group.min_version]
        return min(serving or others, key=lambda view: (view.load / view.num_slots, view.name), default=first)

    def validate(self) -> None:
        """Assert the invariants."""
        loads = dict.fromkeys(self.engines, 0)
        for _, lease in self.all_leases():
            assert (lease.state is LeaseState.ISSUED) == bool(lease.engine), lease
            if lease.engine in loads:
                loads[lease.engine] += 1
        assert loads == {name: view.load for name, view in self.engines.items()}, loads
        valid = [entry for entry in self._by_load if self._is_valid(entry)]
        with_room = [view for view in self.engines.values() if view.has_room]
        assert sorted(valid) == sorted((view.load / view.num_slots, view.name, view.entry) for view in with_room)
