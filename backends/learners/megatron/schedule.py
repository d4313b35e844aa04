"""Runs micro-batches through a model with megatron-core's own schedules, forward and back or forward only.

Invariants:

* Every data-parallel rank runs equally many micro-batches, and with virtual stages a multiple of the stages; what is
  missing is filled up with micro-batches of weight 0 by the caller.
* A loss is summed over micro-batches and data-parallel ranks; its denominator is in it.
* Every context-parallel rank has the log-probs of the whole micro-batch, so what couples tokens of a sequence does not
  see how the sequence is cut.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from penstock.backends.learners.megatron.packed import pack_share
from penstock.backends.learners.megatron.vocabulary import VocabularyScores, sum_of_shares, vocabulary_scores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

    from penstock.backends.learners.megatron.build import ParallelModel
    from penstock.backends.learners.megatron.packed import PackedShare
    from penstock.backends.learners.sequences import TrainSequence


class _Input(NamedTuple):
    number: int
    share: PackedShare


class MicroBatchRunner:
    """Knows one model."""

    def __init__(
        self,
        model: ParallelModel,
        modules: Sequence[nn.Module],
        *,
        device: torch.device,
        temperature: float = 1.0,
        entropy_gradient: bool = True,
    ) -> None:
        """
        Args:
            model: whose share is run.
            modules: its chunks, wrapped for gradients or bare.
            device: of this rank.
            temperature: that the engine samples with.
            entropy_gradient: whether gradients go through the entropy.
        """
        self._model = model
        self._modules = list(modules)
        self._device = device
        self._temperature = temperature
        self._entropy_gradient = entropy_gradient

    def scores(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> list[VocabularyScores]:
        """Log-probs and entropy ``[N]`` of the trained tokens of each micro-batch; empty but on the last stage."""

        def keep(_: int, scores: VocabularyScores) -> VocabularyScores:
            return scores

        with torch.no_grad():
            out = self._run(micro_batches, keep, forward_only=True)
        return [VocabularyScores(*scores) for scores in out]

    def train(
        self,
        micro_batches: Sequence[Sequence[TrainSequence]],
        loss: Callable[[int, VocabularyScores], Tensor],
    ) -> list[Tensor]:
        """Add up gradients of the losses over micro-batches and ranks.

        Args:
            micro_batches: of this data-parallel rank.
            loss: of a micro-batch, by its number.

        Returns:
            The losses, on the last stage; nothing on others.
        """
        return self._run(micro_batches, loss, forward_only=False)

    def _run(
        self,
        micro_batches: Sequence[Sequence[TrainSequence]],
        of_scores: Callable[[int, VocabularyScores], Any],
        *,
        forward_only: bool,
    ) -> list[Any]:
        shares = [_Input(number, self._share(batch)) for number, batch in enumerate(micro_batches)]

        def forward(inputs: Iterator[_Input], module: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            number, share = next(inputs)
            logits = module(
                self._tensor(share.input_ids)[None],
                self._tensor(share.position_ids)[None],
                None,
                packed_seq_params=self._packed(share),
            )

            def finish(logits: Tensor, *, non_loss_data: bool = False) -> Any:  # noqa: ANN401 - what a schedule wants
                result = of_scores(number, self._scores(logits, share))
                if non_loss_data:
                    return result
                # Zero tokens: the schedule would divide by their number, and the loss has its denominator.
                return result, torch.zeros((), dtype=torch.int, device=self._device), result.detach()

            return logits, finish

        chunks = len(self._modules)
        out: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(shares) for _ in range(chunks)] if chunks > 1 else iter(shares),
            model=self._modules if chunks > 1 else self._modules[0],
            num_microbatches=len(shares),
            seq_length=1,  # lengths vary, and are told along with what is sent
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return out

    def _scores(self, logits: Tensor, share: PackedShare) -> VocabularyScores:
        own = vocabulary_scores(
            logits[0, self._tensor(share.predicted_at)],
            self._tensor(share.targets),
            group=parallel_state.get_tensor_model_parallel_group(),
            vocab_size=self._model.architecture.vocab_size,
            temperature=self._temperature,
            entropy_gradient=self._entropy_gradient,
        )
        group, places = parallel_state.get_context_parallel_group(), self._tensor(share.places)
        return VocabularyScores(
            *(sum_of_shares(values.new_zeros(share.num_trained).index_copy(0, places, values), group) for values in own)
        )

    def _share(self, sequences: Sequence[TrainSequence]) -> PackedShare:
        layout = self._model.layout
        return pack_share(
            sequences,
            num_context=layout.context,
            context_rank=parallel_state.get_context_parallel_rank(),
            num_sequence_shards=layout.tensor if layout.sequence_parallel else 1,
        )

    def _packed(self, share: PackedShare) -> PackedSeqParams:
        ends = torch.tensor([0, *share.lengths], device=self._device).cumsum(0).int()
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends,
            max_seqlen_q=max(share.lengths), max_seqlen_kv=max(share.lengths),
        )  # fmt: skip

    def _tensor(self, array: Any) -> Tensor:  # noqa: ANN401 - of any dtype
        return torch.from_numpy(array).to(self._device, non_blocking=True)
