"""Parts of a run that at times do what they should not: a learner that exports wrong weights, a teacher that answers
for other tokens or not at all; and an archive that takes its time.

Invariants:

* What goes wrong follows from the seed, the incarnation and the number of the command.
* An archive reads what it was asked for at its end: the payloads of all its steps are there until it is answered.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec.structs import replace

from penstock.backends.draws import uniform
from penstock.backends.simulated.learner import canary_logprobs
from penstock.messages.arrays import LOGPROB_BYTES
from penstock.messages.commands import ArchiveSamples, BufferCommand, ComputeLogprobs, LearnerCommand, TeacherCommand
from penstock.messages.local import LogprobsComputed, WeightsPublished

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backends.ledger.backend import LedgerBackend
    from penstock.backends.ledger.protocol import LedgerReader
    from penstock.backends.protocol import Backend, Emit, Fail, Timers
    from penstock.backends.simulated.learner import SimulatedLearner
    from penstock.backends.simulated.teacher import SimulatedTeacher
    from penstock.messages.base import Metric
    from penstock.messages.local import LocalEvent

CommandT = TypeVar("CommandT")

_EXPORTS, _ANSWERS = 31, 32
"""Streams of random numbers."""


class Wrapped(Generic[CommandT]):
    """Another backend, but for what a subclass changes. Implements :class:`penstock.backends.protocol.Backend`."""

    def __init__(self, backend: Backend[CommandT]) -> None:
        self._backend = backend

    def start(self, emit: Emit, fail: Fail) -> None:
        self._backend.start(partial(self._tell, emit), fail)

    def _tell(self, emit: Emit, event: LocalEvent) -> None:
        """What the backend emits goes on from here."""
        emit(event)

    def execute(self, command: CommandT, /) -> None:
        self._backend.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        return self._backend.gauges()

    def close(self, timeout_s: float) -> None:
        self._backend.close(timeout_s)


class FaultyLearner(Wrapped[LearnerCommand]):
    """The same learner, some of whose exports are other weights than the canary was made with."""

    def __init__(self, learner: SimulatedLearner, where: tuple[int, int], bad_exports_rate: float) -> None:
        """``where``: seed of the trial, and epoch."""
        super().__init__(learner)
        self._where, self._rate = where, bad_exports_rate

    def _tell(self, emit: Emit, event: LocalEvent) -> None:
        emit(self._spoilt(event) if isinstance(event, WeightsPublished) else event)

    def _spoilt(self, event: WeightsPublished) -> WeightsPublished:
        manifest = event.manifest
        canary = manifest.canary
        if canary is None or uniform(*self._where, _EXPORTS, manifest.publish) >= self._rate:
            return event
        wrong = replace(canary, logprobs=canary_logprobs(canary.tokens, f"not {manifest.digest}"))
        return replace(event, manifest=replace(manifest, canary=wrong))


class FaultyTeacher(Wrapped[TeacherCommand]):
    """The same teacher, some of whose answers are short of a token, and some never come."""

    def __init__(
        self, teacher: SimulatedTeacher, where: tuple[int, int, int], *, misfit_rate: float, silence_rate: float
    ) -> None:
        """``where``: seed of the trial, index of the teacher, and epoch."""
        super().__init__(teacher)
        self._where = where
        self._misfit_rate, self._silence_rate = misfit_rate, silence_rate
        self._num_answers = 0

    def _tell(self, emit: Emit, event: LocalEvent) -> None:
        if not isinstance(event, LogprobsComputed) or event.error:
            emit(event)
            return
        self._num_answers += 1
        drawn = uniform(*self._where, _ANSWERS, self._num_answers)
        if drawn < self._misfit_rate:
            first, *others = event.logprobs
            emit(replace(event, logprobs=(first[:-LOGPROB_BYTES], *others)))
        elif drawn < 1.0 - self._silence_rate:
            emit(event)

    def execute(self, command: TeacherCommand, /) -> None:
        assert not isinstance(command, ComputeLogprobs) or command.texts, "a question without a text"
        super().execute(command)


class SlowArchive(Wrapped[BufferCommand]):
    """The same backend of the Buffer, whose archives of samples take modelled time and are written nowhere."""

    def __init__(
        self,
        backend: LedgerBackend,
        reader: LedgerReader,
        timers: Timers,
        archive_s: float,
        done: Callable[[int], None],
    ) -> None:
        """``done`` is told the version of each step that was archived."""
        super().__init__(backend)
        self._reader, self._timers = reader, timers
        self._archive_s, self._done = archive_s, done
        self._is_archiving = False

    def execute(self, command: BufferCommand, /) -> None:
        if not isinstance(command, ArchiveSamples):
            super().execute(command)
            return
        assert not self._is_archiving, "one archive is asked for while another is written"
        self._is_archiving = True
        self._timers.call_later(self._archive_s, lambda: self._written(command))

    def _written(self, command: ArchiveSamples) -> None:
        self._is_archiving = False
        for receipt in self._reader.receipts(command.first_version, command.last_version):
            self._reader.payloads(receipt.group_ids)  # raises where one is gone
            self._done(receipt.version)
        super().execute(command)
