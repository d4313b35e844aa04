"""The figures of a batch from those of its optimizer steps.

Invariants:

* One step has the figures that it has. Those of several are means, weighted as the loss weighs: by tokens, or by
  samples where the loss is a mean over samples.
* What compares the engine with the learner is that of the first step: later ones have moved away from the weights that
  the engine had.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.learners.objectives.mismatch import COMPARISON_SUMS
from penstock.backends.learners.objectives.objective import finished

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backends.learners.batch.updates import Update
    from penstock.backends.learners.objective_names import Reduction

OF_FIRST_STEP: Final = (
    "train/train_rollout_logprob_abs_diff",
    "train/train_rollout_kl",
    *COMPARISON_SUMS,
)
LOSSES: Final = ("train/loss", "train/pg_loss")
"""Means over samples under ``reduction: constant``, where the other figures are means over tokens."""
NORMS: Final = ("train/grad_norm", "train/critic-grad_norm")


class _Step(NamedTuple):
    totals: Mapping[str, float]
    num_tokens: int
    num_samples: int


class BatchFigures:
    """Collects what the steps of one batch report."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._steps: list[_Step] = []

    def add(self, totals: Mapping[str, float], update: Update) -> None:
        """The sums over the tokens of one step, and the norms of its gradients."""
        self._steps.append(_Step(totals, update.num_tokens, update.num_samples))

    def result(self) -> dict[str, float]:
        """By metric name."""
        steps, first = self._steps, self._steps[0].totals
        names = {name: None for step in steps for name in step.totals}
        totals = dict(first) if len(steps) == 1 else {name: self._joined(name) for name in names}
        figures = finished(totals)
        if len(steps) > 1:
            figures |= {f"{name}_max": max(s.totals[name] for s in steps) for name in NORMS if name in names}
            if "train/ppo_kl" in first:
                figures["train/first_ppo_kl"] = first["train/ppo_kl"]
        return {**figures, "train/num_updates": float(len(steps))}

    def _joined(self, name: str) -> float:
        if name in OF_FIRST_STEP:
            return self._steps[0].totals.get(name, 0.0)
        steps = [step for step in self._steps if name in step.totals]
        if name.startswith("sums/"):
            return sum(step.totals[name] for step in steps)
        weights = [self._weight(step, name) for step in steps]
        return sum(w * step.totals[name] for w, step in zip(weights, steps, strict=True)) / sum(weights)

    def _weight(self, step: _Step, name: str) -> int:
        if name in NORMS:
            return 1
        is_by_sample = self._reduction == "sequence_mean" or (self._reduction == "constant" and name in LOSSES)
        return step.num_samples if is_by_sample else step.num_tokens
