"""AdamW on float32 weights, whatever the model computes in.

Invariants:

* Gradients of all micro-batches are summed in float32. A bfloat16 model keeps a float32 copy of each weight, which
  is what the optimizer changes; the model holds its rounded value. (A step of 1e-6 is lost in bfloat16.)
* A step whose gradient is not finite changes nothing and raises.
"""

# torch's hooks and optimizers have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle


class NonFiniteStepError(RuntimeError):
    """Loss or gradient is infinite or not a number; the weights were not changed."""


class MasterAdamW:
    """Owns the float32 weights, their gradients and the optimizer's state."""

    def __init__(
        self, model: nn.Module, *, betas: tuple[float, float], weight_decay: float, max_grad_norm: float
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [_master_of(parameter) for parameter in self._parameters]
        self._max_grad_norm = max_grad_norm
        self._hooks = [
            _add_hook(parameter, _GradientSum(master)) for parameter, master in self._pairs() if master is not parameter
        ]
        matrices = [master for master in self._masters if master.ndim > 1]
        others = [master for master in self._masters if master.ndim <= 1]
        # Decay pulls gains of norms and biases away from where they work, so only matrices decay.
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=betas,
            fused=True,
        )

    def step(self, learning_rate: float, *, loss: float, name: str) -> float:
        """Clip, change the weights, forget the gradients.

        Args:
            learning_rate: of this step.
            loss: of this step, for the check and the message.
            name: of this step, for the message.

        Returns:
            The norm of the gradient before clipping.

        Raises:
            NonFiniteStepError: the loss or the gradient is not finite.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self.forget_gradients()
            raise NonFiniteStepError(
                f"{name}: the loss is {loss} and the gradient norm {norm}, both must be finite; the weights were not "
                "changed. Lower learner.learning_rate or learner.max_grad_norm, or look at the rewards of this batch"
            )
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._round_into_model()
        self.forget_gradients()
        return norm

    def forget_gradients(self) -> None:
        """Drop what the micro-batches of this step have added so far."""
        self._adamw.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Let go of the model, so that another optimizer can take it."""
        for hook in self._hooks:
            hook.remove()

    def _pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        return list(zip(self._parameters, self._masters, strict=True))

    @torch.no_grad()
    def _round_into_model(self) -> None:
        for parameter, master in self._pairs():
            if master is not parameter:
                parameter.copy_(master)


def _master_of(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()


class _GradientSum:
    """A hook that adds a finished gradient to its float32 sum and frees it at once."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if self._master.grad is None:
            self._master.grad = parameter.grad.float()
        else:
            self._master.grad += parameter.grad
        parameter.grad = None


def _add_hook(parameter: nn.Parameter, hook: _GradientSum) -> RemovableHandle:
    added = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return cast("RemovableHandle", added)
