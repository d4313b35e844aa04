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
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from penstock.backends.learners.megatron.layout.fp8_options import fill_multiple
from penstock.backends.learners.megatron.model.moe import Balancing, RoutedSequences, Routing, StepBalance, num_inputs
from penstock.backends.learners.megatron.schedule.further import FurtherLoss
from penstock.backends.learners.megatron.schedule.packed import pack_share
from penstock.backends.learners.megatron.schedule.router_replay import laid_out
from penstock.backends.learners.megatron.schedule.vocabulary import VocabularyScores, sum_of_shares, vocabulary_scores
from penstock.backends.learners.training.roles import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.megatron.model.build import ParallelModel
    from penstock.backends.learners.megatron.model.mtp import FurtherTokens
    from penstock.backends.learners.megatron.model.value_head import SharedHead
    from penstock.backends.learners.megatron.schedule.packed import PackedShare


class _Input(NamedTuple):
    number: int
    share: PackedShare
    routing: Routing | None
    further: tuple[FurtherTokens, ...]


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
        check_stop: Callable[[], None] | None = None,
        replays_experts: bool = False,
    ) -> None:
        """
        Args:
            model: whose share is run.
            modules: its chunks, wrapped for gradients or bare.
            device: of this rank.
            temperature: that the engine samples with.
            entropy_gradient: whether gradients go through the entropy.
            check_stop: called before each micro-batch; raises to end the pass.
            replays_experts: whether inputs go to the experts that were recorded for them.
        """
        self._model = model
        self._modules = list(modules)
        self._device = device
        self._temperature = temperature
        self._entropy_gradient = entropy_gradient
        self._check_stop = check_stop
        self._experts = model.architecture.experts
        self._replays_experts = replays_experts
        self._balancing = Balancing(model.architecture, model.chunks, model.config, device)
        self._value_head: SharedHead | None = None
        self._further = None if model.mtp is None else FurtherLoss(model, model.mtp, device)
        self.agree: Callable[[bool], bool] | None = None
        """Whether any rank says so; set where one that ran out of memory leaves no other in the middle of a
        micro-batch. Then all of them raise."""

    @property
    def further_figures(self) -> dict[str, float]:
        """Losses of the last optimizer step that are none of its objective, of experts and of layers that predict
        further tokens, by metric name; the same on every rank."""
        return self._balancing.figures | ({} if self._further is None else self._further.figures)

    @property
    def multiple(self) -> int:
        """What the number of micro-batches of one call must be a multiple of."""
        return self._model.layout.micro_batch_multiple

    def scores(
        self, micro_batches: Sequence[Sequence[TrainSequence]], *, temperature: float | None = None
    ) -> list[VocabularyScores]:
        """Log-probs and entropy ``[N]`` of the trained tokens of each micro-batch; empty but on the last stage.

        Args:
            micro_batches: of this data-parallel rank.
            temperature: another one than the engine's.
        """

        def keep(_: int, logits: Tensor, share: PackedShare) -> VocabularyScores:
            return self._scores(logits, share, temperature)

        with torch.no_grad():
            out = self._run(micro_batches, keep, forward_only=True)
        return [VocabularyScores(*scores) for scores in out]

    def train(
        self,
        micro_batches: Sequence[Sequence[TrainSequence]],
        loss: Callable[[int, VocabularyScores], Tensor],
        *,
        temperature: float | None = None,
    ) -> list[Tensor]:
        """Add up gradients of the losses over micro-batches and ranks.

        Args:
            micro_batches: of this data-parallel rank.
            loss: of a micro-batch, by its number.
            temperature: another one than the engine's.

        Returns:
            The losses, on the last stage; nothing on others. Auxiliary losses of experts are not in them, nor those
            of layers that predict further tokens.
        """

        def finish(number: int, logits: Tensor, share: PackedShare) -> Tensor:
            return loss(number, self._scores(logits, share, temperature))

        return self._train(micro_batches, finish)

    def _train(
        self, micro_batches: Sequence[Sequence[TrainSequence]], finish: Callable[[int, Tensor, PackedShare], Tensor]
    ) -> list[Tensor]:
        if self._further is None:
            return self._train_balanced(micro_batches, finish)
        self._further.begin(micro_batches)
        losses = self._train_balanced(micro_batches, finish)
        self._further.close()
        return losses

    def _train_balanced(
        self, micro_batches: Sequence[Sequence[TrainSequence]], finish: Callable[[int, Tensor, PackedShare], Tensor]
    ) -> list[Tensor]:
        self._balancing.forget()
        if not self._balancing.is_needed:
            return self._run(micro_batches, finish, forward_only=False)
        balance = self._balancing.open(micro_batches)
        if self._balancing.needs_counts:
            balance.is_counting = True
            with torch.no_grad():
                self._run(micro_batches, _nothing, forward_only=True, balance=balance)
            self._balancing.count(balance)
        losses = self._run(micro_batches, finish, forward_only=False, balance=balance)
        self._balancing.close(balance)
        return losses

    def attach(self, head: SharedHead) -> None:
        """Let scores have the values of this head from now on."""
        self._value_head = head

    def values_alone(
        self, micro_batches: Sequence[Sequence[TrainSequence]], finish: Callable[[int, Tensor], None]
    ) -> None:
        """Hand over the values of each micro-batch ``[N]`` on the last stage; their gradient ends at the head."""

        def keep(number: int, _: Tensor, share: PackedShare) -> None:
            assert self._value_head is not None, "one was attached"
            with torch.enable_grad():
                finish(number, self._placed(self._value_head.values(of_trunk=False), share))

        with torch.no_grad():
            self._run(micro_batches, keep, forward_only=True)

    def whole_logits(self, sequence: TrainSequence) -> Tensor | None:
        """What the model says at the trained tokens of a sequence: float32 ``[T, V]`` on the last stage, without what
        the vocabulary is filled up with; None on others."""
        tensor, context = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()

        def keep(_: int, logits: Tensor, share: PackedShare) -> Tensor:
            rows = logits.new_zeros((share.num_trained, logits.shape[-1]), dtype=torch.float32)
            rows[self._tensor(share.places)] = logits[0, self._tensor(share.predicted_at)].float()
            parts = [torch.empty_like(rows) for _ in range(tensor.size())]
            dist.all_gather(parts, rows, group=tensor)
            whole = torch.cat(parts, dim=1)[:, : self._model.architecture.vocab_size].contiguous()
            dist.all_reduce(whole, group=context)
            return whole

        with torch.no_grad():
            out: list[Tensor] = self._run([[sequence]] * self.multiple, keep, forward_only=True)
        return out[0] if out else None

    def _run(
        self,
        micro_batches: Sequence[Sequence[TrainSequence]],
        of_logits: Callable[[int, Tensor, PackedShare], Any],
        *,
        forward_only: bool,
        balance: StepBalance | None = None,
    ) -> list[Any]:
        shares = [
            self._input(number, batch, balance, goes_back=not forward_only)
            for number, batch in enumerate(micro_batches)
        ]

        def forward(inputs: Iterator[_Input], module: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            number, share, routing, further = next(inputs)
            if self._check_stop is not None:
                self._check_stop()
            logits = module(
                self._tensor(share.input_ids)[None],
                self._tensor(share.position_ids)[None],
                None,
                packed_seq_params=self._packed(share, routing, further),
            )

            def finish(logits: Tensor, *, non_loss_data: bool = False) -> Any:  # noqa: ANN401 - what a schedule wants
                result = of_logits(number, logits, share)
                if non_loss_data:
                    return result
                # Zero tokens: the schedule would divide by their number, and the loss has its denominator.
                total = result if self._further is None else self._further.beside(result, further)
                return total, torch.zeros((), dtype=torch.int, device=self._device), result.detach()

            return logits, finish

        if self.agree is not None and not forward_only:
            self._model.config.finalize_model_grads_func = self._finalize
        out: list[Any] | None = None
        try:
            out = self._scheduled(forward, shares, forward_only=forward_only)
        except torch.OutOfMemoryError:
            if self.agree is None:
                raise
        # The handler is left, and with it every tensor that the error held.
        if out is None:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._settle(has_failed=True)
        elif forward_only:
            self._settle(has_failed=False)
        assert out is not None, "a rank that had no memory raises"
        return out

    def _finalize(self, *given: Any, **keys: Any) -> None:  # noqa: ANN401 - the schedule's own
        """Called by the schedule after the last backward pass, before gradients are added up over ranks."""
        self._settle(has_failed=False)
        finalize_model_grads(*given, **keys)

    def _settle(self, *, has_failed: bool) -> None:
        """Once in each pass, on every rank.

        Raises:
            OutOfMemoryError: one had no memory.
        """
        if self.agree is not None and self.agree(has_failed):
            raise OutOfMemoryError

    def _scheduled(self, forward: Callable[..., Any], shares: Sequence[_Input], *, forward_only: bool) -> list[Any]:
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

    def _scores(self, logits: Tensor, share: PackedShare, temperature: float | None) -> VocabularyScores:
        own = vocabulary_scores(
            logits[0, self._tensor(share.predicted_at)],
            self._tensor(share.targets),
            group=parallel_state.get_tensor_model_parallel_group(),
            vocab_size=self._model.architecture.vocab_size,
            temperature=self._temperature if temperature is None else temperature,
            entropy_gradient=self._entropy_gradient,
            top_ids=None if share.top_ids is None else self._tensor(share.top_ids),
            kept_ids=None if share.kept_ids is None else self._tensor(share.kept_ids),
        )
        values = None if self._value_head is None else self._placed(self._value_head.values(), share)
        top = None if own.top is None else self._over_context(own.top, share)
        logprobs, entropy = self._over_context(own.logprobs, share), self._over_context(own.entropy, share)
        return VocabularyScores(logprobs, entropy, values, top)

    def _placed(self, values: Tensor, share: PackedShare) -> Tensor:
        """Where trained tokens are predicted ``[N]``, of values ``[T]`` of this rank's inputs."""
        return self._over_context(values[self._tensor(share.predicted_at)], share)

    def _over_context(self, values: Tensor, share: PackedShare) -> Tensor:
        """``[N, …]`` from those of the tokens that this rank predicts ``[M, …]``."""
        group, places = parallel_state.get_context_parallel_group(), self._tensor(share.places)
        return sum_of_shares(
            values.new_zeros(share.num_trained, *values.shape[1:]).index_copy(0, places, values), group
        )

    def _share(self, sequences: Sequence[TrainSequence]) -> PackedShare:
        layout = self._model.layout
        return pack_share(
            sequences,
            num_context=layout.context,
            context_rank=parallel_state.get_context_parallel_rank(),
            num_sequence_shards=layout.tensor if layout.sequence_parallel else 1,
            multiple=fill_multiple(self._model.config.fp8, self._model.config.fp8_recipe),
        )

    def _input(
        self, number: int, sequences: Sequence[TrainSequence], balance: StepBalance | None, *, goes_back: bool
    ) -> _Input:
        share = self._share(sequences)
        experts = self._experts
        choices = None
        if experts is not None and self._replays_experts:
            choices = laid_out(sequences, share.lengths, experts)
        further = self._further.tokens(sequences, share) if self._further is not None and goes_back else ()
        if balance is None and choices is None:
            return _Input(number, share, None, further)
        routing = Routing(
            sequence_of=self._tensor(self._own_tokens(share.sequence_of)),
            lengths=torch.tensor([float(num_inputs(s)) for s in sequences], device=self._device),
            choices=None if choices is None else self._tensor(self._own_tokens(choices[share.own])),
            balance=balance,
            goes_back=goes_back,
        )
        return _Input(number, share, routing, further)

    def _own_tokens(self, values: NDArray[Any]) -> NDArray[Any]:
        """Of those of a context-parallel rank, the ones that this rank has between matrices."""
        layout = self._model.layout
        if not layout.sequence_parallel:
            return values
        length = len(values) // layout.tensor
        start = parallel_state.get_tensor_model_parallel_rank() * length
        return values[start : start + length]

    def _packed(
        self, share: PackedShare, routing: Routing | None, further: tuple[FurtherTokens, ...]
    ) -> RoutedSequences:
        ends = torch.tensor([0, *share.lengths], device=self._device).cumsum(0).int()
        return RoutedSequences(
            routing=routing,
            further=further,
            qkv_format="thd",
            cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends,
            max_seqlen_q=max(share.lengths), max_seqlen_kv=max(share.lengths),
        )  # fmt: skip

    def _tensor(self, array: Any) -> Tensor:  # noqa: ANN401 - of any dtype
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _nothing(_: int, __: Tensor, ___: PackedShare) -> None:
    """What is wanted of logits where only the routers are asked."""
