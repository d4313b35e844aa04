"""The learner's own model in the place of the engine's fast one, for ``learner.true_on_policy``.

Invariants:

* Everything but attention is computed by the modules of transformers that the learner trains, with the products of
  :mod:`penstock.backends.learners.torch.row_products`.
* Attention reads the cache at its full length, one position at a time, whether it decodes or fills the cache.

So a token is drawn from the very distribution that the learner computes, and its log-prob has the learner's bits. It
has the interface of :class:`.DecoderModel` and :class:`.FusedWeights`.
"""

# torch and transformers are typed in part only:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

import torch
from torch.nn import functional
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from penstock.backends.checkpoint.terminal import quiet_transformers
from penstock.backends.engines.torch.weights import check_parameters, shapes_of
from penstock.backends.learners.torch.row_products import filled_up, multiply_in_tiles
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedModel

    from penstock.backends.checkpoint.model_config import ModelConfig
    from penstock.backends.engines.torch.attention import Attention
    from penstock.backends.engines.torch.cache import KeyValueCache
    from penstock.backends.engines.torch.low_rank import Adapters
    from penstock.backends.engines.torch.model import Rows
    from penstock.backends.engines.torch.vision import EngineEyes

CACHED_ATTENTION: Final = "penstock_cached"
"""Name under which transformers finds the attention over an engine's cache."""


class LearnerWeights:
    """The model of a folder's ``config.json``, with unset weights until the first ``load``."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        """
        Raises:
            UserFault: the model has experts, or sees.
        """
        if config.vision is not None:
            raise UserFault(f"learner.true_on_policy: {folder} is a model that sees, whose images it does not cover")
        self.config = config
        self.eyes: EngineEyes | None = None
        """As :class:`.FusedWeights` has them; never here."""
        self.dtype, self.device, self.fold = torch.float32, torch.device("cpu"), False
        with quiet_transformers():
            own = AutoConfig.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                own, dtype=self.dtype, attn_implementation=CACHED_ATTENTION
            )
        self.model = cast("PreTrainedModel", model)
        self.model.eval()  # type: ignore[no-untyped-call]
        multiply_in_tiles(self.model)

    def tensors(self) -> list[torch.Tensor]:
        """All memory of the weights, each once."""
        return [parameter.data for parameter in self.model.parameters()]

    def load(self, tensors: Mapping[str, torch.Tensor] | None, adapters: Adapters | None = None) -> bool:
        """See :meth:`.FusedWeights.load`."""
        assert tensors is not None, "it has the learner's weights whole"
        assert adapters is None, "the scenario refuses learner.lora"
        check_parameters(self.config, shapes_of(tensors))
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(tensors[name])
        return False


class _CachedRows(NamedTuple):
    rows: Rows
    cache: KeyValueCache
    attention: Attention


class LearnerModel:
    """Computes packed rows over one cache."""

    def __init__(self, weights: LearnerWeights, cache: KeyValueCache) -> None:
        self.weights = weights
        self.cache = cache

    def hidden_states(self, rows: Rows, attention: Attention) -> torch.Tensor:
        """Hidden states ``[num_kept, H]`` after the final norm."""
        output = self.weights.model.base_model(
            input_ids=filled_up(rows.tokens)[None],
            position_ids=filled_up(rows.positions)[None],
            use_cache=False,
            cached_rows=_CachedRows(rows, self.cache, attention),
        )
        return cast("torch.Tensor", output.last_hidden_state)[0, : rows.num_kept]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, H]`` to float32 ``[N, V]``."""
        head = cast("torch.nn.Module", self.weights.model.get_output_embeddings())  # type: ignore[no-untyped-call]
        return cast("torch.Tensor", head(hidden))


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cached_rows: _CachedRows,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Put the keys and values ``[1, K, N, D]`` into the cache and let the rows of ``query [1, H, N, D]`` attend."""
    layer = cast("int", module.layer_idx)
    (rows, cache, attention), (_, num_heads, num_filled, size) = cached_rows, query.shape
    num_rows = len(rows.tokens)
    heads = torch.cat((query, key, value), 1)[0, :, :num_rows].transpose(0, 1).contiguous()
    if rows.addresses is not None:
        cache.write(layer, rows.addresses, heads[:, num_heads:])
    context = functional.pad(attention(layer, heads), (0, 0, 0, num_filled - num_rows))
    return context.view(1, num_filled, num_heads, size), None


AttentionInterface.register(CACHED_ATTENTION, cached_attention)
