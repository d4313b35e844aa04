"""The samples that are out, and the engines that they are on.

A lease is QUEUED (waits for an engine), ISSUED (at an engine), LEFT (its engine is done with it: it is on its way
through Scorer and Filter) or FAILED (given up, ``SampleFailed`` is on its way). It ends when its group is settled.

Invariants:

* The load of an engine is the number of leases ISSUED to it; those of an incarnation that was lost count until a
  census has said what became of them.
* A lease that is ISSUED names an engine; any other names none.
* Groups of an evaluation are counted, and those of their leases that are ISSUED.
* A group whose row holds its responses has leases on engines that know the rows only, any other on none of them.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.actors.prompt_source.policies import RoutedSample
from penstock.actors.prompt_source.routing import Cache, comes_in_time
from penstock.messages.evaluation import EvaluatedPlace
from penstock.messages.parts import cut, join
from penstock.messages.samples import Part, Prompt, Purpose, SampleKey, is_evaluation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.actors.prompt_source.pools import EnginePools
    from penstock.actors.prompt_source.routing import EngineView


class LeaseState(Enum):
    """Where a sample is, as far as PromptSource knows."""

    QUEUED = "queued"
    ISSUED = "issued"
    LEFT = "left"
    FAILED = "failed"


QUEUED: Final = LeaseState.QUEUED
ISSUED: Final = LeaseState.ISSUED
"""See :data:`penstock.messages.base.LOSSY`."""
_TRAIN: Final = Purpose.TRAIN


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
    num_at_issue: int = 0
    """Tokens that the current attempt began with."""
    running_since: int | None = None
    """Sweep in which a census first found it running with ``num_seen`` tokens."""
    avoids: str = ""
    """The engine on which it stood still, or failed without having made a token."""
    cache: Cache | None = None
    """Where an attempt that did not end there has made tokens."""
    chunks: list[Part] = []
    num_tokens: int = 0
    """In ``chunks``."""

    def add_progress(self, from_token: int, chunk: Part) -> None:
        """Take over a report. One that does not follow what is there is left out: the prefix just stays shorter."""
        if from_token == self.num_tokens and (chunk.num_tokens or chunk.save_point is not None):
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

    def back_to_save_point(self) -> None:
        """Of what is known of an episode, only what stands before its last save point is of use elsewhere."""
        known = self.prefix()
        if known is None or known.save_point is None or known.save_point.num_tokens > known.num_tokens:
            self.forget_response()
            return
        self.num_tokens = known.save_point.num_tokens
        self.chunks = [cut(known, 0, self.num_tokens)]

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
    """The engine that the last of its samples was sent to."""
    leases: dict[int, Lease] = {}
    place: EvaluatedPlace | None = None
    """What it is drawn for, in an evaluation; None: it is trained."""

    @property
    def purpose(self) -> Purpose:
        return _TRAIN if self.place is None else Purpose.EVALUATE

    def num_retries(self, usual: int) -> int:
        """Attempts of each of its samples that may fail, before the last one: what its row says, else the usual."""
        own = None if self.prompt is None else self.prompt.num_retries
        return usual if own is None else own


class LeaseTable:
    """Groups and leases, and through them the load of engines."""

    def __init__(self, router: EnginePools) -> None:
        self.groups: dict[int, LeasedGroup] = {}
        self.router = router
        self.num_evaluating = 0
        """Samples of an evaluation that are ISSUED."""
        self._num_evaluation_groups = 0

    def add_evaluation(self, group: LeasedGroup) -> None:
        """A group of an evaluation enters."""
        assert group.place is not None
        self.groups[group.group_id] = group
        self._num_evaluation_groups += 1

    @property
    def has_training(self) -> bool:
        """Whether any group here is to be trained."""
        return len(self.groups) > self._num_evaluation_groups

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
        was_issued, is_issued = lease.state is ISSUED, state is ISSUED
        if was_issued:
            self.router.load(lease.engine, -1)
        lease.state, lease.engine = state, engine
        if is_issued:
            self.router.load(engine, 1)
        if is_evaluation(lease.key.group_id):
            self.num_evaluating += is_issued - was_issued

    def forget(self, group_ids: Iterable[int]) -> None:
        """These groups are settled."""
        for group_id in group_ids:
            group = self.groups.pop(group_id)
            self._num_evaluation_groups -= group.place is not None
            for lease in group.leases.values():
                if lease.state is ISSUED:
                    self.move(lease, LeaseState.LEFT)

    def join_engine(self, name: str, epoch: int) -> None:
        """A new incarnation of an engine. What was on the old one stays in its load until a census moves it."""
        self.router.join(name, epoch, self.router.load_at(name))

    def lose_engine(self, name: str) -> None:
        """An engine is gone. Its leases stay ISSUED until a census has said what became of them."""
        self.router.lose(name)
        self._part_from(name)

    def retire_engine(self, name: str) -> None:
        """An engine is to leave. Its leases stay ISSUED until it has handed them back."""
        self.router.retire(name)
        self._part_from(name)

    def _part_from(self, name: str) -> None:
        for group in self.groups.values():
            if group.engine == name:
                group.engine = ""

    def note_cache(self, lease: Lease) -> None:
        """Its engine, if it still lives, has made tokens of it that the next attempt goes on from."""
        view = self.router.engines.get(lease.engine)
        if view is not None:
            lease.cache = Cache(view.name, view.epoch)

    def is_held(self, group_id: int) -> bool:
        """Whether this group has an engine that its samples go to."""
        return bool(self.groups[group_id].engine)

    def choose_engine(self, group: LeasedGroup, lease: Lease, *, num_waiting: int) -> EngineView | None:
        """Where this sample, whose prompt is read, goes next; None while it has to wait, as ``num_waiting`` do."""
        assert group.prompt is not None
        return self.router.choose(
            _routed(group, lease),
            is_recorded=group.prompt.is_recorded,
            avoids=lease.avoids,
            cache=lease.cache,
            num_waiting=num_waiting,
        )

    def suits(self, view: EngineView, group: LeasedGroup, lease: Lease, *, instead_of: LeasedGroup) -> bool:
        """Whether this sample may take the place of one of another group at this engine: it waits for weights there
        only where that would have."""
        if view.version >= group.min_version:
            return True
        return view.version < instead_of.min_version and comes_in_time(view.lag, _routed(group, lease))

    def validate(self) -> None:
        """Assert the invariants."""
        num_groups = num_evaluating = 0
        loads = dict.fromkeys(self.router.engines, 0)
        for group_id, group in self.groups.items():
            is_evaluated = group.place is not None
            assert is_evaluation(group_id) == is_evaluated
            num_groups += is_evaluated
            for lease in group.leases.values():
                is_issued = lease.state is LeaseState.ISSUED
                assert is_issued == bool(lease.engine), lease
                num_evaluating += is_evaluated and is_issued
                if lease.engine:
                    loads[lease.engine] = loads.get(lease.engine, 0) + 1
        assert num_groups == self._num_evaluation_groups
        assert num_evaluating == self.num_evaluating
        assert all(self.router.load_at(name) == load for name, load in loads.items()), loads
        self.router.validate(loads)


def _routed(group: LeasedGroup, lease: Lease) -> RoutedSample:
    """What decides where a sample goes whose prompt is read."""
    assert group.prompt is not None
    return RoutedSample(
        group_id=lease.key.group_id,
        index=lease.key.index,
        row=group.prompt.row,
        num_prompt_tokens=len(group.prompt.tokens) // 4,
        min_version=group.min_version,
        deadline_version=group.deadline_version,
        group_engine=group.engine,
    )
