"""How many GPUs the ranks of a learner take, and over how many nodes these can lie. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.engines.spec import EngineSize
from penstock.backends.learners.spec import LEARNERS

if TYPE_CHECKING:
    from penstock.backends.learners.options import LearnerOptions


def learner_size(options: LearnerOptions, num_ranks: int | None = None) -> EngineSize:
    """GPUs of the learner's ranks, and over how many nodes they can lie: an equal number on each, and of the ranks that
    share a matrix, which say much to each other, all on one.

    Args:
        options: of the learner.
        num_ranks: None: theirs.
    """
    num_ranks = num_ranks or options.num_ranks
    together = LEARNERS.spec(options.backend).together(options)
    counts = [count for count in range(2, num_ranks // together + 1) if num_ranks % (count * together) == 0]
    return EngineSize(num_ranks, (1, *counts))
