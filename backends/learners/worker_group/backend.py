"""A learner whose ranks are processes of their own, as a backend.

```
Learner's process ─┬─ guardian ─ rank 0: store, exporter, answers
  GroupOfWorkers-     ├─ guardian ─ rank 1
  Backend, one     └─ guardian ─ rank 2
  thread               every rank: one line to the thread; all ranks: one process group
```

Invariants:

* Every rank gets every command, in order, as the same bytes, which are encoded once; a batch is written once to memory
  that all of them map; on its way to another node it travels once. Answers come from rank 0 alone, which is here.
* A rank that dies, fails, or keeps the others waiting for longer than ``rank_timeout_s`` ends all of them, and so does
  the loss of a node. ``fail`` is
  called when every process is gone, with what was seen of it; nothing is answered after that.
* No rank outlives this process, however it ends: each is kept by a guardian
  (:mod:`penstock.backends.processes.guardian`), which the kernel tells of the end.
* Everything of the worker group is touched by its one thread; ``execute`` and ``close`` leave word and wake it.

| wait | who ends it |
|---|---|
| the thread, for anything to happen | a rank's word, a guardian's, ``execute``, ``close``; at the latest ``TICK_S`` |
| for the ranks at the start | they say so; at the latest the larger of ``rank_timeout_s`` and ``START_TIMEOUT_S`` |
| for a rank that others have overtaken, or that says nothing | it; at the latest ``rank_timeout_s`` |
| for word of another node | it, every moment; at the latest :data:`.LINK_TIMEOUT_S` |
| for a step that no rank finishes | the Learner, whose ``step_timeout_s`` it is, by ending this process |
| ``close``, for the ranks | rank 0, before its next micro-batch; at the latest the timeout, which kills them |
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, assert_never

from penstock.backends.learners.worker_group.all_ranks import AllRanks
from penstock.backends.learners.worker_group.ending import error_of
from penstock.backends.learners.worker_group.words import (
    Answered,
    Finish,
    GaugesShown,
    Join,
    Order,
    OrderDone,
    RankCame,
    RankFailed,
    RankLives,
    RankReady,
    StoreAt,
    StoreOpened,
)
from penstock.messages.base import Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.other_nodes import FurtherNodes
    from penstock.backends.learners.worker_group.rank_view import RankView
    from penstock.backends.learners.worker_group.words import RankWord
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.commands import LearnerCommand

START_TIMEOUT_S = 300.0
"""For the ranks to start, unless ``rank_timeout_s`` is longer: a busy machine imports torch slowly."""
TICK_S: Final = 0.5
LAST_WORDS_S: Final = 0.5
"""Between the first sign of an end and the story, so that its cause is in it."""
END_TIMEOUT_S: Final = 10.0
FAREWELL_S: Final = 3.0
"""For the other ranks to end by themselves when rank 0 has."""
PAUSE_S: Final = 10.0
"""A thread that did not run for longer was stopped itself, and nobody else is late."""

_log: Final = logging.getLogger(__name__)


class WorkerGroupBackend:
    """Hands the Learner's commands to ranks, and keeps them."""

    def __init__(
        self, plan: LearnerPlan, *, log_path: Callable[[int], Path], further: FurtherNodes | None = None
    ) -> None:
        """
        Args:
            plan: what is trained, and by how many ranks.
            log_path: where the output of each rank goes.
            further: the nodes that have ranks beside this one; None where all are here.
        """
        self._plan = plan
        self._log_path = log_path
        self._timeout_s = plan.options.rank_timeout_s
        self._set = AllRanks(plan, further)
        self._commands: deque[LearnerCommand] = deque()
        self._close_by_s: float | None = None
        self._thread: threading.Thread | None = None
        self._gauges: tuple[Metric, ...] = ()
        self._came: list[RankView] = []
        """Those who have not been told yet what they are a part of."""
        self._joined: list[RankView] = []
        self._store: StoreAt | None = None
        self._num_orders = 0
        self._overtaken_s: dict[int, float] = {}
        """When the first rank had done an order that not every rank has done."""

    def start(self, emit: Emit, fail: Fail) -> None:
        self._emit, self._fail = emit, fail
        self._thread = threading.Thread(target=self._run, name="learner-worker group", daemon=True)
        self._thread.start()

    def execute(self, command: LearnerCommand, /) -> None:
        self._commands.append(command)
        self._set.wake()

    def gauges(self) -> tuple[Metric, ...]:
        return (*self._gauges, Metric(name="learner/num_ranks", value=float(self._plan.options.num_ranks)))

    def close(self, timeout_s: float) -> None:
        self._close_by_s = time.monotonic() + timeout_s
        self._set.wake()
        if self._thread is not None:
            self._thread.join(timeout_s + END_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._set.launch(self._log_path)
            if self._oversee():
                self._finish()
        except BaseException as error:
            # The thread's only way to tell; and whatever it is, no rank may be left.
            self._set.kill(END_TIMEOUT_S)
            if self._close_by_s is None:
                self._fail(error)
        else:
            self._set.kill(END_TIMEOUT_S)

    def _oversee(self) -> bool:
        """Until ``close``; whether the ranks took orders by then.

        Raises:
            WorkerGroupError, UserFault, OSError: they cannot go on.
        """
        began_s = looked_s = time.monotonic()
        sign, sign_s = "", 0.0
        while self._close_by_s is None:
            for rank, word in self._set.listen(TICK_S):
                self._on_word(rank, word)
            self._let_join()
            now_s = time.monotonic()
            if now_s - looked_s > PAUSE_S:
                began_s = self._grant_a_fresh_period(now_s)
            looked_s = now_s
            if not sign:
                sign, sign_s = self._sign_of_an_end(now_s, began_s), now_s
                if not sign and self._is_ready:
                    self._order_what_came()
            elif now_s - sign_s > LAST_WORDS_S:
                raise error_of(self._set.ranks, sign, self._set.lost())
        return self._is_ready and not sign

    @property
    def _is_ready(self) -> bool:
        return all(rank.is_ready for rank in self._set.ranks)

    def _order_what_came(self) -> None:
        while self._commands:
            self._num_orders += 1
            self._set.say(Order(self._num_orders, self._commands.popleft()))

    def _on_word(self, rank: RankView, word: RankWord) -> None:
        match word:
            case RankCame():
                self._came.append(rank)
            case StoreOpened(port):
                self._store = StoreAt(port)
                self._set.say(self._store, [other for other in self._joined if other is not rank])
            case RankReady(device):
                rank.is_ready = True
                _log.info("%s is ready on %s; its log is %s", rank, device, rank.log_path)
            case OrderDone(number, answer):
                self._on_done(rank, number)
                if answer is not None:
                    self._emit(answer)
            case Answered(answer):
                self._emit(answer)
            case GaugesShown(gauges):
                self._gauges = gauges
            case RankLives() | RankFailed():
                pass  # that it was heard, and its failure, stand in the rank
            case _:
                assert_never(word)

    def _let_join(self) -> None:
        """Tell those who have come what they are a part of, once it is known where all nodes are."""
        hosts = self._set.node_hosts
        if not self._came or hosts is None:
            return
        join = Join(
            plan=self._plan,
            num_ranks=self._plan.options.num_ranks,
            timeout_s=self._timeout_s,
            start_timeout_s=max(self._timeout_s, START_TIMEOUT_S),
            node_hosts=hosts,
        )
        self._set.say(join, self._came)
        if self._store is not None:
            self._set.say(self._store, self._came)
        self._joined += self._came
        self._came = []

    def _on_done(self, rank: RankView, number: int) -> None:
        rank.num_done = number
        self._overtaken_s.setdefault(number, time.monotonic())
        slowest = min(other.num_done for other in self._set.ranks)
        for done in [order for order in self._overtaken_s if order <= slowest]:
            del self._overtaken_s[done]

    def _sign_of_an_end(self, now_s: float, began_s: float) -> str:
        """What says that the ranks cannot go on; empty: nothing does."""
        if (lost := self._set.lost()) is not None:
            return lost.story
        ranks, limit = self._set.ranks, f"{self._timeout_s:g} s (learner.rank_timeout_s)"
        if any(rank.failure is not None or rank.has_ended for rank in ranks):
            failure = next((rank.failure for rank in ranks if rank.failure is not None), None)
            return "a rank ended" if failure is None else f"an exchange between them broke: {failure.message}"
        if silent := [rank for rank in ranks if rank.is_ready and now_s - rank.heard_s > self._timeout_s]:
            return f"{_names(silent)} said nothing for {limit}"
        start_s = max(self._timeout_s, START_TIMEOUT_S)
        if now_s - began_s > start_s and (late := [rank for rank in ranks if not rank.is_ready]):
            return f"{_names(late)} did not start within {start_s:g} s"
        if self._overtaken_s and now_s - min(self._overtaken_s.values()) > self._timeout_s:
            order = min(self._overtaken_s)
            late = [rank for rank in ranks if rank.num_done < order]
            return f"{_names(late)} had not done what others had done {limit} before"
        return ""

    def _grant_a_fresh_period(self, now_s: float) -> float:
        """This thread did not run for long, so it knows nothing about how long others took."""
        self._set.grant_a_fresh_period(now_s)
        self._overtaken_s = dict.fromkeys(self._overtaken_s, now_s)
        return now_s

    def _finish(self) -> None:
        """Have the ranks end by themselves: rank 0 first, because the others may be in an exchange with it."""
        assert self._close_by_s is not None
        first, *others = self._set.ranks
        self._set.say(Finish(), [first])
        self._await_ends([first], self._close_by_s)
        self._set.say(Finish(), others)
        self._await_ends(others, min(self._close_by_s, time.monotonic() + FAREWELL_S))
        _log.info("the ranks have ended: %s", "; ".join(rank.ended_how() for rank in self._set.ranks))

    def _await_ends(self, ranks: Sequence[RankView], deadline_s: float) -> None:
        while not all(rank.has_ended for rank in ranks) and (left_s := deadline_s - time.monotonic()) > 0:
            self._set.listen(min(left_s, TICK_S))


def _names(ranks: Sequence[RankView]) -> str:
    return ", ".join(map(str, ranks))
