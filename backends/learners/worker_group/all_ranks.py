"""All ranks of a worker group, on the Learner's node and on others: said to, listened to and ended as one.

A worker group on one node has no lines but those of :mod:`.rank_set`, no thread and no port.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.backends.learners.worker_group.other_nodes import OtherNodes
from penstock.backends.learners.worker_group.rank_process import RankProcess
from penstock.backends.learners.worker_group.rank_set import RankSet
from penstock.backends.learners.worker_group.words import LOOPBACK, encode_word

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.other_nodes import FurtherNodes
    from penstock.backends.learners.worker_group.rank_view import RankView
    from penstock.backends.learners.worker_group.remote_node import LostNode
    from penstock.backends.learners.worker_group.words import RankWord, Word


class AllRanks:
    """The ranks. One thread uses it, but for ``wake``."""

    def __init__(self, plan: LearnerPlan, further: FurtherNodes | None) -> None:
        """Nothing runs yet."""
        self._plan: Final = plan
        self._local = RankSet()
        timeout_s = plan.options.rank_timeout_s
        self._others = None if further is None else OtherNodes(further, self._local, rank_timeout_s=timeout_s)
        self._num_nodes = 1 if further is None else further.hosts.num_nodes
        self.ranks: list[RankView] = []
        """In order, the first being on this node."""

    def launch(self, log_path: Callable[[int], Path]) -> None:
        """Start all of them, an equal number on each node."""
        num_ranks = self._plan.options.num_ranks
        numbers = range(num_ranks)[: num_ranks // self._num_nodes]
        self._local.launch(numbers, log_path)
        self.ranks = [*self._local.ranks]
        if self._others is not None:
            self.ranks += self._others.launch(
                range(len(numbers), num_ranks),
                log_path,
                model_folder=self._plan.model_folder,
                run_folder=self._plan.run_folder,
            )

    @property
    def node_hosts(self) -> tuple[str, ...] | None:
        """Addresses of the nodes, this one's first; None while not all have come."""
        return (LOOPBACK,) if self._others is None else self._others.hosts

    def wake(self) -> None:
        """End the current or the next ``listen``; from any thread."""
        self._local.wake()

    def listen(self, timeout_s: float) -> list[tuple[RankView, RankWord]]:
        """Wait for something to happen; returns what ranks have said, in order."""
        heard = list[tuple["RankView", "RankWord"]](self._local.listen(timeout_s))
        if self._others is not None:
            self._others.tend()
            heard += self._others.heard
            self._others.heard = []
        return heard

    def say(self, word: Word, ranks: Sequence[RankView] | None = None) -> None:
        """To all, or to these; what has ended is noticed elsewhere.

        Raises:
            TimeoutError: a rank of this node does not read.
        """
        data = encode_word(word)
        named = self.ranks if ranks is None else ranks
        self._local.say(data, [rank for rank in named if isinstance(rank, RankProcess)])
        if self._others is not None:
            self._others.say(data, ranks)

    def lost(self) -> LostNode | None:
        """A node that can no longer take part."""
        return None if self._others is None else self._others.lost()

    def grant_a_fresh_period(self, now_s: float) -> None:
        """This process did not run for long, so it knows nothing about how long others were silent."""
        for rank in self.ranks:
            rank.heard_s = now_s

    def kill(self, timeout_s: float) -> None:
        """End every process, and remove what they met at."""
        if self._others is not None:
            self._others.order_end()
        self._local.kill(timeout_s)
        if self._others is not None:
            self._others.await_end(timeout_s)
