"""Gradients and optimizer of a model, megatron-core's own: its DistributedDataParallel, its (distributed) AdamW.

Invariants:

* Gradients are those of the summed losses, added up over data- and context-parallel ranks; nothing divides them.
* Learning rate and weight decay are set anew for each step: norms and biases do not decay. megatron-core marks them
  and leaves it to a scheduler to act on the marks.
* After :meth:`TrainableModel.gather_weights` every rank has the weights of the last step, also where
  ``overlap_param_gather`` would gather them during the next forward pass only.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from penstock.backends.learners.megatron.build import as_objects
from penstock.backends.learners.megatron.model_config import ddp_fields, optimizer_fields
from penstock.backends.learners.megatron.schedule import MicroBatchRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron.core.optimizer import MegatronOptimizer
    from torch import Tensor

    from penstock.backends.learners.megatron.build import ParallelModel
    from penstock.backends.learners.megatron.options import MegatronOptions
    from penstock.backends.learners.megatron.vocabulary import VocabularyScores
    from penstock.backends.learners.sequences import TrainSequence


class StepResult(NamedTuple):
    """Of one optimizer step, the same on every rank."""

    loss: float
    """Summed over micro-batches and data-parallel ranks."""
    grad_norm: float
    """Before it was clipped."""


class TrainableModel:
    """Owns what training adds to a model."""

    def __init__(
        self,
        model: ParallelModel,
        options: MegatronOptions,
        *,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        device: torch.device,
        temperature: float = 1.0,
        entropy_gradient: bool = True,
    ) -> None:
        """
        Args:
            model: with its weights, which the optimizer copies.
            options: of the learner.
            betas: of AdamW.
            weight_decay: of matrices.
            max_grad_norm: what a larger gradient is scaled down to.
            device: of this rank.
            temperature: that the engine samples with.
            entropy_gradient: whether gradients go through the entropy.
        """
        self.model = model
        self._device = device
        self._weight_decay = weight_decay
        config = DistributedDataParallelConfig(**ddp_fields(options))
        self._chunks = [
            DistributedDataParallel(model.config, config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(model.chunks)
        ]
        fields = optimizer_fields(
            options, precision=model.precision, betas=betas, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        self._optimizer = get_megatron_optimizer(OptimizerConfig(**as_objects(fields)), self._chunks)
        self.runner = MicroBatchRunner(
            model, self._chunks, device=device, temperature=temperature, entropy_gradient=entropy_gradient
        )
        self._connect(options)

    @property
    def chunks(self) -> Sequence[DistributedDataParallel]:
        """The model's, by virtual stage, with their gradients."""
        return self._chunks

    @property
    def optimizer(self) -> MegatronOptimizer:
        """megatron-core's, of all chunks."""
        return self._optimizer

    def step(
        self,
        micro_batches: Sequence[Sequence[TrainSequence]],
        loss: Callable[[int, VocabularyScores], Tensor],
        *,
        learning_rate: float,
    ) -> StepResult:
        """Train on micro-batches once.

        Args:
            micro_batches: of this data-parallel rank, as many as every other has.
            loss: of a micro-batch, by its number; its denominator is in it.
            learning_rate: of this step.

        Raises:
            ArithmeticError: the gradient is not finite; the weights are as they were.
        """
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = self.runner.train(micro_batches, loss)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        is_done, norm, _ = self._optimizer.step()
        if not is_done or norm is None or not math.isfinite(norm):
            raise ArithmeticError(f"the gradient is not finite (norm {norm})")
        return StepResult(self._total(losses), float(norm))

    def gather_weights(self) -> None:
        """Every rank has all of its updated weights afterwards."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _connect(self, options: MegatronOptions) -> None:
        """Hand the schedule what it calls; without the first, gradients stay those of each rank, in silence."""
        config = self.model.config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        is_one = len(self._chunks) == 1
        if options.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = no_sync[0] if is_one else no_sync
        if options.overlap_param_gather:
            sync = [chunk.start_param_sync for chunk in self._chunks]
            config.param_sync_func = sync[0] if is_one else sync

    def _total(self, losses: Sequence[Tensor]) -> float:
        """Context-parallel ranks have the same losses each; stages but the last have none."""
        total = torch.stack([*losses, torch.zeros((), device=self._device)]).sum()
        if parallel_state.is_pipeline_last_stage():
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(total, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        return float(total)
