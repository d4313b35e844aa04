"""The loss of layers that predict further tokens, beside that of the objective.

Of ``K`` layers, layer ``k`` predicts the trained tokens ``j`` that have more than ``k`` before them, ``N_k`` in the
whole optimizer step::

    loss = coef / K · Σ_k  1 / N_k · Σ_j −log p_k(token j)

at temperature 1, whatever the tokens' rewards.

Invariants:

* Loss and gradient are those of the step, whatever the micro-batches and the layout are.
"""

# torch.distributed is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from penstock.backends.learners.megatron.model.mtp import FurtherTokens
from penstock.backends.learners.megatron.schedule.packed import pack_further
from penstock.backends.learners.megatron.schedule.vocabulary import vocabulary_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.model.mtp import PredictingModel
    from penstock.backends.learners.megatron.schedule.packed import PackedShare
    from penstock.backends.learners.megatron_options import MtpOptions

LOSS: Final = "train/mtp_loss"
"""Mean over these layers of the mean over their tokens, in nats, without the coefficient."""


@dataclass(slots=True)
class _Step:
    """What one optimizer step has in common, on one rank."""

    counts: Tensor
    """``N_k`` of the whole step, float64 ``[K]``."""
    sums: Tensor
    """What this rank has added of the losses, float64 ``[K]``."""


@dataclass(slots=True)
class FurtherLoss:
    """The loss of one model's layers over its steps."""

    model: ParallelModel
    options: MtpOptions
    device: torch.device
    figures: dict[str, float] = field(default_factory=dict[str, float])
    """Of the last step; the same on every rank."""
    _step: _Step | None = None

    def begin(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> None:
        """A collective. ``micro_batches``: of this data-parallel rank."""
        trained = [sequence.trained for batch in micro_batches for sequence in batch]
        distances = range(1, self.model.architecture.num_mtp_layers + 1)
        counts = [sum(int((tokens > distance).sum()) for tokens in trained) for distance in distances]
        total = torch.tensor(counts, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        self._step = _Step(total.clamp(min=1.0), torch.zeros_like(total))
        cast("PredictingModel", self.model.chunks[-1]).further_logits = None  # of a pass that ended early

    def tokens(self, sequences: Sequence[TrainSequence], share: PackedShare) -> tuple[FurtherTokens, ...]:
        """For each layer, about one micro-batch; nothing outside of a step."""
        if self._step is None:
            return ()

        def tensor(array: Any) -> Tensor:  # noqa: ANN401 - of numpy
            return torch.from_numpy(array).to(self.device, non_blocking=True)

        packed = (pack_further(sequences, share, k + 1) for k in range(self.model.architecture.num_mtp_layers))
        positions = tensor(share.position_ids)[None]
        return tuple(
            FurtherTokens(tensor(each.input_ids)[None], positions, tensor(each.predicted_at), tensor(each.targets))
            for each in packed
        )

    def beside(self, loss: Tensor, further: Sequence[FurtherTokens]) -> Tensor:
        """The loss of the micro-batch that was just run, with that of these layers; ``further``: what they were told
        about it."""
        chunk = cast("PredictingModel", self.model.chunks[-1])
        found, chunk.further_logits = chunk.further_logits, None
        if found is None or self._step is None:
            return loss
        losses = torch.stack(
            [-self._log_probs(logits, tokens.targets).sum() for logits, tokens in zip(found, further, strict=True)]
        )
        self._step.sums += losses.detach()
        means = losses / self._step.counts.to(losses.dtype)
        return loss + self.options.loss_coef * means.mean()

    def _log_probs(self, logits: Tensor, targets: Tensor) -> Tensor:
        scores = vocabulary_scores(
            logits,
            targets,
            group=parallel_state.get_tensor_model_parallel_group(),
            vocab_size=self.model.architecture.vocab_size,
            entropy_gradient=False,
        )
        return scores.logprobs

    def close(self) -> None:
        """A collective, after the last micro-batch."""
        step, self._step = self._step, None
        if step is None:
            return
        dist.all_reduce(step.sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(step.sums, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        self.figures = {LOSS: float((step.sums / step.counts).mean())}
