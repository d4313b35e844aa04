"""The critic of PPO: predicts, before each trained token, the reward that is still to come.

Invariants:

* A value belongs to a trained token and is read where that token is predicted, so it depends on what stands before it
  and not on the token itself. No other place has a value.
* With a trunk of its own it starts as a copy of the policy, and nothing of its gradient reaches the policy. With the
  policy's trunk only the head is its own. Either way the head starts at 0, so the first values are 0.
* Head and values are at least float32, whatever the trunk computes in.
* Where the policy is sharded over ranks, trunk and head are too.
* What ``state`` gave and ``restore`` took makes the next step the same, bit for bit.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn

from penstock.backends.learners.checkpoints.shards import is_divided
from penstock.backends.learners.learning_rate import critic_learning_rate
from penstock.backends.learners.torch.attention import token_inputs
from penstock.backends.learners.torch.model import CheckpointError
from penstock.backends.learners.torch.optimizer import MASTER, MasterAdamW
from penstock.backends.learners.torch.parallel import (
    copies_group,
    fill_like,
    is_sharded,
    load_into,
    shard,
    tensor_group,
    without_memory,
)
from penstock.backends.learners.worker_group.workers import SOLO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from penstock.backends.learners.batch.packing import PackedTokens
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.layout import Layout
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.training.loss_scale import LossScale
    from penstock.backends.learners.training.step import ValueTargets, ValueTerms
    from penstock.backends.learners.worker_group.workers import WorkerGroup

PREFIX: Final = "critic/"
WEIGHT: Final = "weight/"


class Critic:
    """Owns the weights that predict values, and their optimizer."""

    def __init__(
        self,
        policy: PackedModel,
        options: LearnerOptions,
        *,
        num_steps: int,
        scale: LossScale | None = None,
        workers: WorkerGroup = SOLO,
    ) -> None:
        """
        Args:
            policy: as it is before the first step; what the trunk is copied from or shared with.
            options: the ``learner:`` block.
            num_steps: of the whole run, for the schedule.
            scale: of the losses; see :class:`.MasterAdamW`.
            workers: the ranks that the policy is on.

        Raises:
            CheckpointError: the architecture has no trunk that could be told from its output head.
        """
        self.is_shared = options.objective.critic == "shared"
        self._options = options
        self._num_steps = num_steps
        self._device = policy.device
        self._layout: Layout = policy.layout
        dtype = torch.promote_types(policy.dtype, torch.float32)
        self._head = nn.Linear(policy.hidden_size, 1, dtype=dtype, device=policy.device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._module = nn.ModuleDict({"head": self._head})
        if not self.is_shared:
            self._module["trunk"] = _copied_trunk(policy, options, workers)
        if is_sharded(policy.model):
            shard(self._head, workers, options, compute_dtype=dtype)
        self._dtype, self._trunk_dtype = dtype, policy.dtype
        self._optimizer = MasterAdamW(
            self._module,
            options,
            compute_dtype=policy.dtype,
            scale=scale,
            workers=workers,
            copies=copies_group(workers, options),
            tensor_ranks=tensor_group(workers, options),
        )

    @property
    def roots(self) -> list[nn.Module]:
        """What is called as a whole."""
        return list(self._module.values())

    def values(self, packed: PackedTokens, hidden: Tensor | None) -> Tensor:
        """Before each trained token of a micro-batch ``[T]``.

        Args:
            packed: the micro-batch.
            hidden: what the policy's output head was given there ``[T, H]``; read only with ``critic: shared``.
        """
        if self.is_shared:
            assert hidden is not None, "the policy was asked for it"
        else:
            hidden = self._own_hidden(packed)
        return cast("Tensor", self._head(hidden.to(self._dtype)))[:, 0]

    def terms(self, packed: PackedTokens, hidden: Tensor | None, targets: ValueTargets) -> ValueTerms:
        """Loss and figures of a micro-batch; arguments as for :meth:`values`."""
        # Of a stand-in for a micro-batch nothing counts.
        values = self.values(packed, hidden)[: len(targets.weights)]
        return targets.terms(values, self._options.objective)

    def step(self, step: int, *, loss: float, name: str) -> float:
        """Change the weights; the norm of the gradient before clipping.

        Args:
            step: batches before this one.
            loss: of this step, for the check and the message.
            name: of this step, for the message.

        Raises:
            DivergedError: see :meth:`.MasterAdamW.step`.
        """
        return self._optimizer.step(self.learning_rate(step), loss=loss, name=f"{name}, critic")

    def sum_gradients(self) -> None:
        """See :meth:`.MasterAdamW.sum_gradients`."""
        self._optimizer.sum_gradients()

    def forget_gradients(self) -> None:
        """See :meth:`.MasterAdamW.forget_gradients`."""
        self._optimizer.forget_gradients()

    def learning_rate(self, step: int) -> float:
        """Of the batch that ``step`` others precede."""
        return critic_learning_rate(step, self._options, num_steps=self._num_steps)

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer, not copied, each under ``critic/…``; of a weight with a ``master`` that one only."""
        optimizer = self._optimizer.state()
        weights = {
            f"{WEIGHT}{name}": parameter
            for name, parameter in self._module.named_parameters()
            if f"{MASTER}/{name}" not in optimizer
        }
        return {f"{PREFIX}{key}": tensor for key, tensor in (weights | optimizer).items()}

    def layouts(self) -> dict[str, Tensor]:
        """See :meth:`.MasterAdamW.layouts`."""
        weights = {f"{WEIGHT}{name}": weight for name, weight in self._module.named_parameters() if is_divided(weight)}
        return {f"{PREFIX}{key}": tensor for key, tensor in (weights | self._optimizer.layouts()).items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a copy of what ``state`` gave; entries of others are not looked at.

        Raises:
            CheckpointError: it is of no critic, or of another one.
        """
        mine = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items() if key.startswith(PREFIX)}
        parameters = dict(self._module.named_parameters())
        weights = {
            key.partition("/")[2]: tensor for key, tensor in mine.items() if key.startswith((WEIGHT, f"{MASTER}/"))
        }
        found = {name: list(tensor.shape) for name, tensor in weights.items()}
        expected = {name: list(parameter.shape) for name, parameter in parameters.items()}
        if found != expected:
            held = f"one of {len(found)} weights" if found else "none"
            raise CheckpointError(
                f"learner.objective.critic: {self._options.objective.critic} is a critic of {len(expected)} weights, "
                f"and the checkpoint has {held}; resume with the objective that it was written with, or start a new "
                "run from its model (model.path)"
            )
        for name, parameter in parameters.items():
            load_into(parameter, weights[name])
        self._optimizer.restore(mine)

    def _own_hidden(self, packed: PackedTokens) -> Tensor:
        """What the trunk says before each trained token ``[T, H]``."""
        inputs, places = token_inputs(packed, self._layout, device=self._device, dtype=self._trunk_dtype)
        output = self._module["trunk"](**inputs, use_cache=False)
        hidden = cast("Tensor", output.last_hidden_state).flatten(0, 1)
        return hidden[places]


def _copied_trunk(policy: PackedModel, options: LearnerOptions, workers: WorkerGroup) -> nn.Module:
    trunk = policy.model.base_model
    if trunk is policy.model:
        raise CheckpointError(
            f"learner.objective.critic: own needs a model whose trunk can be told from its output head, and "
            f"{type(policy.model).__name__} is in one piece; set critic: shared"
        )
    if not is_sharded(policy.model):
        return copy.deepcopy(trunk).requires_grad_()  # also what learner.freeze leaves of the policy
    built = without_memory(cast("PreTrainedModel", trunk))
    fill_like(built, trunk, workers, options, compute_dtype=policy.dtype)
    return built
