"""The launcher on a further node of a worker group: ``python -m …worker_group.node_main ENDPOINT TIMEOUT_S``.

It starts the ranks of its node as the Learner's process starts those of its own, hands them what it is told, and tells
what they say.

Invariants:

* It has a line to the Learner's process, and keys, by environment, that prove who it is.
* When the line closes, or is silent for longer than ``TIMEOUT_S``, it ends its ranks and itself. When it ends in
  any way, the guardians of its ranks end them.
* What is for ranks is written once to memory that all of them map.

| wait | who ends it |
|---|---|
| for the line | the Learner's process; at the latest ``CONNECT_TIMEOUT_S`` |
| for the Learner's mark in the run's folder | the file system; at the latest ``SHARED_WAIT_S`` |
| for anything to happen | a rank, a guardian, the line; at the latest ``TICK_S`` |
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

from penstock.backends.learners.worker_group.node_line import Invitation, LineClosedError, line_to_launcher
from penstock.backends.learners.worker_group.node_words import (
    NodeCame,
    NodeFailed,
    RankSaid,
    RankShown,
    StartRanks,
    ToRanks,
    decode_order,
    encode_node_word,
)
from penstock.backends.learners.worker_group.other_nodes import KEYS_VARIABLE
from penstock.backends.learners.worker_group.rank_set import RankSet
from penstock.backends.learners.worker_group.settling import settle_in
from penstock.backends.learners.worker_group.words import FailureKind
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from penstock.backends.learners.worker_group.node_line import NodeLine
    from penstock.backends.learners.worker_group.node_words import NodeWord, OrderToNode
    from penstock.backends.learners.worker_group.rank_process import RankProcess

CONNECT_TIMEOUT_S: Final = 30.0
SHARED_WAIT_S: Final = 10.0
TICK_S: Final = 0.5
FAREWELL_S: Final = 2.0
END_TIMEOUT_S: Final = 10.0
FAILED: Final = 1

_log: Final = logging.getLogger(__name__)


class NodeLauncher:
    """The ranks of this node, and the line."""

    def __init__(self, line: NodeLine) -> None:
        """Asks what to start."""
        self._line = line
        self._set = RankSet()
        self._shown: dict[int, RankShown] = {}
        self._has_failed = False
        self._set.watch(line.socket, self._serve)
        self._say(NodeCame())

    def run(self) -> None:
        """Until the line ends; it raises what ends it otherwise.

        Raises:
            LineClosedError: the Learner's process is gone, or silent.
        """
        while self._line.is_up:
            for rank, word in self._set.listen(TICK_S):
                self._say(RankSaid(rank.rank, word))
            for rank in self._set.ranks:
                self._show(rank)
        raise self._line.closed()

    def fail(self, error: BaseException) -> None:
        """Say why this node cannot go on, if anybody listens."""
        is_users = isinstance(error, UserFault)
        story = str(error) if is_users else f"{type(error).__name__}: {error}"
        kind = FailureKind.USERS if is_users else FailureKind.CRASH
        deadline_s = time.monotonic() + FAREWELL_S
        self._has_failed = True
        try:
            self._say(NodeFailed(kind=kind, message=story))
            while self._line.is_up and time.monotonic() < deadline_s:
                self._set.listen(TICK_S)
        except LineClosedError:
            _log.info("the learner's process has closed the line")

    def end(self) -> None:
        """Every rank."""
        self._set.kill(END_TIMEOUT_S)
        self._line.socket.close()

    def _serve(self) -> None:
        for data in self._line.receive():
            if not self._has_failed:
                self._carry_out(decode_order(data))

    def _carry_out(self, order: OrderToNode) -> None:
        match order:
            case StartRanks():
                _check(order)
                numbers = range(order.first_rank, order.first_rank + len(order.log_paths))
                self._set.launch(numbers, lambda rank: Path(order.log_paths[rank - order.first_rank]))
                _log.info("starts the ranks %d to %d", numbers[0], numbers[-1])
            case ToRanks(ranks, data):
                self._set.say(data, [self._set.rank(rank) for rank in ranks] if ranks else self._set.ranks)
            case _:
                assert_never(order)

    def _show(self, rank: RankProcess) -> None:
        """Tell what is known of the rank's process, when it has changed."""
        is_stopped = rank.is_stopped
        is_wrong = rank.has_ended or is_stopped or rank.failure is not None
        shown = RankShown(
            rank=rank.rank,
            pid=rank.pid,
            exit_code=rank.exit_code,
            is_gone=rank.is_gone,
            is_stopped=is_stopped,
            lines=rank.tail if is_wrong else (),
        )
        if rank.pid and self._shown.get(rank.rank) != shown:
            self._shown[rank.rank] = shown
            self._say(shown)

    def _say(self, word: NodeWord) -> None:
        self._line.send(encode_node_word(word))


def _check(order: StartRanks) -> None:
    """Whether this node has what its ranks need.

    Raises:
        UserFault: it has not.
    """
    if not Path(order.model_folder).is_dir():
        raise UserFault(
            f"model.path: this node has no folder {order.model_folder}; ranks over several nodes each read the model: "
            "put it where all nodes have it under the same path"
        )
    deadline_s, mark = time.monotonic() + SHARED_WAIT_S, Path(order.mark_path)
    while not mark.exists():
        if time.monotonic() > deadline_s:
            raise UserFault(
                f"run.folder: {mark.parent} is not the folder of that name on the learner's node; ranks over several "
                "nodes write one checkpoint together: put it on a file system that all nodes share"
            )
        time.sleep(TICK_S)


def main() -> None:
    """See the module."""
    endpoint, timeout_s = sys.argv[1:]
    # Not for the ranks, which inherit this environment.
    invitation = Invitation(endpoint, os.environ.pop(KEYS_VARIABLE))
    settle_in()
    launcher = NodeLauncher(line_to_launcher(invitation, float(timeout_s), wait_s=CONNECT_TIMEOUT_S))
    try:
        launcher.run()
    except LineClosedError as error:
        _log.info("ends its ranks: %s", error)
    except BaseException as error:
        # The edge of the process: whatever it is, the Learner's process hears the story.
        traceback.print_exception(error)
        launcher.fail(error)
    finally:
        launcher.end()
    sys.exit(FAILED)


if __name__ == "__main__":
    main()
