"""The process of one rank: ``python -m …worker_group.rank_main SOCKET RANK``, started by a guardian.

Invariants:

* The main thread carries out orders, one after the other. Another one reads the line, tells every ``TICK_S`` that the
  process lives, and shows figures that have changed.
* An error is told, with its traceback in the log, before the process ends with 1. When the line closes the process ends
  at once: whoever started it is gone.
* Only the first rank looks for the end within an order: the others may be in an exchange with it, and it leaves nobody
  that does not end anyway.
* The process leaves through ``os._exit``: what other libraries would do at the end may wait for ranks that are gone.

| wait | who ends it |
|---|---|
| for the first rank's store, for the other ranks | they come; at the latest ``start_timeout_s`` |
| main thread, for an order | the launcher; the guardian, when that has ended |
| for room in the line, to say something | the launcher reads; at the latest ``rank_timeout_s`` |
"""

from __future__ import annotations

import logging
import os
import pkgutil
import select
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NoReturn, assert_never

import torch
from torch._C._distributed_c10d import TCPStore

from penstock.backends.learners.worker_group.channel import Channel, ChannelClosedError
from penstock.backends.learners.worker_group.devices import choose_rank_device
from penstock.backends.learners.worker_group.failures import failure_of
from penstock.backends.learners.worker_group.interfaces import meet_over
from penstock.backends.learners.worker_group.settling import settle_in
from penstock.backends.learners.worker_group.words import (
    Answered,
    Finish,
    GaugesShown,
    Join,
    Order,
    OrderDone,
    RankCame,
    RankLives,
    RankReady,
    StoreAt,
    StoreOpened,
    decode_launcher_word,
    encode_word,
)
from penstock.backends.learners.worker_group.workers import join_workers

if TYPE_CHECKING:
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.words import LauncherWord, LearnerAnswer, Word
    from penstock.backends.learners.worker_group.worker import LearnerWorker, RankOpener, WorkerHost
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.messages.base import Metric

TICK_S: Final = 0.5
FAILED: Final = 1
ORPHANED: Final = 3


class _FinishedEarly(Exception):  # noqa: N818  # no error: the way out of a long order
    """Unwinds the first rank when the end comes within an order; never leaves ``run``."""


class Rank:
    """This process: the line to the launcher, and what the worker needs of it (see :class:`.WorkerHost`)."""

    def __init__(self, channel: Channel, rank: int) -> None:
        """Says that it has come, and is told what it is a part of."""
        self._channel = channel
        self._rank = rank
        self._inbox: SimpleQueue[LauncherWord] = SimpleQueue()
        self._finishes = threading.Event()
        self._gauges: tuple[Metric, ...] = ()
        self._shown: tuple[Metric, ...] = ()
        self._timeout_s = 60.0
        self.say(RankCame(rank))
        join = channel.receive(decode_launcher_word)
        assert isinstance(join, Join)
        self.join: Final = join
        self._timeout_s = join.timeout_s
        threading.Thread(target=self._read, name="rank-line", daemon=True).start()

    def run(self) -> None:
        """Until the end.

        Raises:
            Exception: it cannot go on.
        """
        workers = self._meet()
        worker = open_worker(self.join.plan, workers, self)
        self.say(RankReady(str(workers.device)))
        try:
            while True:
                match word := self._inbox.get():
                    case Order(number, command):
                        answer = worker.carry_out(command)
                        self._show_gauges()
                        self.say(OrderDone(number, answer if workers.is_first else None))
                    case Finish():
                        break
                    case Join() | StoreAt():
                        raise ValueError(f"a rank that works was told {type(word).__name__}")
                    case _:
                        assert_never(word)
        except _FinishedEarly:
            pass
        worker.finish()

    def emit(self, answer: LearnerAnswer, /) -> None:
        """See :class:`.WorkerHost`."""
        if self._rank == 0:
            self.say(Answered(answer))

    def fail(self, error: BaseException, /) -> NoReturn:
        """See :class:`.WorkerHost`; ends the process."""
        traceback.print_exception(error)
        try:
            self.say(failure_of(error))
        except OSError:
            traceback.print_exc()
        leave(FAILED)

    def check_stop(self) -> None:
        """See :class:`.WorkerHost`."""
        if self._rank == 0 and self._finishes.is_set():
            raise _FinishedEarly

    def show(self, gauges: tuple[Metric, ...], /) -> None:
        """See :class:`.WorkerHost`."""
        self._gauges = gauges

    def say(self, word: Word) -> None:
        """To the launcher; from any thread."""
        self._channel.say(encode_word(word), wait_s=self._timeout_s)

    def _meet(self) -> WorkerGroup:
        join, limit = self.join, timedelta(seconds=self.join.start_timeout_s)
        num_local_ranks = join.num_ranks // len(join.node_hosts)
        node, local_rank = divmod(self._rank, num_local_ranks)
        meet_over(join.node_hosts[node])
        device = choose_rank_device(join.plan.options.device, local_rank=local_rank, num_local_ranks=num_local_ranks)
        # Before anything else: on a GPU everything that a rank does without naming a device is then on its own.
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = self._open_store(limit) if self._rank == 0 else self._find_store(limit)
        return join_workers(
            store=store,
            rank=self._rank,
            num_ranks=join.num_ranks,
            device=device,
            timeout_s=self._timeout_s,
        )

    def _open_store(self, limit: timedelta) -> TCPStore:
        """Where all nodes reach it, at a port that the kernel chooses and that is ours from that moment on."""
        host = self.join.node_hosts[0]
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = int(listener.getsockname()[1])
        store = TCPStore(
            host,
            port,
            self.join.num_ranks,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=listener.detach(),
        )
        self.say(StoreOpened(port))
        return store

    def _find_store(self, limit: timedelta) -> TCPStore:
        word = self._inbox.get(timeout=self.join.start_timeout_s)
        assert isinstance(word, StoreAt)
        return TCPStore(self.join.node_hosts[0], word.port, self.join.num_ranks, is_master=False, timeout=limit)

    def _read(self) -> None:
        """The other thread."""
        poll, said_s = select.poll(), time.monotonic()
        poll.register(self._channel, select.POLLIN)
        try:
            while True:
                if poll.poll(TICK_S * 1000):
                    word = self._channel.receive(decode_launcher_word)
                    if isinstance(word, Finish):
                        self._finishes.set()
                    self._inbox.put(word)
                if time.monotonic() - said_s > TICK_S:
                    said_s = time.monotonic()
                    self._show_gauges()
                    self.say(RankLives())
        except ChannelClosedError:
            leave(ORPHANED)
        except BaseException as error:
            # Nobody else hears of it, and a rank that does not listen would look like one that has nothing to do.
            self.fail(error)

    def _show_gauges(self) -> None:
        if self._rank == 0 and self._gauges is not self._shown:
            self._shown = self._gauges
            self.say(GaugesShown(self._shown))


def open_worker(plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost) -> LearnerWorker:
    """What works in a rank of this learner."""
    open_rank: RankOpener = pkgutil.resolve_name(plan.rank)
    return open_rank(plan, workers, host)


def leave(exit_code: int) -> NoReturn:
    """End this process now."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def main() -> None:
    """See the module."""
    path, number = sys.argv[1:]
    settle_in()
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(path)
    try:
        rank = Rank(Channel(line), int(number))
    except ChannelClosedError:
        leave(ORPHANED)
    torch.set_num_threads(rank.join.plan.options.num_threads)
    try:
        rank.run()
    except BaseException as error:
        # The edge of the process: whatever it is, the launcher hears the story.
        rank.fail(error)
    leave(0)


if __name__ == "__main__":
    main()
