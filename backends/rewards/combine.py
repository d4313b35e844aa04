"""The Scorer's backend: asks the functions of each sample and puts their results together.

Invariants:

* Each ``Score`` is answered by one ``SampleJudged``, each ``ScoreGroup`` by one ``GroupScored`` with every sample.
* A reward is the sum of the results of all its functions, each times its weight. When one of them fails the sample has
  no reward: a part of a sum is no reward.
* A failure of any kind (exception, nonsense, overrun, a process that dies) is a reason and never a zero.
* Why a sample has no reward is logged: of the first :data:`NUM_LOGGED` each, then of every hundredth.
* Answers come from the threads of the functions; all state is under one lock, and nothing is emitted under it.

| waits for | who ends it |
|---|---|
| the result of a function | its source, by the deadline of the call |
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.backends.rewards.functions_asked import RewardTerm
from penstock.backends.rewards.sources import Counts, Question, open_source
from penstock.backends.rewards.wire import CallFailed, GroupJudged, Judged
from penstock.messages.base import Metric
from penstock.messages.commands import Score
from penstock.messages.errors import UserFault
from penstock.messages.local import GroupScored, SampleJudged
from penstock.messages.samples import Reward, Sample

if TYPE_CHECKING:
    from penstock.backends.engines.surroundings import Surroundings
    from penstock.backends.protocol import Emit, Fail
    from penstock.backends.rewards.functions_asked import AskedFunctions
    from penstock.backends.rewards.sample_calls import ResponseText
    from penstock.backends.rewards.sources import Source
    from penstock.backends.rewards.wire import Answer
    from penstock.messages.commands import ScoreGroup
    from penstock.messages.samples import Prompt

Result = Judged | CallFailed
NUM_LOGGED: Final = 200
LOGGED_EVERY: Final = 100

_log: Final = logging.getLogger(__name__)


class Job(msgspec.Struct):
    """One command, and what is known of it."""

    samples: tuple[Sample, ...]
    is_group: bool
    terms: tuple[RewardTerm, ...]
    results: list[list[Result | None]]
    """Results by reward term, then by sample."""
    num_open: int = 0
    """Questions that are not answered."""


class _Asks(NamedTuple):
    """What is asked about a sample, and who."""

    terms: tuple[RewardTerm, ...]
    sources: tuple[Source, ...]


class _Asked(msgspec.Struct):
    job: Job
    term: int
    sample: int | None
    """None: all of them."""
    asked_at_s: float


class Rewards:
    """See the module."""

    def __init__(self, asked: AskedFunctions, text: ResponseText, surroundings: Surroundings) -> None:
        every = list(asked.every())
        self._sources: list[Source] = [open_source(function, text, surroundings) for function in every]

        def asks(terms: tuple[RewardTerm, ...]) -> _Asks:
            return _Asks(terms, tuple(self._sources[every.index(term.function)] for term in terms))

        self._function_key = asked.function_key
        self._usual = asks(asked.usual)
        self._by_name = {name: asks(terms) for name, terms in asked.by_name.items()}
        self._lock = threading.Lock()
        self._open: dict[int, _Asked] = {}
        self._next_id = 0
        self._without_reward = itertools.count(1)

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. A function that cannot be loaded comes to ``fail``."""
        self._emit = emit
        for source in self._sources:
            source.start(self._on_answer, fail)

    def execute(self, command: Score | ScoreGroup, /) -> None:
        """Have a sample, or all samples of a group, scored."""
        samples = (command.sample,) if isinstance(command, Score) else command.samples
        is_group = not isinstance(command, Score)
        try:
            asks = self._asks(command.prompt)
        except UserFault as error:
            failed: list[Result | None] = [CallFailed(0, 0.0, str(error))] * len(samples)
            self._say(_event(Job(samples, is_group, (), [failed])))
            return
        job = Job(samples, is_group, asks.terms, [[None] * len(samples) for _ in asks.terms])
        questions: list[tuple[Source, Question]] = []
        now_s = time.monotonic()
        with self._lock:
            for number, (term, source) in enumerate(zip(asks.terms, asks.sources, strict=True)):
                timeout_s = term.function.timeout_s or command.timeout_s
                whole = bool(term.function.per_group)
                for place in [None] if whole else range(len(samples)):
                    given = samples if place is None else (samples[place],)
                    self._open[self._next_id] = _Asked(job, number, place, now_s)
                    questions.append((source, Question(self._next_id, given, command.prompt, timeout_s)))
                    self._next_id += 1
            job.num_open = len(questions)
        for source, question in questions:
            source.ask(question)

    def _asks(self, prompt: Prompt) -> _Asks:
        key = self._function_key
        if key is None:
            return self._usual
        metadata = msgspec.json.decode(prompt.metadata, type=dict[str, object]) if prompt.metadata else {}
        name = metadata.get(key)
        if name is None or name == "":
            return self._usual
        found = self._by_name.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(self._by_name)
            raise UserFault(
                f"row {prompt.row} names {str(name)[:80]!r} as its reward function (reward.function_key: {key}); "
                f"reward.functions has {known or 'none'}"
            )
        return found

    def _on_answer(self, question_id: int, answer: Answer) -> None:
        with self._lock:
            asked = self._open.pop(question_id)
            row = asked.job.results[asked.term]
            if asked.sample is not None:
                row[asked.sample] = _result(answer)
            elif isinstance(answer, GroupJudged):
                row[:] = answer.samples
            else:
                row[:] = [_result(answer)] * len(row)
            asked.job.num_open -= 1
            is_done = asked.job.num_open == 0
        if is_done:
            self._say(_event(asked.job))

    def _say(self, event: SampleJudged | GroupScored) -> None:
        for judged in (event,) if isinstance(event, SampleJudged) else event.samples:
            if judged.reward is None:
                number = next(self._without_reward)
                if number <= NUM_LOGGED or number % LOGGED_EVERY == 0:
                    _log.warning("no reward (number %d) for %s: %s", number, judged.key, judged.reason)
        self._emit(event)

    def gauges(self) -> tuple[Metric, ...]:
        """Calls that wait and run, since when the oldest of them does, and totals of answers, failures and replaced
        processes."""
        with self._lock:  # in the order in which they were asked
            oldest = next((asked.asked_at_s for asked in self._open.values()), None)
        counts = [source.counts() for source in self._sources]
        total = Counts(*(sum(values) for values in zip(*counts, strict=True)))
        return (
            Metric("reward/waiting", float(total.waiting)),
            Metric("reward/running", float(total.running)),
            Metric("reward/oldest_s", 0.0 if oldest is None else time.monotonic() - oldest),
            Metric("reward/answered", float(total.answered)),
            Metric("reward/failed", float(total.failed)),
            Metric("reward/replaced_processes", float(total.replaced)),
        )

    def close(self, timeout_s: float) -> None:
        """Kill the processes."""
        for source in self._sources:
            source.close(timeout_s)


