"""The steps of an imported run that count, with what they took; refuses what nothing else can tell."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.messages.errors import UserFault
from penstock.runtime.prediction.imports.dialects import DIALECTS, dialect_of, is_overlapped, steps_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.runtime.prediction.imports.about import About
    from penstock.runtime.prediction.imports.dialects import Step
    from penstock.runtime.prediction.imports.read import Log

    Floats = NDArray[np.float64]

OVERLAP: Final = 0.97
"""Of generation and training together: a step that takes less must have overlapped them."""
MIN_STEPS: Final = 3
TOLD: Final = ("generation_s", "training_s", "sample_s", "max_tokens", "num_samples")
"""Figures that a fit takes from every step."""
NEARLY_ALL: Final = 0.75
"""Of the steps: what so many say is expected of all, and a step that does not say it is left out."""


class Measured:
    """One run; the first of its steps is left out: caches are cold, kernels are compiled."""

    def __init__(self, log: Log, about: About, *, forced: str | None = None) -> None:
        """
        Args:
            log: its metrics by step.
            about: what it does not say.
            forced: the system that wrote it; None: found by the names of the metrics.

        Raises:
            UserFault: too few steps, or a figure is missing that nothing else tells.
        """
        self.system = dialect_of(log, forced)
        self.dialect = DIALECTS[self.system]
        steps = steps_of(log, self.dialect)
        if len(steps) < MIN_STEPS:
            raise UserFault(_too_few(self.system, len(steps)))
        self.steps, self.left_out = _whole(steps[1:])
        """The latter say less than nearly all others, as a figure of theirs is missing or is no number."""
        self.about = about
        self.is_overlapped = is_overlapped(log, self.dialect) or self._must_overlap()
        self.is_even = np.array([step.number % 2 == 0 for step in self.steps])
        self.step_s = self.column("step_s")
        self.mean = self.column("mean_tokens")
        self.num_samples = self._samples()
        """Of each step."""
        self.max_response_tokens = about.max_response_tokens or self._longest_logged()

    @property
    def policy(self) -> str:
        """The staleness policy that is closest to what the run did."""
        return self.dialect.overlap_policy if self.is_overlapped else "sync"

    @property
    def mean_tokens(self) -> float:
        """Of all responses."""
        return float(np.average(self.mean, weights=self.num_samples))

    @property
    def mean_step_s(self) -> float:
        """Without validation and checkpoints, which a simulation of the run leaves out."""
        return float((self.step_s - self._besides_s()).mean())

    @property
    def learner_busy(self) -> float:
        """Share of that time."""
        return min(1.0, float(self.training_s().mean()) / self.mean_step_s)

    @property
    def engines_busy(self) -> float:
        """Likewise; engines of a run that overlaps are not logged to idle."""
        generation_s = self.generation_s()
        return 1.0 if generation_s is None else min(1.0, float(generation_s.mean()) / self.mean_step_s)

    def column(self, name: str) -> Floats:
        """A figure of every step; NaN where one does not say it."""
        return np.array([getattr(step, name) for step in self.steps], dtype=np.float64)

    def knows(self, name: str) -> bool:
        """Whether every step says it."""
        return all(getattr(step, name) is not None for step in self.steps)

    def mean_of(self, name: str) -> float | None:
        """Over the steps that say it."""
        values = [value for step in self.steps if (value := getattr(step, name)) is not None]
        return statistics.fmean(values) if values else None

    def generation_s(self) -> Floats | None:
        """Seconds of each whole batch; None where batches overlap.

        Raises:
            UserFault: they do not, and nothing tells them from training.
        """
        if self.knows("generation_s"):
            return self.column("generation_s")
        if self.is_overlapped:
            return None
        if self.about.generation_share is None:
            raise UserFault(
                f"{self.system}: the log does not tell generation from training "
                f"({' or '.join(self.dialect.generation_s)}): log these too, or say what share of a step it takes: "
                "--about generation_share=0.6"
            )
        share: Floats = self.step_s * self.about.generation_share
        return share

    def training_s(self) -> Floats:
        """Seconds of each step in which the learner was at work: without overlap all that nothing else took.

        Raises:
            UserFault: generation and training overlap, and no metric says how long training took.
        """
        generation_s = None if self.is_overlapped else self.generation_s()
        if generation_s is None:
            if not self.knows("training_s"):
                names = ", ".join(self.dialect.training_s)
                raise UserFault(f"{self.system}: no step says how long it trained ({names})")
            return self.column("training_s")
        rest: Floats = self.step_s - generation_s - self.others_s() - self._filled("reward_s")
        return np.maximum(rest, 1e-6)

    def others_s(self) -> Floats:
        """Seconds of each step for new weights, checkpoints and validation."""
        others: Floats = self._besides_s() + self._filled("publish_s")
        return others

    def _besides_s(self) -> Floats:
        besides: Floats = self._filled("checkpoint_s") + self._filled("besides_s")
        return besides

    def _filled(self, name: str) -> Floats:
        return np.array([getattr(step, name) or 0.0 for step in self.steps], dtype=np.float64)

    def _must_overlap(self) -> bool:
        known = [
            (step.step_s, step.generation_s + step.training_s)
            for step in self.steps
            if step.generation_s is not None and step.training_s is not None
        ]
        return bool(known) and sum(step for step, _ in known) < OVERLAP * sum(parts for _, parts in known)

    def _samples(self) -> Floats:
        if self.about.samples is not None:
            return np.full(len(self.steps), float(self.about.samples))
        if not self.knows("num_samples"):
            raise UserFault(
                f"{self.system}: the log does not say how many samples a step has; say it: --about samples=512"
            )
        return np.maximum(1.0, np.round(self.column("num_samples")))

    def _longest_logged(self) -> int:
        longest = max((step.max_tokens for step in self.steps if step.max_tokens is not None), default=None)
        if longest is None:
            raise UserFault(
                f"{self.system}: the log does not say how long the longest response was "
                f"({' or '.join(self.dialect.max_tokens)}); say where responses are cut off: "
                "--about max_response_tokens=8192"
            )
        return max(1, math.ceil(longest))


def _whole(steps: list[Step]) -> tuple[list[Step], list[Step]]:
    counts = {name: sum(getattr(step, name) is not None for step in steps) for name in TOLD}
    wanted = [name for name, count in counts.items() if count >= NEARLY_ALL * len(steps)]
    kept: list[Step] = []
    lacking: list[Step] = []
    for step in steps:
        (lacking if any(getattr(step, name) is None for name in wanted) else kept).append(step)
    return (kept, lacking) if len(kept) >= MIN_STEPS - 1 else (steps, [])


def _too_few(system: str, count: int) -> str:
    dialect = DIALECTS[system]
    both = "; prime-rl writes these into two files, the trainer's and the orchestrator's: give both"
    return (
        f"{system}: {count} steps say how long they took ({' or '.join(dialect.step_s)}) and how long their responses "
        f"were ({' or '.join(dialect.mean_tokens)}); {MIN_STEPS} are the least, and the first is left out"
        + (both if system == "prime-rl" else "")
    )
