"""One reward function wherever it runs: in processes, on a thread, or at once.

Invariants:

* Each question is answered once, from any thread.
* Nothing of a user's, and nothing that could hang, runs on the thread that asks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.backends.rewards.functions import (
    GROUP_REWARD,
    REWARD,
    SAMPLE_LISTS,
    NoRewardError,
    arguments,
    judged,
    load_function,
)
from penstock.backends.rewards.functions_asked import LENGTH_PENALTY
from penstock.backends.rewards.length import length_penalty
from penstock.backends.rewards.pool import WorkerPool
from penstock.backends.rewards.sample_calls import reward_call, written_tokens
from penstock.backends.rewards.spec import REWARDS
from penstock.backends.rewards.wire import CallFailed, GroupCall, Judged, Launched

if TYPE_CHECKING:
    from penstock.backends.engines.surroundings import Surroundings
    from penstock.backends.protocol import Fail
    from penstock.backends.rewards.options import FunctionOptions
    from penstock.backends.rewards.sample_calls import ResponseText
    from penstock.backends.rewards.wire import Answer, RewardCall
    from penstock.messages.samples import Prompt, Sample


class Question(NamedTuple):
    """One sample to be scored, or with a function for groups all samples of a group."""

    id: int
    samples: tuple[Sample, ...]
    prompt: Prompt
    timeout_s: float


Answered = Callable[[int, "Answer"], None]


class Counts(NamedTuple):
    """Of a source, now and in all."""

    waiting: int = 0
    running: int = 0
    answered: int = 0
    failed: int = 0
    replaced: int = 0


class Source(Protocol):
    """One function."""

    def start(self, answered: Answered, fail: Fail) -> None:
        """Called once, before the first question."""
        ...

    def ask(self, question: Question) -> None:
        """Returns at once."""
        ...

    def counts(self) -> Counts:
        """For gauges."""
        ...

    def close(self, timeout_s: float) -> None:
        """End everything."""
        ...


def open_source(function: FunctionOptions, text: ResponseText, surroundings: Surroundings) -> Source:
    """The function of these options, not started."""
    if function.function == LENGTH_PENALTY:
        return LengthSource(function)
    launched = Launched(function=function, surroundings=surroundings)
    return (ThreadSource if REWARDS.spec(function.function).runs_here else PoolSource)(launched, text)


class PoolSource(WorkerPool[Question]):
    """A function in processes that can be killed."""

    def __init__(self, launched: Launched, text: ResponseText) -> None:
        function = launched.function
        is_service = function.remote is not None or function.judge is not None
        super().__init__(
            GROUP_REWARD if function.per_group else REWARD,
            function.function,
            function.num_workers or 1,
            launched=launched,
            timeout_key=f"reward.{function.function}.timeout_s" if is_service else "reward.timeout_s",
        )
        self._text = text
        self._is_group = bool(function.per_group)

    def start(self, answered: Answered, fail: Fail) -> None:
        """See :class:`Source`."""
        self._answered = answered
        self._begin(fail)

    def ask(self, question: Question) -> None:
        """See :class:`Source`."""
        self.submit(question)

    def counts(self) -> Counts:
        """See :class:`Source`."""
        return Counts(self.num_waiting, self.num_running, self.num_answered, self.num_failed, self.num_restarts)

    def _call(self, command: Question, call_id: int, names: tuple[str, ...]) -> RewardCall | GroupCall:
        needs = frozenset(SAMPLE_LISTS.get(name, name) for name in names)
        calls = tuple(
            reward_call(sample, command.prompt, command.timeout_s, call_id, self._text, needs)
            for sample in command.samples
        )
        return GroupCall(call_id, command.timeout_s, calls) if self._is_group else calls[0]

    def _on_answer(self, command: Question, answer: Answer) -> None:
        self._answered(command.id, answer)


class ThreadSource:
    """A function that is known to end, on a thread."""

    def __init__(self, launched: Launched, text: ResponseText) -> None:
        self._loaded = load_function(REWARD, launched.function.function, launched)
        self._text = text
        self._queue: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._num_answered = self._num_failed = 0

    def start(self, answered: Answered, fail: Fail) -> None:
        """See :class:`Source`."""
        self._answered, self._fail = answered, fail
        self._thread.start()

    def ask(self, question: Question) -> None:
        """See :class:`Source`."""
        self._queue.put(question)

    def counts(self) -> Counts:
        """See :class:`Source`."""
        return Counts(waiting=self._queue.qsize(), answered=self._num_answered, failed=self._num_failed)

    def close(self, timeout_s: float) -> None:
        """End the thread, at its next sample."""
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (question := self._queue.get()) is not None:
                self._answered(question.id, self._judged(question))
        except BaseException as error:  # the thread's end must not go unnoticed, whatever ended it
            self._fail(error)

    def _judged(self, question: Question) -> Answer:
        self._num_answered += 1
        names = self._loaded.names
        call = reward_call(question.samples[0], question.prompt, question.timeout_s, 0, self._text, frozenset(names))
        try:
            return judged(question.id, 0.0, self._loaded.function(**arguments(call, names)))
        except NoRewardError as error:
            self._num_failed += 1
            return CallFailed(question.id, 0.0, str(error))


class LengthSource:
    """The length penalty: a line of arithmetic, answered at once."""

    def __init__(self, function: FunctionOptions) -> None:
        assert function.length_penalty is not None, "filled in by asked_functions"
        self._options = function.length_penalty
        self._num_answered = 0

    def start(self, answered: Answered, fail: Fail) -> None:
        """See :class:`Source`."""
        self._answered = answered

    def ask(self, question: Question) -> None:
        """See :class:`Source`."""
        self._num_answered += 1
        num_tokens = len(written_tokens(question.samples[0]))
        self._answered(question.id, Judged(question.id, 0.0, length_penalty(num_tokens, self._options), ()))

    def counts(self) -> Counts:
        """See :class:`Source`."""
        return Counts(answered=self._num_answered)

    def close(self, timeout_s: float) -> None:
        """Nothing runs."""
