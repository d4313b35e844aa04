"""Micro-batches one after the other, in step with the other ranks, and what happens when memory does not suffice.

Invariants:

* Each micro-batch is a slice of the tokens of its rank's :class:`.StepTokens`.
* One that stands in for nothing has the slice of no token. The model runs over a few tokens then, because it runs on
  the other ranks too, and what it says is cut away; what flows back is exactly 0.
* All ranks run equally many micro-batches in one call, and all raise :class:`OutOfMemoryError`, or none does.
* A rank that runs out of memory leaves no other waiting: it joins the collectives that are left of the micro-batch
  (:class:`.Collectives`), runs the rest of them over nothing, and what came of all that is thrown away by everybody.
* Where weights are divided, the first call of a kind runs over nothing once, on all ranks: what it asks of the others
  is then known, before it can fail.
* Under tensor parallelism ranks wait for each other within a block, which nobody can join from outside: one that runs
  out of memory ends the learner, with what to lower.

| wait | who ends it |
|---|---|
| at the end of a call, whether all had memory enough | the other ranks; at the latest the worker group's timeout |
"""

# torch.from_numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import torch

from penstock.backends.learners.batch.packing import PackedTokens, pack, stand_in
from penstock.backends.learners.batch.sequences import joined
from penstock.backends.learners.training.roles import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.torch.collectives import Collectives
    from penstock.backends.learners.worker_group.workers import WorkerGroup

ResultT = TypeVar("ResultT")


class MicroBatch(NamedTuple):
    """One that a rank runs."""

    packed: PackedTokens
    part: slice
    """Which of the rank's tokens of the step these are."""
    places: Tensor
    """Of its trained tokens among those of the batch, int64 ``[T]`` on the CPU."""

    @property
    def num_tokens(self) -> int:
        """That are trained."""
        return len(self.places)


def laid_out(parts: Sequence[Sequence[TrainSequence]], spare: TrainSequence) -> list[MicroBatch]:
    """The micro-batches of a rank, packed.

    Args:
        parts: their sequences; a part without any gets a stand-in.
        spare: what a stand-in is made of.
    """
    batches: list[MicroBatch] = []
    start = 0
    for part in parts:
        places = joined([sequence.places for sequence in part])
        end = start + len(places)
        packed = pack(part) if part else stand_in(spare)
        batches.append(MicroBatch(packed, slice(start, end), torch.from_numpy(places)))
        start = end
    return batches


def padding_micro_batch(spare: TrainSequence) -> MicroBatch:
    """A micro-batch of no token."""
    return laid_out([[]], spare)[0]


ADVICE: Final = (
    "lower sampling.max_response_tokens, set learner.activation_checkpointing: true, or divide the model over more "
    "GPUs: with learner.parallel: fsdp, a larger learner.num_ranks (and learner.shard_size, where it is set) divides "
    "weights and optimizer, learner.tensor_parallel what a micro-batch takes as well"
)


class Rounds:
    """Runs micro-batches."""

    def __init__(
        self,
        workers: WorkerGroup,
        collectives: Collectives,
        check_stop: Callable[[], None],
        *,
        can_recover: bool = True,
    ) -> None:
        """
        Args:
            workers: the ranks that run other micro-batches.
            collectives: of this rank.
            check_stop: called before each micro-batch; raises to end the step.
            can_recover: whether others can go on when this rank runs out of memory.
        """
        self._can_recover = can_recover
        self._workers = workers
        self._collectives = collectives
        self._check_stop = check_stop

    def run(
        self, kind: str, batches: Sequence[MicroBatch], spare: MicroBatch, work: Callable[[MicroBatch], ResultT]
    ) -> list[ResultT]:
        """What ``work`` makes of each micro-batch.

        Args:
            kind: the same for all work that asks the same of the other ranks.
            batches: equally many on each rank.
            spare: a micro-batch of no token.
            work: runs the models; whatever it adds up must not matter with ``spare``.

        Raises:
            OutOfMemoryError: on every rank, if one ran out.
            MemoryError: this one did, and the others cannot go on.
        """
        self._collectives.rehearse(kind, lambda: work(spare))
        results: list[ResultT] = []
        has_failed = False
        for batch in batches:
            self._check_stop()
            if not self._tried(kind, spare if has_failed else batch, work, results):
                has_failed = True
                results.clear()
                self._recover()
        if self._workers.agree(has_failed):
            raise OutOfMemoryError
        return results

    def _tried(
        self, kind: str, batch: MicroBatch, work: Callable[[MicroBatch], ResultT], results: list[ResultT]
    ) -> bool:
        """Whether there was memory enough. Whoever called has left the handler when it goes on, and with it every
        frame and tensor that the error held."""
        try:
            with self._collectives.following(kind):
                results.append(work(batch))
        except torch.OutOfMemoryError as error:
            if not self._can_recover:
                raise MemoryError(
                    f"out of memory with a micro-batch of {len(batch.packed.input_ids)} tokens, and with "
                    "learner.tensor_parallel above 1 it cannot be tried anew in parts; set a lower "
                    f"learner.max_tokens_per_micro_batch, or {ADVICE}"
                ) from error
            return False
        return True

    def _recover(self) -> None:
        if self._workers.device.type == "cuda":
            torch.cuda.empty_cache()
        self._collectives.finish()
