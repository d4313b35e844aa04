"""The router of a mixture of experts: auxiliary losses with denominators of the whole step, and choices given to it.

megatron-core adds auxiliary losses in training mode only, which the models here are never in, and takes their means
over a micro-batch of a rank. Here a loss is of an optimizer step. With ``E`` experts, ``k`` of them for a token, ``T``
inputs of the step (of all its sequences, on all ranks), router probabilities ``p`` over all experts before the choice,
logits ``z``, and ``c_e`` of the tokens for which expert ``e`` is among the ``k`` likeliest::

    aux_loss, global_aux_loss    coeff · E / (k T²) · Σ_e c_e Σ_t p_te                c_e of the whole step
    seq_aux_loss                 coeff · Σ_s (T_s / T) · E / (k T_s²) · Σ_e c_e^s Σ_{t ∈ s} p_te
    z_loss                       coeff · 1 / T · Σ_t logsumexp(z_t)²

summed over layers. Counts have no gradient. The first two are the same: micro-batches are a division of memory, so
nothing is a mean over one. They need the counts before the first micro-batch goes backward, hence a pass over all of
them without gradient before.

Invariants:

* Loss and gradient are those of the step, whatever the micro-batches and the layout are.
* What a sequence is filled up with, and sequences without a trained token, count nowhere, nor in the update of expert
  biases.
* A choice that is given replaces the router's own for that token and layer; its weights are still the router's own
  probabilities of those experts, and gradients go through them. Losses are about the router's own choice in any case.
* A layer that is computed again in the backward pass gets what it had in the forward pass.
"""

# megatron-core is typed for what is used of it only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainSequence
    from penstock.backends.learners.megatron.bridge.architecture import Architecture
    from penstock.backends.learners.megatron.model.mtp import FurtherTokens

STEP_KINDS: Final = ("aux_loss", "global_aux_loss")
KINDS: Final = (*STEP_KINDS, "seq_aux_loss", "z_loss")


@dataclass(slots=True)
class StepBalance:
    """What the losses of one optimizer step have in common, on one rank."""

    num_tokens: float
    """``T``"""
    counts: Tensor
    """``[layers with experts, E]``, float64: of the whole step once it has been counted."""
    sums: Tensor
    """``[kinds, layers with experts]``, float64: what this rank has added, without coefficients."""
    is_counting: bool = False


@dataclass(frozen=True, slots=True)
class Routing:
    """What the routers are told about the inputs of one micro-batch that this rank has."""

    sequence_of: Tensor
    """int64 ``[T]``, −1 where an input does not count."""
    lengths: Tensor
    """float32 ``[B]``: inputs of each sequence, on all ranks."""
    choices: Tensor | None
    """int16 ``[T, layers with experts, k]``, −1 where the router is to choose."""
    balance: StepBalance | None
    """None where there are no losses of routers."""
    goes_back: bool
    """Whether a backward pass follows, in which layers may be computed again."""


@dataclass
class RoutedSequences(PackedSeqParams):
    """Goes with a micro-batch through its layers, also when they are computed again."""

    routing: Routing | None = field(default=None, kw_only=True)
    further: tuple[FurtherTokens, ...] = field(default=(), kw_only=True)
    """For each layer that predicts further tokens, where these are run."""


