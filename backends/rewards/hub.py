"""The Scorer's and the Filter's backends: which function, and where it runs.

Invariants:

* Each ``Score`` is answered by one ``SampleJudged``, each ``JudgeGroup`` by one ``GroupJudged``.
* A failure of any kind (exception, nonsense, overrun, a process that dies) is a reason and never a zero.
* Nothing of the function's runs on the actor's thread.
"""

from __future__ import annotations

import difflib
import queue
import threading
from typing import TYPE_CHECKING, Final

from penstock.backends.rewards.builtin import BUILT_IN, IN_PROCESS, score_in_process
from penstock.backends.rewards.functions import NoRewardError
from penstock.backends.rewards.pool import WorkerPool
from penstock.backends.rewards.trades import FilterTrade, ResponseText, RewardTrade, reward_call
from penstock.backends.user_code import UserCodeError, split_spec
from penstock.messages.base import Metric
from penstock.messages.commands import JudgeGroup, Score
from penstock.messages.local import GroupJudged, SampleJudged
from penstock.messages.samples import Reward

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.backends.rewards.options import RewardOptions

FILTER_TIMEOUT_S: Final = 30.0


def open_rewards(options: RewardOptions, tokenizer_folder: Path) -> Backend[Score]:
    """The backend that scores samples as the scenario says.

    Raises:
        ValueError: there is no such reward function, or no such file.
    """
    text = ResponseText(tokenizer_folder)
    if options.function in IN_PROCESS:
        return InProcessRewards(options.function, text)
    if options.function not in BUILT_IN:
        _check_function("reward.function", options.function)
    return RewardBackend(RewardTrade(options.function, text), options.num_workers)


def open_filter(
    function: str | None, tokenizer_folder: Path, *, timeout_s: float = FILTER_TIMEOUT_S
) -> Backend[JudgeGroup]:
    """The backend that asks the user's filter; without one it keeps every group.

    Raises:
        ValueError: there is no such file.
    """
    if function is None:
        return KeepEveryGroup()
    split_spec(function)
    return FilterBackend(FilterTrade(function, ResponseText(tokenizer_folder), timeout_s))


class RewardBackend:
    """Scores samples in processes."""

    def __init__(self, trade: RewardTrade, num_workers: int) -> None:
        self._pool = WorkerPool[Score](trade, num_workers)

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. A function that cannot be loaded comes to ``fail``."""
        self._pool.start(emit, fail)

    def execute(self, command: Score, /) -> None:
        """Have a sample scored."""
        self._pool.submit(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Calls that wait and run, and totals of answers, failures and replaced processes."""
        return _gauges("reward", self._pool)

    def close(self, timeout_s: float) -> None:
        """Kill the processes."""
        self._pool.close(timeout_s)


class FilterBackend:
    """Asks the user's filter in a process."""

    def __init__(self, trade: FilterTrade) -> None:
        self._pool = WorkerPool[JudgeGroup](trade, 1)

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. A filter that cannot be loaded comes to ``fail``."""
        self._pool.start(emit, fail)

    def execute(self, command: JudgeGroup, /) -> None:
        """Have a group judged."""
        self._pool.submit(command)

    def gauges(self) -> tuple[Metric, ...]:
        """As for rewards."""
        return _gauges("filter", self._pool)

    def close(self, timeout_s: float) -> None:
        """Kill the process."""
        self._pool.close(timeout_s)


class KeepEveryGroup:
    """The backend of a Filter whose scenario names no function."""

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._emit = emit

    def execute(self, command: JudgeGroup, /) -> None:
        """Keep it."""
        self._emit(GroupJudged(group_id=command.group.group_id, keep=True))

    def gauges(self) -> tuple[Metric, ...]:
        """Nothing to tell."""
        return ()

    def close(self, timeout_s: float) -> None:
        """Nothing runs."""


class InProcessRewards:
    """Scores with a built-in function that is known to end, on a thread."""

    def __init__(self, name: str, text: ResponseText) -> None:
        self._name = name
        self._text = text
        self._queue: queue.SimpleQueue[Score | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._needs = frozenset({"response"}) if name == "lines" else frozenset[str]()

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._emit, self._fail = emit, fail
        self._thread.start()

    def execute(self, command: Score, /) -> None:
        """Have a sample scored."""
        self._queue.put(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Samples that wait."""
        return (Metric("reward/waiting", float(self._queue.qsize())),)

    def close(self, timeout_s: float) -> None:
        """End the thread, at its next sample."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (command := self._queue.get()) is not None:
                self._emit(self._judged(command))
        except BaseException as error:  # the thread's end must not go unnoticed, whatever ended it
            self._fail(error)

    def _judged(self, command: Score) -> SampleJudged:
        key, attempt = command.sample.key, command.sample.attempt
        try:
            value = score_in_process(self._name, reward_call(command, 0, self._text, self._needs))
        except NoRewardError as error:
            return SampleJudged(key=key, attempt=attempt, reward=None, reason=str(error))
        return SampleJudged(key=key, attempt=attempt, reward=Reward(value=value))


def _gauges(prefix: str, pool: WorkerPool[Score] | WorkerPool[JudgeGroup]) -> tuple[Metric, ...]:
    return (
        Metric(f"{prefix}/waiting", float(pool.num_waiting)),
        Metric(f"{prefix}/running", float(pool.num_running)),
        Metric(f"{prefix}/answered", float(pool.num_answered)),
        Metric(f"{prefix}/failed", float(pool.num_failed)),
        Metric(f"{prefix}/replaced_processes", float(pool.num_restarts)),
    )


def _check_function(key: str, function: str) -> None:
    if ".py:" in function:
        split_spec(function)
        return
    near = difflib.get_close_matches(function, BUILT_IN, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserCodeError(f"{key}: expected one of {', '.join(BUILT_IN)}, or file.py:function, got {function!r}{hint}")
