"""What the Megatron learner does where memory does not suffice for a micro-batch: smaller ones, on all ranks together.

Invariants:

* Every rank halves, or none does, and the result is that of smaller micro-batches.
* Where a micro-batch asks nothing of other ranks (data parallelism alone), a step is tried anew: ranks agree at the end
  of each pass whether all had memory enough, and what was found until then is thrown away.
* With any other layout the other ranks wait for the failed one in the middle of a layer, with nothing that it could
  send them. So the learner ends there; half the size is written beside its checkpoints first, and the one that takes
  its place goes on from the last of these with that.
* What was written holds for the size that the scenario asks for: with another one it is not looked at.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.backends.durable import publish
from penstock.backends.learners.training.micro_batch_size import MicroBatchSize
from penstock.messages.base import UNREADABLE, Value

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.learners.megatron.layout.layout import Layout
    from penstock.backends.learners.megatron_options import MegatronOptions
    from penstock.backends.learners.options import LearnerOptions

FILE: Final = "micro_batch_tokens.json"
ADVICE: Final = (
    "lower learner.max_tokens_per_micro_batch or sampling.max_response_tokens, set learner.megatron.recompute: full, "
    "or divide the model over more ranks (tensor_parallel, pipeline_parallel, context_parallel)"
)
_log: Final = logging.getLogger(__name__)


class SmallerSize(Value, frozen=True, kw_only=True):
    """What a learner has found out."""

    asked_tokens: int
    max_tokens: int


def can_try_anew(layout: Layout, options: MegatronOptions) -> bool:
    """Whether a micro-batch asks nothing of other ranks, so that one may fail without leaving others in the middle."""
    divides = (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.expert_tensor)
    return set(divides) == {1} and not (options.overlap_grad_reduce or options.overlap_param_gather)


def known_size(options: LearnerOptions, folder: Path | None, *, is_speaker: bool) -> MicroBatchSize:
    """As the scenario asks for, or as an earlier learner of the run has found.

    Args:
        options: the ``learner:`` block.
        folder: of the run's checkpoints; None where there is none.
        is_speaker: whether this rank tells of changes.
    """
    size = MicroBatchSize(options.max_tokens_per_micro_batch, is_speaker=is_speaker, advice=ADVICE)
    try:
        found = None if folder is None else msgspec.json.decode((folder / FILE).read_bytes(), type=SmallerSize)
    except (FileNotFoundError, *UNREADABLE):
        return size
    if found is not None and found.asked_tokens == size.max_tokens:
        size.go_on_with(found.max_tokens)
    return size


def ended(size: MicroBatchSize, options: LearnerOptions, folder: Path | None, *, can_be_finer: bool) -> MemoryError:
    """The error that ends the learner, once half the size is written down for the next.

    Raises:
        MemoryError: there is nothing to divide.
    """
    before = size.max_tokens
    size.halve(can_be_finer=can_be_finer)
    if folder is None:
        return MemoryError(f"out of memory with micro-batches of at most {before} tokens; {ADVICE}")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{FILE}.{os.uname().nodename}.{os.getpid()}"
    found = SmallerSize(asked_tokens=options.max_tokens_per_micro_batch, max_tokens=size.max_tokens)
    partial.write_bytes(msgspec.json.encode(found))
    publish(partial, folder / FILE)
    _log.warning("out of memory with micro-batches of %d tokens: the next learner has %d", before, size.max_tokens)
    return MemoryError(
        f"out of memory with micro-batches of at most {before} tokens. Ranks of this layout cannot try a step anew, so "
        f"the learner goes on from its last checkpoint with {size.max_tokens}. To save the search {ADVICE}"
    )
