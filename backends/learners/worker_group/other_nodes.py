"""The nodes of a worker group but the Learner's, and the ranks there, as the Learner's process sees them.

```
Learner's process ── TCP ──► launcher of node 1 ─┬─ guardian ─ rank 4
                 └── TCP ──► launcher of node 2  └─ guardian ─ rank 5 …
```

Invariants:

* A node is lost when its line has closed or is silent for too long, when its launcher has ended, or says that it
  cannot take part. A lost node is not found again; ``lost`` tells the story from then on.
* Only a process that has the secret of this worker group is taken for a launcher. It is made here, for this one
  alone.
* What is said to ranks travels to each of their nodes once.

| wait | who ends it |
|---|---|
| for a launcher to come | its host, which tells its end; the deadline of the ranks' start |
| for word of a node | the node, every moment; at the latest ``link_timeout_s`` |
| ``kill`` | the hosts of the nodes; at the latest its timeout |
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

from penstock.backends.learners.worker_group.node_line import LineClosedError, NodeLine
from penstock.backends.learners.worker_group.node_starter import NodeStarter
from penstock.backends.learners.worker_group.node_words import (
    LauncherLives,
    NodeCame,
    NodeFailed,
    NodeLives,
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

    from penstock.backends.learners.worker_group.rank_set import RankSet
    from penstock.backends.learners.worker_group.rank_view import RankView
    from penstock.backends.learners.worker_group.remote_node import LostNode
    from penstock.backends.learners.worker_group.words import RankWord
    from penstock.backends.processes.remote_ranks import RankEnded, RemoteRanks

NODE_MODULE: Final = "penstock.backends.learners.worker_group.node_main"
SECRET_VARIABLE: Final = "PENSTOCK_GANG_SECRET"
"""In the environment of a node's launcher, which takes it out before it starts anything."""
LINK_TIMEOUT_S = 60.0
"""For a line to be silent, unless ``rank_timeout_s`` is shorter."""
BEAT_S: Final = 0.5
MAX_STRANGERS: Final = 64


