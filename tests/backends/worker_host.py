"""The process of a learner's worker, in tests that drive the worker alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backends.learners.worker_group.words import LearnerAnswer
    from penstock.messages.base import Metric


class Host:
    """Keeps what the worker says."""

    def __init__(self) -> None:
        self.answers: list[LearnerAnswer] = []
        self.errors: list[BaseException] = []

    def emit(self, answer: LearnerAnswer, /) -> None:
        self.answers.append(answer)

    def fail(self, error: BaseException, /) -> None:
        self.errors.append(error)

    def check_stop(self) -> None:
        pass

    def show(self, gauges: tuple[Metric, ...], /) -> None:
        pass
