"""Gradients and optimizer of a model, megatron-core's own: its DistributedDataParallel, its (distributed) AdamW.

Invariants:

* Gradients are those of the summed losses, added up over data- and context-parallel ranks; nothing divides them.
* Learning rate and weight decay are set anew for each step: norms and biases do not decay. megatron-core marks them
  and leaves it to a scheduler to act on the marks.
* A step whose loss or gradient is not finite changes nothing, on every rank alike, and raises unless the gradient
  overflowed float16 under a loss scale. megatron-core itself would look only where it scales losses.
* The loss scale is ours, as everything that follows from it; megatron-core multiplies and divides by it.
* Layers that predict further tokens are clipped by a norm of their own, unless their gradient goes on into the model:
  how far the policy moves is not theirs to say then.
* After :meth:`TrainableModel.gather_weights` every rank has the weights of the last step, also where
  ``overlap_param_gather`` would gather them during the next forward pass only.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from penstock.backends.learners.megatron.layout.model_config import ddp_fields, optimizer_fields
from penstock.backends.learners.megatron.model.build import DTYPES, as_objects, mtp_layers
from penstock.backends.learners.megatron.schedule.schedule import MicroBatchRunner
from penstock.backends.learners.training.alarms import non_finite
from penstock.backends.learners.training.loss_scale import LossScale

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from megatron.core.optimizer import MegatronOptimizer
    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores
    from penstock.backends.learners.megatron_options import MegatronOptions


class StepResult(NamedTuple):
    """Of one optimizer step, the same on every rank."""

    loss: float
    """Summed over micro-batches and data-parallel ranks."""
    grad_norm: float
    """Before it was clipped."""


MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a weight."""


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
        check_stop: Callable[[], None] | None = None,
        scale: LossScale | None = None,
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
            check_stop: called before each micro-batch; raises to end the step.
            scale: of the losses, and of other optimizers as well; None: this one's own.
        """
        self.model = model
        self.scale = scale or LossScale(DTYPES[model.precision])
        """Whoever calls :meth:`change` moves it on."""
        self.further_norm: float | None = None
        """Of the last step's gradient of layers that predict further tokens, before it was clipped; None where they
        are not clipped apart."""
        self._clips_apart = model.mtp is not None and not model.mtp.trains_trunk
        self._device = device
        self._weight_decay = weight_decay
        self._max_grad_norm = max_grad_norm
        config = DistributedDataParallelConfig(**ddp_fields(options))
        self._chunks = [
            DistributedDataParallel(model.config, config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(model.chunks)
        ]
        fields = optimizer_fields(
            options, precision=model.precision, betas=betas, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        self._optimizer = get_megatron_optimizer(OptimizerConfig(**as_objects(fields)), self._chunks)
        for member in members_of(self._optimizer):
            _renumber(member)
        self.runner = MicroBatchRunner(
            model,
            self._chunks,
            device=device,
            temperature=temperature,
            entropy_gradient=entropy_gradient,
            check_stop=check_stop,
            replays_experts=options.router_replay,
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
            DivergedError: the loss or the gradient is not finite; the weights are as they were.
        """
        loss_sum = self._total(self.add_gradients(micro_batches, loss))
        norm = self.change(learning_rate, loss=loss_sum, name="the step")
        self.scale.follow(has_overflown=not math.isfinite(norm), name="the step")
        return StepResult(loss_sum, norm)

    def add_gradients(
        self,
        micro_batches: Sequence[Sequence[TrainSequence]],
        loss: Callable[[int, VocabularyScores], Tensor],
        *,
        temperature: float | None = None,
    ) -> list[Tensor]:
        """The gradients of one optimizer step, whole: what was added before is forgotten, as they are added up over
        ranks at the end of the schedule. Arguments and result as of :meth:`.MicroBatchRunner.train`."""
        self.forget_gradients()
        return self.runner.train(micro_batches, loss, temperature=temperature)

    def change(self, learning_rate: float, *, loss: float, name: str) -> float:
        """Clip, and change the weights.

        Args:
            learning_rate: of this step.
            loss: of this step, for the check and the message.
            name: of this step, for the message.

        Returns:
            The norm of the gradient before clipping; one that is not finite where it has overflown under a loss scale,
            and nothing was changed.

        Raises:
            DivergedError: the loss is not finite, or the gradient where nothing scales it.
        """
        optimizer = self._optimizer
        self.further_norm = None
        if self.scale.is_dynamic:
            for member in members_of(optimizer):
                member.grad_scaler.scale.fill_(self.scale.value)
        is_overflown = optimizer.prepare_grads()
        apart = _main_parameters(optimizer, self._further_parameters()) if self._clips_apart else []
        norm = self._norm(without=apart, is_overflown=is_overflown, loss=loss, name=name)
        if not math.isfinite(norm):
            return norm
        if self._clips_apart:
            rest = _others(optimizer, apart)
            further_norm = self._norm(without=rest, is_overflown=False, loss=loss, name=f"{name}, mtp")
            if not math.isfinite(further_norm):
                return further_norm
            self.further_norm = further_norm
            self._clip(further_norm, without=rest)
        self._clip(norm, without=apart)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        optimizer.step_with_ready_grads()
        return norm

    def _norm(self, *, without: Sequence[Tensor], is_overflown: bool, loss: float, name: str) -> float:
        with _hidden(without):
            norm = math.nan if is_overflown else float(self._optimizer.get_grad_norm())
        if (error := non_finite(loss=loss, norm=norm, name=name)) is not None:
            self.forget_gradients()
            if not (self.scale.is_dynamic and math.isfinite(loss)):
                raise error
        return norm

    def _clip(self, norm: float, *, without: Sequence[Tensor]) -> None:
        with _hidden(without):
            for member in members_of(self._optimizer):
                if parameters := member.get_parameters():
                    clip_grad_by_total_norm_fp32(
                        parameters,
                        max_norm=self._max_grad_norm,
                        total_norm=norm,
                        use_decoupled_grad=member.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                    )

    def _further_parameters(self) -> list[Tensor]:
        return [each for chunk in self.model.chunks for layer in mtp_layers(chunk) for each in layer.parameters()]

    def forget_gradients(self) -> None:
        """What was added since the last step."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def forget_moments(self) -> None:
        """The optimizer goes on as if it had made no step."""
        for member in members_of(self._optimizer):
            for state in member.optimizer.state.values():
                for kind in MOMENTS:
                    if isinstance(value := state.get(kind), torch.Tensor):
                        value.zero_()
            for group in member.optimizer.param_groups:
                if "step" in group:  # where it is kept for all weights together
                    group["step"] = 0

    def gather_weights(self) -> None:
        """Every rank has all of its updated weights afterwards."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _connect(self, options: MegatronOptions) -> None:
        """Hand the schedule what it calls; without the first, gradients stay those of each rank, in silence."""
        config = self.model.config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.scale.scaled
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


