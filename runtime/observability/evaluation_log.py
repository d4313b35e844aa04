"""A function of the user's that is called with each dataset of each finished evaluation (``evaluation.log_function``).

It lives as a tracker does, in a process of its own that reads the run's files: the run does not wait for it, what it
raises is told once and costs that one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.backends.ledger.evaluation_answers import answers_file
from penstock.backends.processes.hook_calling import Hook

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.backends.trackers.protocol import TrackedSample
    from penstock.runtime.observability.evaluations import EvaluationRow

KEY: Final = "evaluation.log_function"


class FinishedEvaluation(NamedTuple):
    """What the function is given."""

    number: int
    """Of the evaluation, from 0."""
    dataset: str
    """Its name."""
    version: int
    """That was asked for."""
    figures: Mapping[str, float]
    """``reward_mean``, ``pass@1``, ``maj@8``, …, as docs/evaluation.md lists them."""
    samples_file: Path
    """Its answers, one JSON object a line. They are written beside the run: the last of them may still be missing."""


class EvaluationLog:
    """Implements :class:`~penstock.backends.trackers.protocol.Tracker`."""

    def __init__(self, spec: str, run_folder: Path) -> None:
        """
        Raises:
            UserCodeError: it cannot be loaded.
        """
        self._function = Hook[object](spec, KEY)
        self._run_folder = run_folder

    def finished(self, row: EvaluationRow) -> Iterator[FinishedEvaluation]:
        """Each dataset of an evaluation."""
        for name, figures in row.datasets().items():
            file = answers_file(self._run_folder, row.evaluation, name)
            yield FinishedEvaluation(row.evaluation, name, row.version, figures, file)

    def call(self, finished: FinishedEvaluation) -> None:
        """
        Raises:
            UserCodeError: it raised something.
        """
        self._function(finished)

    def metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """It is told of evaluations only, and otherwise than a tracker."""

    def samples(self, version: int, samples: Sequence[TrackedSample]) -> None:
        """As above."""

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """As above."""
