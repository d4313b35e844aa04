"""The critic of PPO over a layout of megatron-core: predicts, before each trained token, the reward still to come.

Invariants:

* Values, loss and gradient are those of the torch learner's critic, whatever the micro-batches and the layout are. The
  head starts at 0, so the first values are 0.
* With a trunk of its own it is a second model, with gradients and optimizer of its own, that starts as a copy of the
  policy's layers; nothing of its gradient reaches the policy. Its experts have no auxiliary losses and no replay.
* With the policy's trunk only the head is its own. Every rank has the head whole, and changes it alike; only ranks of
  the last stage have anything to add to its gradient.
* Head and values are float32, whatever the trunk computes in.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from penstock.backends.learners.checkpoints.record import CheckpointError
from penstock.backends.learners.learning_rate import critic_learning_rate
from penstock.backends.learners.megatron.layout.moe_options import LOSS_FIELDS
from penstock.backends.learners.megatron.model.build import build_model
from penstock.backends.learners.megatron.model.value_head import SharedHead, gathered_values
from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
from penstock.backends.learners.megatron.schedule.schedule import MicroBatchRunner
from penstock.backends.learners.torch.optimizer import MasterAdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from megatron.core.transformer import TransformerConfig
    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron.checkpoint.checkpoint import StoredCheckpoint
    from penstock.backends.learners.megatron.layout.layout import Layout
    from penstock.backends.learners.megatron.layout.model_config import Precision
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.schedule.micro_batches import MicroBatches
    from penstock.backends.learners.megatron.schedule.packed import PackedShare
    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.training.loss_scale import LossScale
    from penstock.backends.learners.training.step import StepTokens, ValueTerms
    from penstock.backends.learners.worker_group.workers import WorkerGroup

CRITIC: Final = "critic"
"""Name of the critic in checkpoints."""
HEAD: Final = "output_layer"
"""What megatron-core calls what stands after the last norm."""


class OwnCritic:
    """A second model."""

    def __init__(
        self,
        model: ParallelModel,
        options: LearnerOptions,
        *,
        num_steps: int,
        device: torch.device,
        check_stop: Callable[[], None] | None = None,
        stored: StoredCheckpoint | None = None,
        scale: LossScale | None = None,
    ) -> None:
        """
        Args:
            model: as :func:`critic_model` gives it, and at the beginning with the policy's layers (:func:`copy_trunk`).
            options: the ``learner:`` block.
            num_steps: of the whole run, for the schedule.
            device: of this rank.
            check_stop: called before each micro-batch; raises to end the step.
            stored: where to go on, if not at the beginning.
            scale: of the policy's loss too, where that is on the same ranks.

        Raises:
            CheckpointError: it has no such critic.
        """
        self._options = options
        self._num_steps = num_steps
        self.model = model
        if stored is not None:
            stored.load_weights(self.model, CRITIC)
        self.trainable = TrainableModel(
            self.model,
            options.megatron,
            betas=options.betas,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
            device=device,
            scale=scale,
        )
        if stored is not None:
            stored.load_optimizer(self.trainable, CRITIC)
        self.runner = _ValueRunner(self.model, self.trainable.chunks, device=device, check_stop=check_stop)

    def values(self, batches: MicroBatches) -> list[Tensor]:
        """Before each trained token that counts, float32 ``[N]`` by micro-batch; empty but on the last stage."""
        found = self.runner.values(batches.sequences)
        return [values[: batches.num_tokens(number)] for number, values in enumerate(found)]

    def add_gradients(self, own: StepTokens, batches: MicroBatches) -> list[Mapping[str, Tensor]]:
        """Of a step; figures by micro-batch, on the last stage."""
        figures: list[Mapping[str, Tensor]] = []

        def loss(number: int, values: Tensor) -> Tensor:
            counted = values[: batches.num_tokens(number)]
            terms = own.value_targets(batches.parts[number]).terms(counted, self._options.objective)
            figures.append(terms.figures)
            return terms.loss

        self.trainable.forget_gradients()
        self.runner.train_values(batches.sequences, loss)
        return figures

    def change(self, step: int, *, loss: float, name: str) -> float:
        """Change the weights; the norm of the gradient before clipping.

        Raises:
            DivergedError: loss or gradient is not finite.
        """
        rate = critic_learning_rate(step, self._options, num_steps=self._num_steps)
        return self.trainable.change(rate, loss=loss, name=f"{name}, critic")


class SharedCritic:
    """A head on the policy's last hidden states."""

    def __init__(
        self, policy: TrainableModel, options: LearnerOptions, *, num_steps: int, workers: WorkerGroup
    ) -> None:
        """
        Args:
            policy: whose micro-batches have values from here on.
            options: the ``learner:`` block.
            num_steps: of the whole run, for the schedule.
            workers: all ranks.
        """
        self._options = options
        self._num_steps = num_steps
        self._runner = policy.runner
        self._scale = policy.scale
        self._head = SharedHead(policy.model, workers.device)
        self._runner.attach(self._head)
        layout = policy.model.layout
        self._is_duplicate = not layout.sequence_parallel and layout.place(workers.rank).tensor > 0
        """Another rank has the same gradient."""
        self._optimizer = MasterAdamW(
            self._head,
            options,
            compute_dtype=torch.float32,
            scale=policy.scale,
            workers=workers,
        )

    def terms(self, values: Tensor, own: StepTokens, part: slice) -> ValueTerms:
        """Of a micro-batch of the policy."""
        return own.value_targets(part).terms(values, self._options.objective)

    def add_gradients(self, own: StepTokens, batches: MicroBatches) -> list[Mapping[str, Tensor]]:
        """Of a step that trains the head alone; figures by micro-batch, on the last stage."""
        figures: list[Mapping[str, Tensor]] = []

        def finish(number: int, values: Tensor) -> None:
            terms = self.terms(values[: batches.num_tokens(number)], own, batches.parts[number])
            torch.autograd.backward(self._scale.scaled(terms.loss))
            figures.append(terms.figures)

        self._runner.values_alone(batches.sequences, finish)
        return figures

    def change(self, step: int, *, loss: float, name: str) -> float:
        """See :meth:`OwnCritic.change`."""
        if self._is_duplicate:
            self._optimizer.forget_gradients()
        rate = critic_learning_rate(step, self._options, num_steps=self._num_steps)
        return self._optimizer.step(rate, loss=loss, name=f"{name}, critic")

    def forget_gradients(self) -> None:
        """What was added since the last step."""
        self._optimizer.forget_gradients()

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer, not copied; the same on every rank."""
        weights = {f"weight/{name}": weight.detach() for name, weight in self._head.named_parameters()}
        return {f"{CRITIC}/{name}": tensor for name, tensor in (weights | self._optimizer.state()).items()}

    @torch.no_grad()
    def restore(self, stored: Mapping[str, Tensor], *, is_fresh: bool) -> None:
        """Take over a copy of what ``state`` gave.

        Args:
            stored: entries of others are not looked at.
            is_fresh: whether what the optimizer had is left behind.

        Raises:
            CheckpointError: it is of no critic with the policy's trunk.
        """
        tensors = {name.removeprefix(f"{CRITIC}/"): tensor for name, tensor in stored.items()}
        for name, weight in self._head.named_parameters():
            found = tensors.get(f"weight/{name}")
            if found is None or found.shape != weight.shape:
                raise CheckpointError(
                    "learner.objective.critic: shared needs a checkpoint with such a critic, and this one has none; "
                    "resume with the objective that it was written with, or start a new run from its model (model.path)"
                )
            weight.copy_(found)
        if not is_fresh:
            self._optimizer.restore(tensors)


MegatronCritic = OwnCritic | SharedCritic


def open_critic(
    policy: TrainableModel,
    options: LearnerOptions,
    *,
    num_steps: int,
    workers: WorkerGroup,
    check_stop: Callable[[], None] | None = None,
    stored: StoredCheckpoint | None = None,
) -> MegatronCritic | None:
    """As the objective wants one.

    Args:
        policy: as it is before the first step.
        options: the ``learner:`` block.
        num_steps: of the whole run, for the schedule.
        workers: all ranks.
        check_stop: called before each micro-batch; raises to end the step.
        stored: where to go on, if not at the beginning.

    Raises:
        CheckpointError: it has no such critic.
    """
    match options.objective.critic:
        case "none":
            return None
        case "shared":
            shared = SharedCritic(policy, options, num_steps=num_steps, workers=workers)
            if stored is not None:
                shared.restore(stored.tensors(), is_fresh=stored.is_fresh)
            return shared
        case "own":
            own = policy.model
            model = critic_model(own.architecture, own.layout, options, precision=own.precision, device=workers.device)
            if stored is None:
                policy.gather_weights()
                copy_trunk(own, model)
            return OwnCritic(
                model,
                options,
                num_steps=num_steps,
                device=workers.device,
                check_stop=check_stop,
                stored=stored,
                scale=policy.scale,
            )


def critic_model(
    architecture: Architecture,
    layout: Layout,
    options: LearnerOptions,
    *,
    precision: Precision,
    device: torch.device,
) -> ParallelModel:
    """A model like the policy whose output is one value, with weights that mean nothing yet but for the head."""
    transformer = {name: value for name, value in options.megatron.transformer.items() if name not in LOSS_FIELDS}
    model = build_model(
        # A tied head would be the embedding.
        replace(architecture, has_tied_embeddings=False),
        layout,
        msgspec.structs.replace(options.megatron, transformer=transformer, mtp=None),
        precision=precision,
        device=device,
    )
    for chunk in model.chunks:
        if chunk.post_process:
            chunk.output_layer = _ValueHead(model.config, architecture.hidden_size, device)
    return model


@torch.no_grad()
def copy_trunk(policy: ParallelModel, critic: ParallelModel) -> None:
    """Make the critic's layers what the policy's are."""
    for source, target in zip(policy.chunks, critic.chunks, strict=True):
        tensors = dict(source.named_parameters()) | dict(source.named_buffers())
        for name, tensor in (*target.named_parameters(), *target.named_buffers()):
            if not name.startswith(f"{HEAD}."):
                tensor.copy_(tensors[name])


class _ValueHead(nn.Module):
    """Stands where megatron-core has the layer that gives logits, and is called like it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        for parameter in (self.weight, self.bias):
            # Each tensor-parallel rank sees its own tokens, or all of them.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # asked for

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:  # noqa: ANN401 - megatron-core's own
        """``[S, 1, H]`` of this rank to ``[S, 1, 1]`` of all tensor-parallel ranks."""
        return gathered_values(hidden, self.weight, self.bias, is_divided=self.sequence_parallel), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """For megatron-core's distributed checkpoints."""
        data = (metadata or {}).get("dp_cp_group") or parallel_state.get_data_parallel_group(with_context_parallel=True)
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight, "bias": self.bias}, prefix, {}, sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(), dp_cp_group=data,
        )  # fmt: skip


class _ValueRunner(MicroBatchRunner):
    """Of a model that gives values."""

    def values(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> list[Tensor]:
        """Before each trained token ``[N]``; empty but on the last stage."""

        def keep(_: int, output: Tensor, share: PackedShare) -> Tensor:
            return self._placed(output[0, :, 0], share)

        with torch.no_grad():
            return cast("list[Tensor]", self._run(micro_batches, keep, forward_only=True))

    def train_values(
        self, micro_batches: Sequence[Sequence[TrainSequence]], loss: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Add up gradients of the losses over micro-batches and ranks."""

        def finish(number: int, output: Tensor, share: PackedShare) -> Tensor:
            return loss(number, self._placed(output[0, :, 0], share))

        self._train(micro_batches, finish)
