"""What a tracker of experiments is, and what it is given.

Invariants:

* A tracker lives in a process of its own (:mod:`penstock.runtime.observability.tracker_process`). It may raise, hang,
  print or end its process: the run does not wait for it before its end, and then only so long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Everything that a tracker is opened with."""

    tracker: str
    """As the scenario names it."""
    name: str
    """Of the run's folder; the same when the run is resumed."""
    run_folder: Path
    folder: Path
    """In it, for the tracker's own files; it is there."""
    scenario: Mapping[str, Any]
    """As it was resolved: blocks of keys."""
    options: Mapping[str, Any]
    """``options:`` of the tracker."""
    resumes: bool
    """An earlier drive of this run has told a tracker of this name."""


class TrackedSample(NamedTuple):
    """One sample as text. Prompt, response and reason were written by models and strangers."""

    name: str
    """``12/3``: group and index; of an evaluation ``e12/3``."""
    prompt: str
    response: str
    label: str
    reward: float | None
    components: Mapping[str, float]
    fate: str
    """In words: ``trained at step 4``."""
    reason: str
    """Why it failed; empty where it did not."""


class Tracker(Protocol):
    """What is told how a run goes. What it raises is told to the user once; the next call comes all the same."""

    def metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """A step, or an evaluation, whose figures are named ``eval/DATASET/FIGURE``.

        Args:
            version: that the step made, or that was evaluated. Those of evaluations may come late.
            metrics: finite numbers by name.
        """
        ...

    def samples(self, version: int, samples: Sequence[TrackedSample]) -> None:
        """Some samples, the newest first; ``version``: of the last step."""
        ...

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """The run is over: keep what is not kept yet, and close.

        Args:
            summary: ``summary.json`` of the run.
            files: to keep with it: the report, the picture of its lanes (PNG) where there is one, and the summary.
        """
        ...
