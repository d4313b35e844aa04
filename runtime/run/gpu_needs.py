"""Who asks for how many GPUs, and what a cluster has. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.backends.engines.spec import EngineSize
from penstock.backends.learners.spec import LEARNERS

if TYPE_CHECKING:
    from penstock.backends.learners.options import LearnerOptions


class NodeGpus(NamedTuple):
    """One node of the cluster."""

    node_id: str
    num_gpus: int
    """GPUs of the node that nobody else has taken."""


class Need(NamedTuple):
    """Actors that are alike, and the GPUs that each of them asks for."""

    names: tuple[str, ...]
    size: EngineSize
    key: str
    """Of the block of the scenario that they come from."""
    may_share: bool
    """Whether several may be put on one GPU where there are not enough: true of what runs inside our own process."""
    is_optional: bool
    """Whether they run without where the cluster has no GPU at all."""


class Wish(NamedTuple):
    """A block that has no place yet."""

    members: tuple[str, ...]
    size: EngineSize
    engine_gpus: tuple[int, ...] = ()


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
