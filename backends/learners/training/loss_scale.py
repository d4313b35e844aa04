"""What the loss is multiplied by before it is sent back, so that gradients of a float16 model do not vanish: float16's
smallest number is 6e-8, and its largest 65,504.

The scale follows what it finds (dynamic loss scaling: Micikevicius et al., Mixed Precision Training, 2018, section
3.2): gradients that overflow halve it, and the optimizer step is left out; after ``GROWTH_STEPS`` steps without, it is
doubled. It is a power of two, so that to divide a float32 gradient by it changes no digit.

Invariants:

* One scale for all optimizers of a learner, since one loss may reach the weights of several.
* It is a function of which steps overflowed. All ranks see the same norms, and so have the same scale.
* It is the same for the torch and the Megatron learner, which has it in the place of megatron-core's own.
* A type of number with float32's exponents has the scale 1, which is never changed, so losses and gradients keep their
  bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.learners.checkpoints.record import CheckpointError
from penstock.backends.learners.training.alarms import LOSS_SCALE, OVERFLOWS
from penstock.messages.errors import DivergedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

INITIAL: Final = 2.0**16
LARGEST: Final = 2.0**24
"""Doubled from here on it would only be halved again: it is where gradients of 0 end, which never overflow."""
SMALLEST: Final = 1.0
"""With it nothing is scaled, and what overflows is the gradient itself."""
GROWTH_STEPS: Final = 200
KEY: Final = "loss_scale/scale_and_good_steps"


class LossScale:
    """Owns the scale."""

    def __init__(self, compute_dtype: torch.dtype) -> None:
        self.is_dynamic = compute_dtype == torch.float16
        self.begin_anew()

    def begin_anew(self) -> None:
        """As if no step had been made."""
        self.value = INITIAL if self.is_dynamic else 1.0
        self._good_steps = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """What is sent back in place of the loss; where the scale is not dynamic, the loss itself."""
        return loss * self.value if self.is_dynamic else loss

    def follow(self, *, has_overflown: bool, name: str) -> None:
        """After an optimizer step of all weights.

        Args:
            has_overflown: gradients of some were not finite.
            name: of the step, for the message.

        Raises:
            DivergedError: they are not, whatever the scale is.
        """
        if not self.is_dynamic:
            return
        if not has_overflown:
            self._good_steps += 1
            if self._good_steps >= GROWTH_STEPS:
                self.value, self._good_steps = min(LARGEST, 2 * self.value), 0
            return
        if self.value <= SMALLEST:
            raise DivergedError(
                f"{name}: the gradient is not finite in float16 even with a loss scale of {SMALLEST:g}: the training "
                "has diverged, or leaves float16's range; the weights were not changed. Lower learner.learning_rate "
                "or set model.dtype: bfloat16"
            )
        self.value, self._good_steps = self.value / 2, 0

    def followed(self, norms: Mapping[str, float], *, name: str) -> dict[str, float]:
        """Move a dynamic scale after an optimizer step of all weights; its figures, without norms that overflowed.

        Args:
            norms: of the gradients by metric name; one that is not finite is of a step that was left out.
            name: of the step, for the message.

        Raises:
            DivergedError: see ``follow``.
        """
        found = {key: norm for key, norm in norms.items() if math.isfinite(norm)}
        figures = {LOSS_SCALE: self.value, OVERFLOWS: float(len(norms) - len(found))}
        self.follow(has_overflown=len(found) < len(norms), name=name)
        return found | figures

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on; of a scale that is never changed nothing."""
        return {KEY: torch.tensor([self.value, self._good_steps], dtype=torch.float64)} if self.is_dynamic else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was taken; entries of others are not looked at.

        Raises:
            CheckpointError: it is of a learner without one.
        """
        if not self.is_dynamic:
            return
        if KEY not in tensors:
            raise CheckpointError(f"the checkpoint has no {KEY}, and float16 is trained with one")
        self.value, self._good_steps = float(tensors[KEY][0]), int(tensors[KEY][1])