def _renumber(member: Any) -> None:  # noqa: ANN401 - an optimizer of megatron-core's
    """A distributed optimizer puts the float32 weights of a group first, such as a critic's head, but looks them up by
    the order before that: checkpoints would take one weight's state for another's."""
    places: dict[Tensor, tuple[int, int]] | None = getattr(member, "model_param_group_index_map", None)
    if places is None:
        return
    groups = zip(member.model_fp32_groups, member.model_float16_groups, strict=True)
    for number, (exact, rounded) in enumerate(groups):
        places.update({parameter: (number, order) for order, parameter in enumerate((*exact, *rounded))})


def _main_parameters(optimizer: MegatronOptimizer, wanted: Sequence[Tensor]) -> list[Tensor]:
    """What the optimizer updates in the place of these parameters of the model, as far as this rank has it."""
    by_id = {id(parameter): parameter for parameter in wanted}
    found: list[Tensor] = []
    for member in members_of(optimizer):
        places: dict[Tensor, tuple[int, int]] | None = getattr(member, "model_param_group_index_map", None)
        if places is not None:  # each rank has a part of some
            groups = member.optimizer.param_groups
            found += [groups[group]["params"][place] for own, (group, place) in places.items() if id(own) in by_id]
        else:
            own_ids = {id(parameter) for parameter in member.get_parameters()}
            mains = [getattr(parameter, "main_param", parameter) for parameter in wanted]
            found += [main for main in mains if id(main) in own_ids]
    return found


def _others(optimizer: MegatronOptimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    ids = {id(parameter) for parameter in parameters}
    return [each for member in members_of(optimizer) for each in member.get_parameters() if id(each) not in ids]


@contextlib.contextmanager
def _hidden(parameters: Sequence[Tensor]) -> Generator[None]:
    """They have no gradient meanwhile."""
    names = ("grad", "decoupled_grad")
    kept = [(each, name, getattr(each, name)) for each in parameters for name in names if hasattr(each, name)]
    for each, name, _ in kept:
        setattr(each, name, None)
    try:
        yield
    finally:
        for each, name, gradient in kept:
            setattr(each, name, gradient)


def members_of(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that one stands for: of experts, and of the rest. Those without weights on this rank are left
    out."""
    chained: list[Any] = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [member for member in chained if not getattr(member, "is_stub_optimizer", False)]
