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
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.messages.samples import Purpose, SampleKey

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.actors.prompt_source.routing import EngineView

KINDS: Final = (False, True)
"""Kinds of engine: whether they know the rows and answer from them."""
PURPOSES: Final = tuple(Purpose)


class Queues:
    """All that wait."""

    def __init__(self, max_evaluating: int) -> None:
        self._max_evaluating = max_evaluating
        self._num_guaranteed = max(1, max_evaluating // 4)
        self._queues = {(kind, purpose): deque[SampleKey]() for kind in KINDS for purpose in PURPOSES}
        self._of_kind = {kind: tuple(self._queues[kind, purpose] for purpose in PURPOSES) for kind in KINDS}

    def of(self, purpose: Purpose, *, is_recorded: bool) -> deque[SampleKey]:
        """One of the queues. It may hold keys that have been issued or settled since."""
        return self._queues[is_recorded, purpose]

    def has_any(self, *, is_recorded: bool) -> bool:
        """Whether there is a key in a queue for engines of this kind."""
        return any(self._of_kind[is_recorded])

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
        may_evaluate = Purpose.EVALUATE in waiting and Purpose.EVALUATE not in stuck
        if may_evaluate and num_evaluating < self._num_guaranteed:
            return Purpose.EVALUATE
        if Purpose.TRAIN in waiting:
            return None if Purpose.TRAIN in stuck else Purpose.TRAIN
        if may_evaluate and (num_evaluating < self._max_evaluating or not has_training):
            return Purpose.EVALUATE
        return None

    def suits(self, view: EngineView, purpose: Purpose, *, num_evaluating: int, has_training: bool) -> bool:
        """Whether a sample of this purpose may be sent to this engine, which has room."""
        is_guaranteed = purpose is Purpose.TRAIN or num_evaluating < self._num_guaranteed
        return is_guaranteed or view.has_free_slot or not has_training
