"""The embedded teacher as a backend: one thread that scores whatever has been asked meanwhile, packed.

Invariants:

* Only the thread touches the model. Questions are taken in the order in which they came, as many at once as fit into
  ``max_tokens``; one that is longer is alone in its pass.
* Every ``ComputeLogprobs`` is answered by exactly one ``LogprobsComputed``: with the reason where the sample itself
  cannot be scored, which touches no other.
* Whatever else goes wrong ends the thread and is told through ``fail``.

| waits for | who ends it |
|---|---|
| the thread, idle, for the next question | ``execute``, or ``close`` |
| ``close`` for the thread | its own deadline; the thread ends after the pass that runs |
"""

# Tensor.numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

import torch

from penstock.backends.devices import choose_device
from penstock.backends.engines.torch.factory import DTYPES
from penstock.backends.engines.torch.scoring import Text, TextScorer, UnscorableError
from penstock.messages.arrays import tokens_view
from penstock.messages.base import Metric
from penstock.messages.commands import ComputeLogprobs, OpenEngine
from penstock.messages.local import EngineOpened, LogprobsComputed
from penstock.messages.top_logprobs import TopLogprobs

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.teacher_options import TeacherOptions
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.messages.commands import TeacherCommand

UNSCORABLE: Final = "the teacher finds a token of it impossible: a log-prob is not finite"


class _Question(NamedTuple):
    command: ComputeLogprobs
    texts: tuple[Text, ...]

    @property
    def num_rows(self) -> int:
        return sum(text.num_rows for text in self.texts)


def open_torch_teacher(
    *, model_folder: Path, options: TeacherOptions, max_context: int, temperature: float
) -> Backend[TeacherCommand]:
    """An embedded teacher of the model in this folder, which is loaded by its ``OpenEngine``.

    Raises:
        UserFault: the device does not exist.
    """
    device = choose_device(options.device, "teacher.device")
    return TorchTeacherBackend(model_folder, options, max_context=max_context, temperature=temperature, device=device)


class TorchTeacherBackend:
    """One embedded teacher behind :class:`penstock.backends.protocol.Backend`."""

    def __init__(
        self,
        model_folder: Path,
        options: TeacherOptions,
        *,
        max_context: int,
        temperature: float,
        device: torch.device,
    ) -> None:
        self._model_folder = model_folder
        self._options = options
        self._max_context = max_context
        self._temperature = temperature
        self._device = device
        self._inbox: SimpleQueue[TeacherCommand | None] = SimpleQueue()
        self._questions: deque[_Question] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torch-teacher", daemon=True)
        self._num_tokens = self._num_passes = 0

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._fail = fail
        self._thread.start()

    def execute(self, command: TeacherCommand, /) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._inbox.put(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Samples that wait for the next pass; tokens that were scored, and passes, since the start."""
        return (
            Metric("teacher/queued", len(self._questions)),
            Metric("teacher/tokens", self._num_tokens),
            Metric("teacher/passes", self._num_passes),
        )

    def close(self, timeout_s: float) -> None:
        """See :class:`penstock.backends.protocol.Backend`."""
        self._closing.set()
        self._inbox.put(None)
        deadline_s = time.monotonic() + timeout_s
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._options.num_threads)
        try:
            self._serve()
        except BaseException as error:  # the contract of Backend: the process ends with this story
            self._fail(error)

    def _serve(self) -> None:
        scorer: TextScorer | None = None
        while not self._closing.is_set():
            command = self._inbox.get()
            while command is not None:
                match command:
                    case OpenEngine():
                        scorer = self._load()
                        self._emit(EngineOpened(num_slots=self._options.slots))
                    case ComputeLogprobs():
                        assert scorer is not None, "a teacher is asked after it has opened"
                        self._take(command, scorer)
                    case _:
                        assert_never(command)
                command = None if self._inbox.empty() else self._inbox.get()
            while self._questions and self._inbox.empty() and not self._closing.is_set():
                assert scorer is not None
                self._answer(self._next_pass(), scorer)

    def _load(self) -> TextScorer:
        return TextScorer(
            self._model_folder,
            dtype=DTYPES[self._options.model.dtype],
            device=self._device,
            max_context=self._max_context,
            temperature=self._temperature,
            num_top=self._options.top_logprobs,
        )

    def _take(self, command: ComputeLogprobs, scorer: TextScorer) -> None:
        texts = tuple(Text(tokens_view(t.context).tolist(), tokens_view(t.tokens).tolist()) for t in command.texts)
        try:
            for text in texts:
                scorer.check(text)
        except UnscorableError as error:
            self._refuse(command, str(error))
        else:
            self._questions.append(_Question(command, texts))

    def _next_pass(self) -> list[_Question]:
        found = [self._questions.popleft()]
        room = self._options.max_tokens - found[0].num_rows
        while self._questions and self._questions[0].num_rows <= room:
            room -= self._questions[0].num_rows
            found.append(self._questions.popleft())
        return found

    def _answer(self, questions: list[_Question], scorer: TextScorer) -> None:
        scored = iter(scorer.score([text for question in questions for text in question.texts]))
        self._num_passes += 1
        for command, texts in questions:
            found = [next(scored) for _ in texts]
            if not all(bool(torch.isfinite(each.logprobs).all()) for each in found):
                self._refuse(command, UNSCORABLE)
                continue
            self._num_tokens += sum(len(text.tokens) for text in texts)
            logprobs, k = tuple(_bytes(each.logprobs) for each in found), self._options.top_logprobs
            of_top = (TopLogprobs(k, each.top_ids.numpy().tobytes(), _bytes(each.top_logprobs)) for each in found)
            top = tuple(of_top) if k else ()
            self._emit(LogprobsComputed(key=command.key, attempt=command.attempt, logprobs=logprobs, top=top))

    def _refuse(self, command: ComputeLogprobs, reason: str) -> None:
        self._emit(LogprobsComputed(key=command.key, attempt=command.attempt, error=reason))


def _bytes(logprobs: torch.Tensor) -> bytes:
    return logprobs.numpy().astype("<f4").tobytes()