class FurtherNodes(NamedTuple):
    """Where ranks run beside the Learner's node."""

    hosts: RemoteRanks
    log_path: Callable[[int], Path]
    """Of a node's launcher."""


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
        self.timeout_s = min(LINK_TIMEOUT_S, rank_timeout_s)
        self.own_host: Final = further.hosts.host
        self.nodes: list[Node] = []
        self.heard: list[tuple[RankView, RankWord]] = []
        """For whoever takes it."""
        self._ends: deque[RankEnded] = deque()
        self._secret = secrets.token_bytes(32)
        self._strangers: list[NodeLine] = []
        self._listener: socket.socket | None = None
        self._starter: NodeStarter | None = None
        self._mark: Path | None = None
        self._said_s = 0.0

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
        now_s = time.monotonic()
        for number in range(num_nodes):
            mine = numbers[number * per_node : (number + 1) * per_node]
            self.nodes.append(Node(number + 1, [RemoteRank(rank, log_path(rank)) for rank in mine]))
        self._mark = run_folder / f".worker-group-{secrets.token_hex(8)}"
        run_folder.mkdir(parents=True, exist_ok=True)
        self._mark.touch()
        self._order = partial(
            StartRanks, model_folder=model_folder, mark_path=str(self._mark), link_timeout_s=self.timeout_s
        )
        self._listen()
        self._start_launchers()
        for rank in (found := [rank for node in self.nodes for rank in node.ranks]):
            rank.heard_s = now_s
        return list["RankView"](found)

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Of the worker group's nodes, the Learner's first; None while not all have come."""
        hosts = tuple(node.host for node in self.nodes)
        return (self.own_host, *hosts) if all(hosts) else None

    def tend(self) -> None:
        """Every moment: take what was told of ends, and say that this process lives."""
        while self._ends:
            end = self._ends.popleft()
            node = self.nodes[end.rank - 1]
            node.end = node.end or end
        now_s = time.monotonic()
        if now_s - self._said_s > BEAT_S:
            self._said_s = now_s
            beat = encode_node_word(LauncherLives())
            for node in self.nodes:
                self._send(node, beat)

    def say(self, data: bytes, ranks: Sequence[RankView] | None) -> None:
        """A word, encoded, to all ranks, or to those of these that are on other nodes."""
        everywhere = encode_node_word(ToRanks((), data)) if ranks is None else b""
        for node in self.nodes:
            if ranks is None:
                self._send(node, everywhere)
            elif mine := tuple(rank.rank for rank in ranks if rank in node.ranks):
                self._send(node, encode_node_word(ToRanks(mine, data)))

    def lost(self, now_s: float) -> LostNode | None:
        """The first node that can no longer take part; one that can say why before others."""
        found = [(node, lost) for node in self.nodes if (lost := node.lost(now_s, self.timeout_s)) is not None]
        found.sort(key=lambda one: (one[0].failure is None, one[0].end is None))
        return found[0][1] if found else None

    def grant_a_fresh_period(self, now_s: float) -> None:
        """This process was stopped itself, so it knows nothing about how long others were silent."""
        for node in self.nodes:
            if node.line is not None:
                node.line.heard_s = now_s

    def order_end(self) -> None:
        """Have every launcher end its ranks, and itself."""
        self._let_no_more_in()
        for node in self.nodes:
            if node.line is not None:
                self._local.unwatch(node.line)
                node.line.close()
                node.line = None

    def await_end(self, timeout_s: float) -> None:
        """Until nothing of them is left; their hosts end what does not end by itself."""
        if self._starter is not None:
            self._starter.stop(timeout_s)
        self._take_mark_away()

    # --- lines --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        family = socket.AF_INET6 if ":" in self.own_host else socket.AF_INET
        self._listener = socket.create_server((self.own_host, 0), family=family, backlog=MAX_STRANGERS)
        self._listener.setblocking(False)
        self._local.watch(self._listener, self._accept)

    def _start_launchers(self) -> None:
        assert self._listener is not None
        port = str(self._listener.getsockname()[1])
        self._starter = NodeStarter(self._further.hosts, self._on_end)
        # As for the ranks of this node: modules are found where this process finds them.
        environment = {
            SECRET_VARIABLE: self._secret.hex(),
            "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder),
        }
        for node in self.nodes:
            command = (sys.executable, "-P", "-m", NODE_MODULE, self.own_host, port, str(node.number))
            self._starter.start(node.number, command, environment, str(self._further.log_path(node.number)))

    def _on_end(self, end: RankEnded) -> None:
        """On another thread."""
        self._ends.append(end)
        self._local.wake()

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        if len(self._strangers) >= MAX_STRANGERS:
            connection.close()
            return
        line = NodeLine(connection, self._secret, is_launcher=True)
        self._strangers.append(line)
        self._local.watch(line, partial(self._meet, line), writes=True)

    def _meet(self, line: NodeLine) -> None:
        """The first frame of a line says whose it is, and proves it."""
        try:
            line.write()
            frames = line.read()
        except LineClosedError:
            self._turn_away(line)
            return
        self._local.watch(line, partial(self._meet, line), writes=line.wants_to_write)
        if not frames:
            return
        first = decode_word_of_node(frames[0])
        assert isinstance(first, NodeCame), "who has the secret keeps to the order of words"
        node = self.nodes[first.node - 1]
        self._strangers.remove(line)
        node.line, node.host = line, first.host
        for rank in node.ranks:
            rank.host = first.host
        numbers = node.ranks[0].rank, tuple(str(rank.log_path) for rank in node.ranks)
        self._send(node, encode_node_word(self._order(first_rank=numbers[0], log_paths=numbers[1])))
        self._hear(node, frames[1:])
        if all(other.host for other in self.nodes):
            self._let_no_more_in()

    def _turn_away(self, line: NodeLine) -> None:
        self._local.unwatch(line)
        self._strangers.remove(line)
        line.close()

    def _let_no_more_in(self) -> None:
        for line in list(self._strangers):
            self._turn_away(line)
        if self._listener is not None:
            self._local.unwatch(self._listener)
            self._listener.close()
            self._listener = None

    def _send(self, node: Node, data: bytes) -> None:
        if node.line is None:
            return  # it is lost, or has not come
        try:
            node.line.send(data)
        except LineClosedError as error:
            self._cut(node, error)
        else:
            self._watch(node)

    def _serve(self, node: Node) -> None:
        assert node.line is not None
        try:
            node.line.write()
            frames = node.line.read()
        except LineClosedError as error:
            self._cut(node, error)
        else:
            self._watch(node)
            self._hear(node, frames)

    def _watch(self, node: Node) -> None:
        assert node.line is not None
        self._local.watch(node.line, partial(self._serve, node), writes=node.line.wants_to_write)

    def _cut(self, node: Node, error: LineClosedError) -> None:
        assert node.line is not None
        line, node.line, node.cut = node.line, None, str(error)
        self._local.unwatch(line)
        with contextlib.suppress(LineClosedError):
            self._hear(node, line.read())  # its last words may have come before the end was noticed
        line.close()

    def _hear(self, node: Node, frames: Sequence[bytearray]) -> None:
        for frame in frames:
            match word := decode_word_of_node(frame):
                case RankSaid(number, said):
                    self._hear_rank(node.ranks[number - node.ranks[0].rank], said)
                case RankShown(rank=number):
                    node.ranks[number - node.ranks[0].rank].show(word)
                case NodeFailed():
                    node.failure = word
                case NodeLives() | NodeCame():
                    pass  # that something was heard stands in the line
                case _:
                    assert_never(word)
        if all(rank.pid for other in self.nodes for rank in other.ranks):
            self._take_mark_away()

    def _take_mark_away(self) -> None:
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)
            self._mark = None

    def _hear_rank(self, rank: RemoteRank, word: RankWord) -> None:
        rank.heard_s = time.monotonic()
        if isinstance(word, RankFailed):
            rank.failure = word
        self.heard.append((rank, word))
