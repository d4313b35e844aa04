"""AdamW on float32 weights, whatever the model computes in.

Invariants:

* Gradients of all micro-batches are summed in float32. A bfloat16 or float16 model keeps a float32 copy of each weight,
  which is what the optimizer changes; the model holds its rounded value. (A step of 1e-6 is lost in either.)
* What ``state`` gave and ``restore`` took makes the next step the same, bit for bit.
* A step whose gradient is not finite changes nothing and raises; under a loss scale, which may be at fault, it changes
  nothing.
* Over ranks a gradient is the sum of theirs, and its norm that of all weights. Every rank comes to the same decision.
  Of sharded weights (DTensors) each rank changes its own share, and ``state`` has shares; ``restore`` takes either.
  Their gradients come summed over the ranks of one copy, and are summed over the copies here.
"""

# torch's hooks and optimizers have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from penstock.backends.learners.checkpoints.shards import division_of, is_divided, local_of
from penstock.backends.learners.torch.model import CheckpointError
from penstock.backends.learners.torch.parallel import load_into
from penstock.backends.learners.training.alarms import non_finite
from penstock.backends.learners.training.loss_scale import LossScale
from penstock.backends.learners.worker_group.workers import SOLO

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.worker_group.workers import WorkerGroup

MASTER: Final = "master"
MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a weight."""
BUCKET_BYTES: Final = 64 * 2**20
"""Of gradients that are added up over ranks at once."""
NORM_EPSILON: Final = 1e-6
"""torch's own, where it clips."""


