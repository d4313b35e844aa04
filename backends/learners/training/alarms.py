"""What is noticed about a run that is trained with the wrong numbers: engine and learner that compute different models,
and a first step on which the policy is not where it must be, or an optimizer step whose loss or gradient is no number.

Before the first step nothing has moved: every token was made by the very weights that are trained, the policy is the
one that opened the batch, and the reference is a copy of it. So three figures must be 0 but for rounding, whatever the
objective is, and one that is not says that something is wrong with the run and not with the learning.

Invariants:

* Only samples are compared that the trained weights themselves have made, whole: other tokens differ because the policy
  has moved, and those of a sample that it finished because the cache behind them is that of older weights
  (``staleness.update_mode: in_flight``).
* The same is said once, and again when it has been well in between.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from penstock.backends.learners.objectives.mismatch import (
    FRESH_DIFFERENCE,
    FRESH_TOKENS,
    TEMPERATURE_SHARE,
    TEMPERATURE_SLOPE,
)
from penstock.backends.learners.objectives.spec import LOSSES
from penstock.backends.learners.objectives.unequal_weights import (
    ESS,
    HEAVY,
    HEAVY_WEIGHT,
    LOG_RATIO,
    SMALLEST_ESS,
    unequal,
)
from penstock.messages.errors import DivergedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.backends.learners.objectives.unequal_weights import Reason
    from penstock.backends.learners.options import LearnerOptions

MISMATCH_NATS: Final = {"float32": 1e-3, "float16": 0.02}
"""Mean difference of log-probs, under the same weights, from which on engine and learner compute different models, by
the type of number that both compute in."""
LOOSE_NATS: Final = 0.1
"""The same in other types of numbers."""
FIRST_STEP_NATS: Final = {"float32": 1e-4, "float16": 0.02}
"""The same at the first step, before training has made weights large and rounding with them."""
FIRST_STEP_KL: Final = {"float32": 1e-8}
"""How far the policy may be from itself, and from the reference, before it has moved."""
LOOSE_KL: Final = 1e-3
"""The same in other types of numbers, where two forward passes round differently."""
ALARM: Final = "train/mismatch_alarm"
LOSS_SCALE: Final = "train/loss_scale"
OVERFLOWS: Final = "train/overflown_updates"
"""Optimizer steps that were left out since float16 could not hold their gradients at that scale."""
MAIN_SHARE: Final = 0.5
"""Of the squared difference, from which on what explains it is its cause."""
TEMPERATURE_SLOPE_LIMIT: Final = 0.01
"""How far the engine's temperature may be from the learner's, as a share of it. Twice this is still below what bfloat16
rounds, so where temperature is what explains the difference of enough tokens, its size does not matter."""
ENOUGH_TOKENS: Final = 100
CORRECTION: Final = "or set learner.objective.old_logprobs=recompute to correct for it"


class Alarms:
    """Looks at the figures of each batch."""

    def __init__(self, options: LearnerOptions, dtype: str, *, quantizes: bool = False) -> None:
        """
        Args:
            options: the ``learner:`` block.
            dtype: that the model is computed in.
            quantizes: engines compute with weights in FP8.
        """
        self._rounding = "fp8" if quantizes else dtype
        """What of engine and learner rounds most."""
        self._options = options
        self._dtype = dtype
        self._is_alarmed = False
        self._decides: Reason | None = None
        self._is_overflown = False

    def hear(self, figures: dict[str, float], *, version: int) -> tuple[str, ...]:
        """Sentences for people about what is wrong with this batch. Adds ``train/mismatch_alarm``, 1 or 0, where
        there are tokens to compare.

        Args:
            figures: of the batch.
            version: that it made.
        """
        notices = list(self._mismatch(figures, version)) if FRESH_DIFFERENCE in figures else []
        notices += self._distance(figures, version)
        notices += self._overflow(figures, version) if OVERFLOWS in figures else ()
        return (*notices, *self._first_step(figures)) if version == 1 else tuple(notices)

    def _mismatch(self, figures: dict[str, float], version: int) -> Iterator[str]:
        difference, count = figures[FRESH_DIFFERENCE], figures.get(FRESH_TOKENS, 0.0)
        limit = (FIRST_STEP_NATS if version == 1 else MISMATCH_NATS).get(self._rounding, LOOSE_NATS)
        slope = figures.get(TEMPERATURE_SLOPE, 0.0)
        is_temperature = figures.get(TEMPERATURE_SHARE, 0.0) > MAIN_SHARE and slope < 1
        is_too_warm = is_temperature and abs(slope) > TEMPERATURE_SLOPE_LIMIT and count >= ENOUGH_TOKENS
        was, self._is_alarmed = self._is_alarmed, difference > limit or is_too_warm
        figures[ALARM] = float(self._is_alarmed)
        if self._is_alarmed and not was:
            cause = (
                f"as if it drew at {1 / (1 - slope):.3g} times the learner's temperature: compare sampling.temperature "
                "with what the engine draws at"
                if is_temperature
                else "and not as another temperature would make it: compare model.dtype, the tokenizer and weights of "
                "both, and what the engine does to them (quantisation, rotary positions, kernels)"
            )
            yield (
                f"step {version}: the log-probs of engine and learner differ by {difference:.3g} nats a token "
                f"(rounding in {self._rounding} is below {limit:g}) on the {count:,.0f} tokens of samples that the "
                f"trained weights have made whole, so the engine computes another model than the learner, {cause}; "
                f"{CORRECTION}"
            )

    def _distance(self, figures: Mapping[str, float], version: int) -> Iterator[str]:
        # A likelihood weighs no token by what drew it.
        objective = self._options.objective
        is_looked_at = LOSSES[objective.policy_loss].has_ratio and figures.get(ESS, 1.0) < SMALLEST_ESS
        was, self._decides = self._decides, unequal(figures.get) if is_looked_at else None
        if self._decides in (None, was):
            return
        worth = f"step {version}: the batch is worth {figures[ESS]:.0%} of its tokens ({ESS})"
        if self._decides == "far":
            yield (
                f"{worth}: the policy is far from what drew them, and a few of them decide the step. Lower "
                f"learner.learning_rate ({self._options.learning_rate:g}) or staleness.max_staleness, or bound the "
                f"ratio more tightly: learner.objective.clip_high ({objective.clip_high:g}), clip_low "
                f"({objective.clip_low:g})"
            )
            return
        can_bound = "dual_clip" in LOSSES[objective.policy_loss].keys and objective.dual_clip is None
        yield (
            f"{worth}: the policy is near what drew them ({figures[LOG_RATIO]:.2g} nats a token, {LOG_RATIO}), but few "
            f"tokens that it finds more than {HEAVY:g} times likelier hold {figures[HEAVY_WEIGHT]:.0%} of the weight "
            f"({HEAVY_WEIGHT}) and decide the step. A larger learner.groups_per_batch makes them weigh less"
            + ", and learner.objective.dual_clip bounds those with a negative advantage"
            * can_bound
        )

    def _overflow(self, figures: Mapping[str, float], version: int) -> Iterator[str]:
        count = figures[OVERFLOWS]
        was, self._is_overflown = self._is_overflown, count > 0
        if self._is_overflown and not was:
            yield (
                f"step {version}: gradients did not fit into float16 at a loss scale of {figures[LOSS_SCALE]:g}, so "
                f"{count:g} of its optimizer steps changed nothing and the scale was halved. A few of these belong to "
                f"float16; {OVERFLOWS} counts them. If they do not end, lower learner.learning_rate or set "
                "model.dtype: bfloat16"
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


def non_finite(*, loss: float, norm: float, name: str) -> DivergedError | None:
    """The error of a step that must not be made; None where it may.

    Args:
        loss: of the step.
        norm: of its gradient.
        name: of the step, for the message.
    """
    if math.isfinite(norm) and math.isfinite(loss):
        return None
    return DivergedError(
        f"{name}: the training has diverged: the loss is {loss} and the gradient norm {norm}, both must be finite; the "
        "weights were not changed. Lower learner.learning_rate or learner.max_grad_norm, or look at the rewards of "
        "this batch"
    )
