"""Samples that wait for an engine, and whose turn it is.

There is a queue for each kind of engine (those that generate, those that know the rows) and for each purpose. Training
goes first. Evaluation has what training leaves: slots that would be idle, up to ``max_evaluating`` samples at engines
while there is training; all of them while there is none (before the first grant, at the end, while a pinned evaluation
is waited for, in a run that only evaluates).

Invariants:

* A few samples of an evaluation, a quarter of ``max_evaluating`` and at least one, go before training: so an evaluation
  never starves, however busy the engines are.
* Beyond these no sample of an evaluation is sent to an engine that has no free slot while there is training: none
  queues there in front of training.
* While training waits for an engine, none beyond these goes to an engine that is to swap when the others do, which
  training is about to take; but to one whose weights come versions late, where training cannot go.
* A sample that has been at an engine goes before those that have not, and of a group they go in order.
* What an engine with old weights can still make goes there, where the first that waits needs newer ones.
* Where groups keep to engines (``prefix_affine``), the others of one that is begun wait for a slot there, and new
  groups are begun elsewhere meanwhile; but only until twice as many groups have been begun as there are engines, and
  not when that engine is gone. Otherwise the oldest group goes first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.messages.samples import Purpose, SampleKey

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from penstock.actors.prompt_source.routing import EngineView

KINDS: Final = (False, True)
"""Kinds of engine: whether they know the rows and answer from them."""
_TRAIN: Final = Purpose.TRAIN
_EVALUATE: Final = Purpose.EVALUATE
"""See :data:`penstock.messages.base.LOSSY`."""
MOST_BEGUN: Final = 2
"""Groups an engine that are begun while the rest of an older one waits for its own: at an equal pace it is one."""


class SampleQueue:
    """Samples of one purpose for one kind of engine. It may hold some that have been issued since."""

    def __init__(self, *, is_affine: bool, is_held: Callable[[int], bool]) -> None:
        """``is_held``: whether a group that is begun has an engine that it keeps to."""
        self._is_affine, self._is_held = is_affine, is_held
        self._again: deque[SampleKey] = deque()
        self._groups: dict[int, deque[int]] = {}
        """Indices that were never issued, by group, in the order in which these came."""
        self._new: dict[int, None] = {}
        """Groups that no engine has begun."""
        self._begun: dict[int, int] = {}
        """Of those with samples left, how many had been begun when they were."""
        self._num_begun = 0
        self.num_waiting = 0

    def append(self, key: SampleKey) -> None:
        """A sample that was never issued."""
        if key.group_id not in self._groups:
            self._groups[key.group_id] = deque()
            self._new[key.group_id] = None
        self._groups[key.group_id].append(key.index)
        self.num_waiting += 1

    def appendleft(self, key: SampleKey) -> None:
        """One that is issued again: its group is older than what was never issued."""
        self._again.appendleft(key)
        self.num_waiting += 1

    def head(self, num_engines: int) -> SampleKey | None:
        """Who is next, whatever the engine."""
        if self._again:
            return self._again[0]
        if not self._groups:
            return None
        group_id = next(iter(self._groups))
        if self._is_affine and self._new and self._waits_for_its_engine(group_id, num_engines):
            group_id = next(iter(self._new))
        return SampleKey(group_id, self._groups[group_id][0])

    def oldest(self) -> SampleKey | None:
        """Of those that were never issued, the first of the first group: none needs older weights."""
        if not self._groups:
            return None
        group_id = next(iter(self._groups))
        return SampleKey(group_id, self._groups[group_id][0])

    def _waits_for_its_engine(self, group_id: int, num_engines: int) -> bool:
        begun = self._begun.get(group_id)
        return begun is not None and self._num_begun - begun <= MOST_BEGUN * num_engines and self._is_held(group_id)

    def next_of(self, group_id: int | None) -> SampleKey | None:
        """The first of this group that was never issued."""
        if group_id is None or not self._is_affine or group_id not in self._groups:
            return None
        return SampleKey(group_id, self._groups[group_id][0])

    def begins_with(self, key: SampleKey) -> bool:
        """Whether this one is the next that is issued again."""
        return bool(self._again) and self._again[0] == key

    def remove(self, key: SampleKey) -> None:
        """One that ``head`` or ``next_of`` has named."""
        self.num_waiting -= 1
        if self.begins_with(key):
            self._again.popleft()
            return
        indices = self._groups[key.group_id]
        assert indices.popleft() == key.index
        if key.group_id in self._new:
            del self._new[key.group_id]
            self._num_begun += 1
            self._begun[key.group_id] = self._num_begun
        if not indices:
            del self._groups[key.group_id], self._begun[key.group_id]

    def forget(self, group_id: int) -> None:
        """This group is settled; what is issued again of it leaves when its turn comes."""
        self.num_waiting -= len(self._groups.pop(group_id, ()))
        self._new.pop(group_id, None)
        self._begun.pop(group_id, None)


class Queues:
    """All that wait."""

    def __init__(self, max_evaluating: int, *, is_affine: bool, is_held: Callable[[int], bool]) -> None:
        """See :class:`SampleQueue`."""
        self._max_evaluating = max_evaluating
        self._num_guaranteed = max(1, max_evaluating // 4)
        self._queues = {
            kind: {purpose: SampleQueue(is_affine=is_affine, is_held=is_held) for purpose in Purpose} for kind in KINDS
        }
        self._pairs = {kind: tuple(queues.values()) for kind, queues in self._queues.items()}

    def of(self, purpose: Purpose, *, is_recorded: bool) -> SampleQueue:
        """One of the queues."""
        return self._queues[is_recorded][purpose]

    def of_kind(self, *, is_recorded: bool) -> Mapping[Purpose, SampleQueue]:
        """Those for engines of this kind."""
        return self._queues[is_recorded]

    def num_waiting(self, *, is_recorded: bool) -> int:
        """Samples in the queues for engines of this kind."""
        train, evaluate = self._pairs[is_recorded]
        return train.num_waiting + evaluate.num_waiting

    def forget(self, group_ids: Iterable[int]) -> None:
        """These groups are settled."""
        for group_id in group_ids:
            for queues in self._queues.values():
                for queue in queues.values():
                    queue.forget(group_id)

    def turn(
        self, waiting: Collection[Purpose], stuck: Collection[Purpose], *, num_evaluating: int, has_training: bool
    ) -> Purpose | None:
        """Whose turn it is.

        Args:
            waiting: purposes of which a sample waits for an engine of one kind.
            stuck: those of them for which no engine of the kind is right just now.
            num_evaluating: samples of an evaluation that are at engines.
            has_training: whether any group of training is out.
        """
        may_evaluate = _EVALUATE in waiting and _EVALUATE not in stuck
        if may_evaluate and num_evaluating < self._num_guaranteed:
            return _EVALUATE
        if _TRAIN in waiting and _TRAIN not in stuck:
            return _TRAIN
        if may_evaluate and (num_evaluating < self._max_evaluating or not has_training):
            return _EVALUATE
        return None

    def suits(
        self, view: EngineView, purpose: Purpose, stuck: Collection[Purpose], *, num_evaluating: int, has_training: bool
    ) -> bool:
        """Whether a sample of this purpose may be sent to this engine, which has room; see :meth:`turn`."""
        if purpose is _TRAIN or num_evaluating < self._num_guaranteed or not has_training:
            return True
        return view.has_free_slot and (view.lag > 0 or _TRAIN not in stuck)