class Router(TopKRouter):
    """Of one layer."""

    place: int
    """Among the layers with experts of the whole model."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:  # noqa: ANN401 - megatron-core's own
        super().__init__(config, *args, **options)
        self.coefficients = {name: value for name, value in _coefficients(config).items() if value}
        self._told: Routing | None = None
        self._again: deque[Routing] = deque()
        """Of micro-batches that will be computed again, in their order."""
        self._now: Routing | None = None

    def tell(self, routing: Routing | None) -> None:
        """About the micro-batch that comes next."""
        self._told = routing

    def forget(self) -> None:
        """See :meth:`Balancing.forget`."""
        self._told = None
        self._again.clear()

    def routing(self, logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - as above
        """Probabilities and map ``[T, E]`` of logits ``[T, 1, E]``."""
        now = self._now = self._current()
        if now is None:
            return super().routing(logits, *args, **options)
        if now.choices is not None:
            self.router_replay = _Given(now.choices[:, self.place].long())
        probabilities, chosen = super().routing(logits, *args, **options)
        self.router_replay = None
        if now.balance is not None:
            loss = self._loss(logits.flatten(0, 1), now, now.balance)
            if loss is not None:
                probabilities = MoEAuxLossAutoScaler.apply(probabilities, loss)
        return probabilities, chosen

    def _current(self) -> Routing | None:
        told, self._told = self._told, None
        if told is None:
            return self._again.popleft() if self._again else None
        if told.goes_back:
            if not torch.is_grad_enabled():
                self._again.append(told)
            elif self._again:
                self._again.popleft()
        return told

    def _loss(self, logits: Tensor, now: Routing, balance: StepBalance) -> Tensor | None:
        """What these tokens add to the losses of the step, times the coefficients."""
        if not self.coefficients:
            return None
        counts = (now.sequence_of >= 0)[:, None]
        is_chosen, scores = compute_routing_scores_for_aux_loss(logits.float(), self.topk, self.score_function)
        is_chosen, scores = is_chosen & counts, scores * counts
        if balance.is_counting:
            balance.counts[self.place] += is_chosen.sum(0)
            return None
        if not torch.is_grad_enabled():
            return None
        total = scores.new_zeros(())
        for name, coefficient in self.coefficients.items():
            value = self._of_kind(name, logits, scores, is_chosen, now, balance)
            balance.sums[KINDS.index(name), self.place] += value.detach()
            total = total + coefficient * value
        return total

    def _of_kind(
        self, name: str, logits: Tensor, scores: Tensor, is_chosen: Tensor, now: Routing, balance: StepBalance
    ) -> Tensor:
        num_experts, num_tokens = scores.shape[1], balance.num_tokens
        if name == "z_loss":
            return (logits.float().logsumexp(-1).square() * (now.sequence_of >= 0)).sum() / num_tokens
        scale: float = num_experts / (self.topk * num_tokens)
        if name in STEP_KINDS:
            return (scores.sum(0) * (balance.counts[self.place] / num_tokens)).sum() * scale
        # What does not count is zero in both factors.
        place = now.sequence_of.clamp(min=0)
        by_sequence = scores.new_zeros(len(now.lengths), num_experts).index_add_(0, place, is_chosen.to(scores.dtype))
        group = self.tp_cp_group if self.config.sequence_parallel else self.cp_group
        if group.size() > 1:
            dist.all_reduce(by_sequence, group=group)
        shares = by_sequence / now.lengths.clamp(min=1.0)[:, None]
        return (scores * shares[place]).sum() * scale

    def _apply_expert_bias(self, routing_map: Tensor, *_: Any, **__: Any) -> None:  # noqa: ANN401 - as above
        """Count for the update of the biases, which comes with the step."""
        now = self._now
        if not self.enable_expert_bias or now is None or now.balance is None or now.balance.is_counting:
            return
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.local_tokens_per_expert += (routing_map & (now.sequence_of >= 0)[:, None]).sum(0)


class _Given:
    """Takes the place of megatron-core's own replay, which knows no token without a record."""

    def __init__(self, choices: Tensor) -> None:
        self._choices = choices

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts ``[T, k]`` from scores ``[T, E]``."""
        own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        chosen = torch.where(self._choices[:, :1] >= 0, self._choices, own)
        return scores.gather(1, chosen), chosen


def connect_routers(architecture: Architecture, chunks: Sequence[GPTModel]) -> None:
    """Tell each router its place, and let micro-batches reach it."""
    if architecture.experts is None:
        return
    places = {layer: place for place, layer in enumerate(_layers_with_experts(architecture))}
    for layer in (layer for chunk in chunks for layer in _layers(chunk)):
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            router.place = places[layer.layer_number - 1]
            layer.register_forward_pre_hook(_tell, with_kwargs=True)


def _tell(layer: Any, _: object, options: dict[str, Any]) -> None:  # noqa: ANN401 - a layer of megatron-core
    layer.mlp.router.tell(getattr(options.get("packed_seq_params"), "routing", None))


class Balancing:
    """The auxiliary losses of one model over its steps."""

    def __init__(
        self, architecture: Architecture, chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device
    ) -> None:
        self.figures: dict[str, float] = {}
        """Of the last step, the mean over layers, without coefficients; the same on every rank."""
        self._num_layers = sum(architecture.experts.layers) if architecture.experts else 0
        self._num_experts = architecture.experts.count if architecture.experts else 0
        self._routers = [
            layer.mlp.router for chunk in chunks for layer in _layers(chunk) if hasattr(layer.mlp, "router")
        ]
        self._kinds = [name for name, value in _coefficients(config).items() if value]
        self._has_bias = bool(getattr(config, "moe_router_enable_expert_bias", False))
        self._sequence_parallel = bool(config.sequence_parallel)
        self._device = device

    @property
    def is_needed(self) -> bool:
        """Whether routers have anything to do in training but to choose."""
        return bool(self._num_layers) and (bool(self._kinds) or self._has_bias)

    @property
    def needs_counts(self) -> bool:
        """Whether the micro-batches are run once before."""
        return any(name in STEP_KINDS for name in self._kinds)

    def forget(self) -> None:
        """What an earlier step, which may have ended early, has left."""
        for router in self._routers:
            router.forget()

    def open(self, micro_batches: Sequence[Sequence[TrainSequence]]) -> StepBalance:
        """A collective. ``micro_batches``: of this data-parallel rank."""
        total = torch.tensor(
            [sum(num_inputs(sequence) for batch in micro_batches for sequence in batch)],
            dtype=torch.float64, device=self._device,
        )  # fmt: skip
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        shape = (len(KINDS), self._num_layers)
        return StepBalance(
            num_tokens=max(1.0, float(total)),
            counts=torch.zeros(self._num_layers, self._num_experts, dtype=torch.float64, device=self._device),
            sums=torch.zeros(shape, dtype=torch.float64, device=self._device),
        )

    def count(self, balance: StepBalance) -> None:
        """A collective, after all micro-batches were run with ``is_counting``."""
        self._add_up(balance.counts, over_stages=False)
        balance.counts = balance.counts.float()
        balance.is_counting = False

    def close(self, balance: StepBalance) -> None:
        """A collective, after the last micro-batch."""
        if not self._kinds:
            return
        self._add_up(balance.sums, over_stages=True)
        means = cast("list[float]", balance.sums.mean(1).tolist())
        self.figures = {f"train/moe_{name}": means[KINDS.index(name)] for name in self._kinds}

    def _add_up(self, values: Tensor, *, over_stages: bool) -> None:
        dist.all_reduce(values, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if self._sequence_parallel:
            dist.all_reduce(values, group=parallel_state.get_tensor_model_parallel_group())
        if over_stages:
            dist.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())


def num_inputs(sequence: TrainSequence) -> int:
    """That count; none of a sequence that nothing is trained of, which stands in for a micro-batch."""
    return len(sequence.tokens) - 1 if len(sequence.trained) else 0


def _coefficients(config: TransformerConfig) -> dict[str, float]:
    kinds: Any = config.moe_router_load_balancing_type
    values: Any = config.moe_aux_loss_coeff
    pairs = zip(kinds, values, strict=True) if isinstance(kinds, list) else [(kinds, values)]
    found = {name: float(value) for name, value in pairs if name in KINDS}
    return found | {"z_loss": float(config.moe_z_loss_coeff or 0.0)}


def _layers_with_experts(architecture: Architecture) -> list[int]:
    assert architecture.experts is not None
    return [layer for layer, has_experts in enumerate(architecture.experts.layers) if has_experts]


def _layers(chunk: GPTModel) -> Iterator[Any]:
    decoder: Any = chunk.decoder
    yield from decoder.layers
