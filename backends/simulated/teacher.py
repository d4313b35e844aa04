"""A teacher that answers after modelled latencies, on whatever clock it is given.

Invariants:

* A log-prob follows from the token, its place and the last token before the text, and from nothing else: whichever
  teacher is asked, and however often, the answer is the same. So a wrong or a misplaced one shows.
* Every ``ComputeLogprobs`` is answered by exactly one ``LogprobsComputed``.
* Samples are worked on one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

from penstock.backends.draws import uniform
from penstock.messages.arrays import pack_floats, tokens_view
from penstock.messages.base import Metric
from penstock.messages.commands import ComputeLogprobs, OpenEngine
from penstock.messages.local import EngineOpened, LogprobsComputed

if TYPE_CHECKING:
    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.backends.protocol import Emit, Fail, Timers
    from penstock.messages.commands import TeacherCommand

OPENING_S: Final = 0.1
_FAILS: Final = 11
"""Stream of random numbers."""


class SimulatedTeacher:
    """A teacher that computes nothing: its log-probs come after modelled times, or fail as often as the model says."""

    def __init__(self, options: TeacherOptions, *, seed: int, index: int, epoch: int, timers: Timers) -> None:
        self.is_frozen = False
        """It answers nothing any more (a fault to inject)."""
        self._model = options.simulated
        self._num_slots = options.slots
        self._where = (seed, _FAILS, index, epoch)
        self._timers = timers
        self._free_s = 0.0
        """When it has done everything that it was asked so far."""
        self._num_asked = 0
        self._num_tokens = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit

    def execute(self, command: TeacherCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        match command:
            case OpenEngine():
                self._timers.call_later(OPENING_S, lambda: self._emit(EngineOpened(num_slots=self._num_slots)))
            case ComputeLogprobs():
                self._compute(command)
            case _:
                assert_never(command)

    def _compute(self, command: ComputeLogprobs) -> None:
        model, now_s = self._model, self._timers.now_s()
        self._num_asked += 1
        num_tokens = sum(text.num_tokens for text in command.texts)
        if uniform(*self._where, self._num_asked) < model.failure_rate:
            answer = LogprobsComputed(key=command.key, attempt=command.attempt, error="simulated failure of a teacher")
        else:
            logprobs = tuple(teacher_logprobs(text.context, text.tokens) for text in command.texts)
            answer = LogprobsComputed(key=command.key, attempt=command.attempt, logprobs=logprobs)
        self._free_s = max(self._free_s, now_s) + model.sample_s + num_tokens * model.token_s

        def tell() -> None:
            if not self.is_frozen:
                self._num_tokens += num_tokens
                self._emit(answer)

        self._timers.call_later(self._free_s - now_s, tell)

    def gauges(self) -> tuple[Metric, ...]:
        """Tokens that it has judged since the start."""
        return (Metric("teacher/tokens", self._num_tokens),)

    def close(self, timeout_s: float) -> None:
        """Nothing to end: the clock is not ours."""


def teacher_logprobs(context: bytes, tokens: bytes) -> bytes:
    """What every simulated teacher says of these tokens after this context."""
    before = tokens_view(context)
    last = before[-1] if len(before) else 0
    return pack_floats(-((7 * token + 3 * t + last) % 101) / 101 for t, token in enumerate(tokens_view(tokens)))
