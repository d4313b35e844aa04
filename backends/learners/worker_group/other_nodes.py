"""The nodes of a worker group but the Learner's, and the ranks there, as the Learner's process sees them.

```
Learner's process ── ZMQ ──► launcher of node 1 ─┬─ guardian ─ rank 4
                 └── ZMQ ──► launcher of node 2  └─ guardian ─ rank 5 …
```

Invariants:

* A node is lost when its line has closed or is silent for too long, when its launcher has ended, or says that it
  cannot take part. A lost node is not found again; ``lost`` tells the story from then on.
* Only a process that has the keys of this worker group is taken for a launcher. They are made here, for this one alone.
* What is said to ranks travels to each of their nodes once.

| wait | who ends it |
|---|---|
| for a launcher to come | its host, which tells its end; the deadline of the ranks' start |
| for word of a node | the node, every moment; at the latest ``LINK_TIMEOUT_S`` |
| ``kill`` | the hosts of the nodes; at the latest its timeout |
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

from penstock.backends.learners.worker_group.node_line import LineClosedError, LinesToNodes
from penstock.backends.learners.worker_group.node_starter import NodeStarter
from penstock.backends.learners.worker_group.node_words import (
    NodeCame,
    NodeFailed,
    RankSaid,
    RankShown,
    StartRanks,
    ToRanks,
    decode_word_of_node,
    encode_node_word,
)
from penstock.backends.learners.worker_group.remote_node import Node, RemoteRank
from penstock.backends.learners.worker_group.words import RankFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.backends.learners.worker_group.node_words import WordOfNode
    from penstock.backends.learners.worker_group.rank_set import RankSet
    from penstock.backends.learners.worker_group.rank_view import RankView
    from penstock.backends.learners.worker_group.remote_node import LostNode
    from penstock.backends.learners.worker_group.words import RankWord
    from penstock.backends.processes.remote_ranks import RankEnded, RemoteRanks

NODE_MODULE: Final = "penstock.backends.learners.worker_group.node_main"
KEYS_VARIABLE: Final = "PENSTOCK_WORKER_GROUP_KEYS"
"""In the environment of a node's launcher, which takes it out before it starts anything."""
LINK_TIMEOUT_S = 60.0
"""For a line to be silent, unless ``rank_timeout_s`` is shorter."""


class FurtherNodes(NamedTuple):
    """Where ranks run beside the Learner's node."""

    hosts: RemoteRanks
    log_path: Callable[[int], Path]
    """Where the launcher of a node writes its output."""


