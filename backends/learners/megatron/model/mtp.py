"""Layers that predict further tokens (multi-token prediction): megatron-core's own, run where they are asked for.

Layer ``k`` of ``K`` sees at input ``i`` what the layer before it made there, ``h`` (the first one: the model, after its
final norm), and the embedding ``e`` of token ``i + k``, and predicts token ``i + 1 + k`` by the model's output head
(arXiv:2412.19437, §2.2)::

    h_k = final_layernorm(transformer_layer(eh_proj [enorm(e_{i+k}); hnorm(h)]))

megatron-core runs them in every forward pass, and adds a loss of its own where ``GPTModel`` is given labels. Here they
run in passes that train the policy alone; :mod:`~penstock.backends.learners.megatron.schedule.further` has their loss.

Invariants:

* Unless ``trains_trunk``, no gradient leaves these layers: the model's hidden states, its embedding and its output head
  are constants to them.
* Their routers choose for themselves: nothing was recorded for them, and no auxiliary loss is theirs.
"""

# megatron-core and torch.autograd are typed for what is used of them only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class FurtherTokens(NamedTuple):
    """What one layer is told about the inputs of one micro-batch that this rank has."""

    input_ids: Tensor
    """Tokens that are this layer's distance further on, int64 ``[1, T]``; 0 where there is none."""
    position_ids: Tensor
    """int64 ``[1, T]``"""
    predicted_at: Tensor
    """Inputs from which it predicts a trained token, int64 ``[M]``."""
    targets: Tensor
    """Those tokens, int64 ``[M]``."""


class PredictionLayer(MultiTokenPredictionLayer):
    """One layer, whose tokens are shifted when it gets them: packed sequences may be divided over ranks."""

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        **given: Any,  # noqa: ANN401 - megatron-core's own
    ) -> tuple[Tensor | None, ...]:
        made = embedding(input_ids=input_ids, position_ids=position_ids)
        mask = [given["padding_mask"]] if "padding_mask" in given else []  # from 0.18 on
        return input_ids, position_ids, *mask, made, hidden_states

    @property
    def inner(self) -> Any:  # noqa: ANN401 - as above
        """The decoder layer in it."""
        return self.transformer_layer if hasattr(self, "transformer_layer") else self.mtp_model_layer

    def _checkpointed_forward(
        self,
        *functions: Callable[..., Tensor],
        hidden_states: Tensor,
        decoder_input: Tensor,
        **given: Any,  # noqa: ANN401 - as above
    ) -> Tensor:
        """Compute again in the backward pass. megatron-core's own of 0.16 passes on what describes packed sequences as
        if it were a tensor; later ones do not say which function it is."""
        if self.config.fp8 or not functions:
            return super()._checkpointed_forward(
                *functions, hidden_states=hidden_states, decoder_input=decoder_input, **given
            )

        def again(hidden: Tensor, made: Tensor) -> Tensor:
            return functions[0](hidden_states=hidden, decoder_input=made, **given)

        return checkpoint(again, self.config.distribute_saved_activations, hidden_states, decoder_input)


class PredictingModel(GPTModel):
    """A model, or a stage of one, whose last stage has such layers."""

    trains_trunk: bool = False
    further_logits: list[Tensor] | None = None
    """Of the micro-batch that was just run, by layer: where this rank predicts a trained token ``[M, V / n]``."""

    def _postprocess(
        self,
        *,
        hidden_states: Tensor,
        rotary_pos_emb: Tensor | None,
        packed_seq_params: Any,  # noqa: ANN401 - those of :mod:`.moe`
        **_: Any,  # noqa: ANN401 - megatron-core's own
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        further = cast("tuple[FurtherTokens, ...]", packed_seq_params.further)
        if further:  # before the model's own logits, which are then the last that the output layer was asked for
            self.further_logits = self._predictions(hidden_states, further, rotary_pos_emb, packed_seq_params)
        logits: Tensor = self.output_layer(hidden_states)[0]
        return logits.transpose(0, 1).contiguous()

    def _predictions(
        self,
        hidden: Tensor,
        further: Sequence[FurtherTokens],
        rotary_pos_emb: Tensor | None,
        packed_seq_params: Any,  # noqa: ANN401 - as above
    ) -> list[Tensor]:
        head = None if self.trains_trunk else cast("Tensor", self.output_layer.weight).detach()
        hidden = hidden if self.trains_trunk else hidden.detach()
        found: list[Tensor] = []
        for layer, tokens in zip(self.mtp.layers, further, strict=True):
            hidden, *_ = layer(
                input_ids=tokens.input_ids,
                position_ids=tokens.position_ids,
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                embedding=self._embedded,
            )
            found.append(self.output_layer(hidden, weight=head)[0][tokens.predicted_at, 0])
        return found

    def _embedded(self, **given: Tensor) -> Tensor:
        made: Tensor = self.embedding(**given)
        return made if self.trains_trunk else cast("Tensor", _Constant.apply(made))  # type: ignore[no-untyped-call]


class _Constant(torch.autograd.Function):
    """Lets nothing of a gradient through but zeros. A weight that no gradient reaches would be waited for by whoever
    adds gradients up while the backward pass goes on, as the last stage's copy of the embedding."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        return torch.zeros_like(gradients[0])