class MasterAdamW:
    """Owns the float32 weights, their gradients and the optimizer's state."""

    def __init__(
        self,
        model: nn.Module,
        options: LearnerOptions,
        *,
        compute_dtype: torch.dtype = torch.float32,
        scale: LossScale | None = None,
        workers: WorkerGroup = SOLO,
        copies: ProcessGroup | None = None,
        tensor_ranks: ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            model: whose weights are trained.
            options: the ``learner:`` block.
            compute_dtype: what the model computes in, also where its weights are more exact than that here.
            scale: what gradients are multiplied by when they come; None: nothing.
            workers: all ranks.
            copies: the ranks that have the same shares of sharded weights as this one; None: no others have. Of weights
                that are not sharded all ranks have the same.
            tensor_ranks: those that compute together with this one; None: it computes alone.
        """
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._names = list(trained)
        self._parameters = list(trained.values())
        self._masters = [_master_of(parameter) for parameter in self._parameters]
        self._max_grad_norm = options.max_grad_norm
        self._workers = workers
        self._is_rounded = compute_dtype != torch.promote_types(compute_dtype, torch.float32)
        self._scale = scale or LossScale(torch.float32)
        self._is_summed = False
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        if not self._is_sharded:
            copies = None if workers.is_alone else workers.tensors or dist.group.WORLD
        self._copies = copies
        self._tensor_ranks = tensor_ranks
        self._hooks = [
            _add_hook(parameter, _GradientSum(master))
            for parameter, master in zip(self._parameters, self._masters, strict=True)
            if master is not parameter
        ]
        matrices = [master for master in self._masters if master.ndim > 1]
        others = [master for master in self._masters if master.ndim <= 1]
        # Decay pulls gains of norms and biases away from where they work, so only matrices decay.
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=options.betas,
            fused=True,
        )

    def step(self, learning_rate: float, *, loss: float, name: str) -> float:
        """Clip, change the weights, forget the gradients.

        Args:
            learning_rate: of this step.
            loss: of this step, for the check and the message.
            name: of this step, for the message.

        Returns:
            The norm of the gradient before clipping; one that is not finite where it has overflown under a loss scale.

        Raises:
            DivergedError: the loss is not finite, or the gradient where nothing scales it.
        """
        self.sum_gradients()
        norm = self._clip()
        if self._scale.is_dynamic and math.isfinite(loss) and not math.isfinite(norm):
            self.forget_gradients()
            return norm
        if (error := non_finite(loss=loss, norm=norm, name=name)) is not None:
            self.forget_gradients()
            raise error
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._round_into_model()
        self.forget_gradients()
        return norm

    def weights(self) -> list[Tensor]:
        """In float32 or better, with their gradients."""
        return list(self._masters)

    def sum_gradients(self) -> None:
        """Add up over the ranks what each has found alone, and divide by the scale; ``step`` does it otherwise, and not
        twice."""
        if self._is_summed:
            return
        if self._copies is not None:
            self._sum_over_copies(self._copies)
        if self._tensor_ranks is not None:
            self._align(self._tensor_ranks)
        if self._scale.is_dynamic:
            for gradient in (master.grad for master in self._masters if master.grad is not None):
                gradient.mul_(1.0 / self._scale.value)
        self._is_summed = True

    def _sum_over_copies(self, copies: ProcessGroup) -> None:
        # A weight that no rank has reached is left alone, as it would be on one.
        found = torch.tensor([float(master.grad is not None) for master in self._masters])
        is_reached = cast("list[float]", self._workers.max_(found.to(self._workers.device)).tolist())
        for master, reached in zip(self._masters, is_reached, strict=True):
            if reached and master.grad is None:
                master.grad = torch.zeros_like(master)
        gradients = [local_of(master.grad) for master in self._masters if master.grad is not None]
        _exchange(gradients, copies, source=None)

    def _align(self, tensor_ranks: ProcessGroup) -> None:
        """Of a weight that all of these ranks have, each has found the gradient by itself. They are the same but for
        kernels that do not round alike twice, after which the copies would part; so those of the first are taken."""
        same = [master.grad for master in self._masters if master.grad is not None and _is_on_all(master)]
        _exchange([local_of(grad) for grad in same], tensor_ranks, source=dist.get_global_rank(tensor_ranks, 0))

    def forget_gradients(self) -> None:
        """Drop what the micro-batches of this step have added so far."""
        self._adamw.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None  # there is one yet if a backward pass has broken off
        self._is_summed = False

    @torch.no_grad()
    def _clip(self) -> float:
        """The norm of the gradient, which is scaled down to the largest that is allowed."""
        if not self._is_sharded:
            return float(torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm))
        found = [(master, local_of(master.grad)) for master in self._masters if master.grad is not None]
        shares = [share for _, share in found]
        num_tensor_ranks = 1 if self._tensor_ranks is None else self._tensor_ranks.size()
        squares = torch.stack(
            [
                share.square().sum(dtype=torch.float64) / (num_tensor_ranks if _is_on_all(master) else 1)
                for master, share in found
            ]
        ).sum()
        num_copies = 1 if self._copies is None else self._copies.size()
        norm = math.sqrt(float(self._workers.sum_(squares)) / num_copies)
        if norm > self._max_grad_norm - NORM_EPSILON:
            for share in shares:
                share.mul_(self._max_grad_norm / (norm + NORM_EPSILON))
        return norm

    def state(self) -> dict[str, Tensor]:
        """What a step depends on beside the model and its gradients, not copied: ``exp_avg/NAME``, ``exp_avg_sq/NAME``
        and ``step/NAME`` of each weight that was ever changed, ``master/NAME`` where the model or its checkpoint holds
        a rounded one."""
        tensors: dict[str, Tensor] = {}
        for name, parameter, master in zip(self._names, self._parameters, self._masters, strict=True):
            if master is not parameter or self._is_rounded:
                tensors[f"{MASTER}/{name}"] = master
            # Not indexing: that would make an empty state, as if there had been a step.
            for kind, value in self._adamw.state.get(master, {}).items():
                tensors[f"{kind}/{name}"] = value
        return tensors

    def layouts(self) -> dict[str, Tensor]:
        """Key that ``state`` may have → a tensor that is divided as the tensor there, for what is divided."""
        divided = {name: master for name, master in zip(self._names, self._masters, strict=True) if is_divided(master)}
        return {f"{kind}/{name}": master for name, master in divided.items() for kind in (MASTER, *MOMENTS[1:])}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a copy of what ``state`` gave; entries of other kinds are not looked at.

        Raises:
            CheckpointError: it is that of a model with other weights.
        """
        state = self._checked(tensors)
        for name, master in zip(self._names, self._masters, strict=True):
            if f"{MASTER}/{name}" in state:
                load_into(master, state[f"{MASTER}/{name}"])
            if f"{MOMENTS[0]}/{name}" in state:
                # Copied, so that nothing stays on the mapping of a file; see the invariants of the model.
                self._adamw.state[master] = {
                    kind: _kept(master, state[f"{kind}/{name}"], is_shared=kind != MOMENTS[0]) for kind in MOMENTS
                }

    def _checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        masters = dict(zip(self._names, self._masters, strict=True))
        state = {key: tensor for key, tensor in tensors.items() if key.partition("/")[0] in (MASTER, *MOMENTS)}
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            if name not in masters or (kind != "step" and masters[name].shape != tensor.shape):
                found = list(masters[name].shape) if name in masters else "no such weight"
                raise CheckpointError(
                    f"the optimizer state has {key} with shape {list(tensor.shape)}, and the model has {found}; the "
                    "checkpoint is of another model, was written with another version of transformers, or with another "
                    "learner.freeze or learner.train_only"
                )
        for name, parameter, master in zip(self._names, self._parameters, self._masters, strict=True):
            moments = [kind for kind in MOMENTS if f"{kind}/{name}" in state]
            needs_master = master is not parameter or self._is_rounded
            if len(moments) not in (0, len(MOMENTS)) or (needs_master and f"{MASTER}/{name}" not in state):
                raise CheckpointError(
                    f"the optimizer state of {name} is not whole: expected {', '.join((*MOMENTS, MASTER))} (the last "
                    f"with bfloat16 and float16 only), found {', '.join(moments) or 'nothing'} of the first three"
                )
        return state

    def close(self) -> None:
        """Let go of the model, so that another optimizer can take it."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _round_into_model(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)


def _kept(master: Tensor, value: Tensor, *, is_shared: bool) -> Tensor:
    """A copy of a moment, on the device of its weight and shared out as that is."""
    if not (is_shared and is_divided(master)) or is_divided(value):
        return value.to(device=master.device, dtype=torch.float32, copy=True)
    kept = torch.empty_like(master, dtype=torch.float32, requires_grad=False)
    load_into(kept, value)
    return kept


def _is_on_all(master: Tensor) -> bool:
    """Whether ranks that compute together have the same of a sharded weight; the answer matters under tensor
    parallelism only."""
    return isinstance(master, DTensor) and division_of(master).tensor_dim is None


def _exchange(gradients: Iterable[Tensor], group: ProcessGroup, *, source: int | None) -> None:
    """Add up over the ranks of a group, or give all of them what one rank has; in place, a bucket at once."""
    for bucket in _buckets(gradients):
        together = torch.cat([gradient.reshape(-1) for gradient in bucket])
        if source is None:
            dist.all_reduce(together, group=group)
        else:
            dist.broadcast(together, src=source, group=group)
        start = 0
        for gradient in bucket:
            gradient.copy_(together[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()


def _buckets(gradients: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Of one dtype each, none larger than it must be."""
    bucket: list[Tensor] = []
    size_bytes = 0
    for gradient in gradients:
        if bucket and (size_bytes + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(gradient)
        size_bytes += gradient.nbytes
    if bucket:
        yield bucket


def _master_of(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
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