def _result(answer: Answer) -> Result:
    assert isinstance(answer, Judged | CallFailed), answer
    return answer


def _event(job: Job) -> SampleJudged | GroupScored:
    judged = tuple(_judged(job, place) for place in range(len(job.samples)))
    if not job.is_group:
        return judged[0]
    return GroupScored(group_id=job.samples[0].key.group_id, samples=judged)


def _judged(job: Job, place: int) -> SampleJudged:
    sample = job.samples[place]
    results = [row[place] for row in job.results]
    for number, result in enumerate(results):
        if isinstance(result, CallFailed):
            name = job.terms[number].name if job.terms else ""
            reason = f"{name}: {result.reason}" if name else result.reason
            return SampleJudged(key=sample.key, attempt=sample.attempt, reward=None, reason=reason)
    judged = [result for result in results if isinstance(result, Judged)]
    assert len(judged) == len(results)
    if len(judged) == 1 and not job.terms[0].name:
        parts = tuple(Metric(name, value) for name, value in judged[0].components)
        reward = Reward(value=judged[0].value, components=parts, answer=judged[0].answer)
    else:
        reward = _sum(job.terms, judged)
    if not math.isfinite(reward.value):
        reason = f"the weighted sum of the components is {reward.value}; expected a finite number"
        return SampleJudged(key=sample.key, attempt=sample.attempt, reward=None, reason=reason)
    return SampleJudged(key=sample.key, attempt=sample.attempt, reward=reward)


def _sum(terms: tuple[RewardTerm, ...], judged: list[Judged]) -> Reward:
    parts: list[Metric] = []
    for term, each in zip(terms, judged, strict=True):
        parts.append(Metric(term.name, each.value))
        parts += [Metric(f"{term.name}/{name}", value) for name, value in each.components]
    total = math.fsum(term.weight * each.value for term, each in zip(terms, judged, strict=True))
    answer = next((each.answer for each in judged if each.answer), "")
    return Reward(value=total, components=tuple(parts), answer=answer)