class OtherNodes:
    """All of them. One thread uses it."""

    def __init__(self, further: FurtherNodes, local: RankSet, *, rank_timeout_s: float) -> None:
        """Nothing runs yet.

        Args:
            further: where they are.
            local: the ranks of this node, whose ``listen`` serves the lines as well.
            rank_timeout_s: ``learner.rank_timeout_s``.
        """
        self._further = further
        self._local = local
        self._timeout_s = min(LINK_TIMEOUT_S, rank_timeout_s)
        self.own_host: Final = further.hosts.host
        self.nodes: list[Node] = []
        self.heard: list[tuple[RankView, RankWord]] = []
        """For whoever takes it."""
        self._ends: deque[RankEnded] = deque()
        self._lines: LinesToNodes | None = None
        self._starter: NodeStarter | None = None
        self._mark: Path | None = None

    def launch(
        self, numbers: range, log_path: Callable[[int], Path], *, model_folder: str, run_folder: Path
    ) -> list[RankView]:
        """Start these ranks, an equal number on each node; they come later.

        Args:
            numbers: of the ranks.
            log_path: of each.
            model_folder: has to be on every node.
            run_folder: has to be the same on every node.
        """
        num_nodes = self._further.hosts.num_nodes - 1
        per_node = len(numbers) // num_nodes
        assert per_node * num_nodes == len(numbers), "ranks are divided evenly over the nodes"
        self._mark = run_folder / f".worker-group-{secrets.token_hex(8)}"
        run_folder.mkdir(parents=True, exist_ok=True)
        self._mark.touch()
        self._order = partial(StartRanks, model_folder=model_folder, mark_path=str(self._mark))
        self._lines = LinesToNodes(self.own_host, self._timeout_s)
        self._starter = NodeStarter(self._further.hosts, self._on_end)
        now_s = time.monotonic()
        for number in range(num_nodes):
            ranks = [RemoteRank(rank, log_path(rank)) for rank in numbers[number * per_node : (number + 1) * per_node]]
            self._start(number + 1, ranks, self._lines, self._starter)
            for rank in ranks:
                rank.heard_s = now_s
        return [rank for node in self.nodes for rank in node.ranks]

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Of the worker group's nodes, the Learner's first; None while not all have come."""
        hosts = tuple(node.host for node in self.nodes)
        return (self.own_host, *hosts) if all(hosts) else None

    def tend(self) -> None:
        """Every moment: take what was told of ends, and see which lines are down."""
        while self._ends:
            end = self._ends.popleft()
            node = self.nodes[end.rank - 1]
            node.end = node.end or end
        for node in self.nodes:
            if node.host and not node.line.is_up:
                node.cut = node.cut or str(node.line.closed())

    def say(self, data: bytes, ranks: Sequence[RankView] | None) -> None:
        """A word, encoded, to all ranks, or to those of these that are on other nodes."""
        everywhere = encode_node_word(ToRanks((), data)) if ranks is None else b""
        for node in self.nodes:
            if ranks is None:
                self._send(node, everywhere)
            elif mine := tuple(rank.rank for rank in ranks if rank in node.ranks):
                self._send(node, encode_node_word(ToRanks(mine, data)))

    def lost(self) -> LostNode | None:
        """The first node that can no longer take part; one that can say why before others."""
        found = [(node, lost) for node in self.nodes if (lost := node.lost) is not None]
        found.sort(key=lambda one: (one[0].failure is None, one[0].end is None))
        return found[0][1] if found else None

    def order_end(self) -> None:
        """Have every launcher end its ranks, and itself."""
        if self._lines is not None:
            self._lines.close()

    def await_end(self, timeout_s: float) -> None:
        """Until nothing of them is left; their hosts end what does not end by itself."""
        if self._starter is not None:
            self._starter.stop(timeout_s)
        self._take_mark_away()

    # --- lines --------------------------------------------------------------------------------------------------

    def _start(self, number: int, ranks: list[RemoteRank], lines: LinesToNodes, starter: NodeStarter) -> None:
        line, invitation = lines.open()
        self.nodes.append(node := Node(number, ranks, line))
        self._local.watch(line.socket, partial(self._serve, node))
        command = (sys.executable, "-P", "-m", NODE_MODULE, invitation.endpoint, str(self._timeout_s))
        # As for the ranks of this node: modules are found where this process finds them.
        environment = {
            KEYS_VARIABLE: invitation.secret,
            "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
        }
        starter.start(number, command, environment, str(self._further.log_path(number)))

    def _on_end(self, end: RankEnded) -> None:
        """On another thread."""
        self._ends.append(end)
        self._local.wake()

    def _send(self, node: Node, data: bytes) -> None:
        if node.host:  # else it has not come, and nobody has anything to say to its ranks
            with contextlib.suppress(LineClosedError):  # which is noticed by ``tend``
                node.line.send(data)

    def _serve(self, node: Node) -> None:
        try:
            for data in node.line.receive():
                self._hear(node, decode_word_of_node(data))
        except LineClosedError as error:
            node.cut = str(error)

    def _hear(self, node: Node, word: WordOfNode) -> None:
        first = node.ranks[0].rank
        match word:
            case NodeCame():
                for rank in node.ranks:
                    rank.host = node.host
                logs = tuple(str(rank.log_path) for rank in node.ranks)
                self._send(node, encode_node_word(self._order(first_rank=first, log_paths=logs)))
            case RankSaid(number, said):
                self._hear_rank(node.ranks[number - first], said)
            case RankShown(rank=number):
                node.ranks[number - first].show(word)
                if all(rank.pid for other in self.nodes for rank in other.ranks):
                    self._take_mark_away()
            case NodeFailed():
                node.failure = word
            case _:
                assert_never(word)

    def _take_mark_away(self) -> None:
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)
            self._mark = None

    def _hear_rank(self, rank: RemoteRank, word: RankWord) -> None:
        rank.heard_s = time.monotonic()
        if isinstance(word, RankFailed):
            rank.failure = word
        self.heard.append((rank, word))
