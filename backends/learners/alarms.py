"""What is noticed about a run that is trained with the wrong numbers: engine and learner that compute different models,
and a first step on which the policy is not where it must be.

Before the first step nothing has moved: every token was made by the very weights that are trained, the policy is the
one that opened the batch, and the reference is a copy of it. So three figures must be 0 but for rounding, whatever the
objective is, and one that is not says that something is wrong with the run and not with the learning.

Invariants:

* Only tokens that the trained weights themselves have made are compared: others differ because the policy has moved.
* The same is said once, and again when it has been well in between.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.objectives.objective import FRESH_DIFFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.learners.options import LearnerOptions

MISMATCH_ALARM_NATS: Final = 0.1
"""Mean difference of log-probs, under the same weights, from which on engine and learner compute different models."""
FIRST_STEP_NATS: Final = {"float32": 1e-4}
"""The same at the first step, by the type of number that both compute in; others have the one above."""
FIRST_STEP_KL: Final = {"float32": 1e-8}
"""How far the policy may be from itself, and from the reference, before it has moved."""
LOOSE_KL: Final = 1e-3
"""The same in other types of numbers, where two forward passes round differently."""
ALARM: Final = "train/mismatch_alarm"
WHAT_DIFFERS: Final = (
    "compare sampling.temperature and top_p, model.dtype, and the tokenizer and weights of both, or set "
    "learner.objective.old_logprobs=recompute to correct for it"
)


class Alarms:
    """Looks at the figures of each batch."""

    def __init__(self, options: LearnerOptions, dtype: str) -> None:
        """
        Args:
            options: the ``learner:`` block.
            dtype: that the model is computed in.
        """
        self._options = options
        self._dtype = dtype
        self._is_alarmed = False

    def hear(self, figures: dict[str, float], *, version: int) -> tuple[str, ...]:
        """Sentences for people about what is wrong with this batch. Adds ``train/mismatch_alarm``, 1 or 0, where
        there are tokens to compare.

        Args:
            figures: of the batch.
            version: that it made.
        """
        notices = list(self._mismatch(figures, version)) if FRESH_DIFFERENCE in figures else []
        return (*notices, *self._first_step(figures)) if version == 1 else tuple(notices)

    def _mismatch(self, figures: dict[str, float], version: int) -> Iterator[str]:
        difference = figures[FRESH_DIFFERENCE]
        limit = FIRST_STEP_NATS.get(self._dtype, MISMATCH_ALARM_NATS) if version == 1 else MISMATCH_ALARM_NATS
        was, self._is_alarmed = self._is_alarmed, difference > limit
        figures[ALARM] = float(self._is_alarmed)
        if self._is_alarmed and not was:
            yield (
                f"step {version}: the log-probs of engine and learner differ by {difference:.3g} nats a token (at most "
                f"{limit:g} is expected in {self._dtype}) on tokens made by the weights that are trained, so the "
                f"engine computes another model than the learner; {WHAT_DIFFERS}"
            )

    def _first_step(self, figures: Mapping[str, float]) -> Iterator[str]:
        limit = FIRST_STEP_KL.get(self._dtype, LOOSE_KL)
        moved = figures.get("train/first_ppo_kl", figures.get("train/ppo_kl", 0.0))
        if self._options.objective.old_logprobs != "engine" and abs(moved) > limit:
            yield (
                f"step 1: train/ppo_kl is {moved:.3g} before the policy has moved, and must be 0: two forward passes "
                "over the same tokens differ. Something in the model draws random numbers (dropout), or a token "
                "depends on the other sequences of its micro-batch"
            )
        distance = figures.get("train/kl_loss", 0.0)
        if figures.get("train/num_updates") == 1 and not math.isnan(distance) and abs(distance) > limit:
            yield (
                f"step 1: train/kl_loss is {distance:.3g} where policy and reference are the same weights, and must be "
                "0: the reference is another model, or is computed otherwise than the policy (model.dtype, "
                "sampling.temperature)"
            )
