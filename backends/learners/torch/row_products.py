"""Products whose bits do not depend on what stands beside a row: the kernels of ``learner.true_on_policy``.

A matrix product rounds by its shape: the library takes another kernel, or divides the sum otherwise, where there are
more rows or a longer context. So here every product has one shape, in the learner and in the embedded engine alike,
which compute with this very code:

* linear layers multiply :data:`TILE` rows at a time, the last of them filled up with zeros;
* a model is given a multiple of :data:`TILE` tokens, because a function such as ``exp`` is computed otherwise for the
  few numbers that are left over behind the last full vector register (and for those behind each thread's share, so
  there is one thread);
* attention asks one position at a time, against keys and values that are filled up to one length for the whole run.

Axis letters: ``L`` positions of a sequence, ``K`` key-value heads, ``G`` query heads for each of them, ``D`` head size,
``C`` the length that contexts are filled up to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn import functional

from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

TILE: Final = 32
"""Rows of one product."""
BLOCK: Final = 32
"""Contexts are filled up to a multiple of so many positions, as the engine's cache is."""


class TiledLinear(nn.Linear):
    """A linear layer that multiplies :data:`TILE` rows at a time."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """As that of a linear layer."""
        rows = input.reshape(-1, input.shape[-1])
        filled = functional.pad(rows, (0, 0, 0, -len(rows) % TILE))
        products = [functional.linear(tile, self.weight, self.bias) for tile in torch.split(filled, TILE)]
        return torch.cat(products)[: len(rows)].view(*input.shape[:-1], -1)


def filled_up(tokens: Tensor) -> Tensor:
    """``[N]`` with zeros up to the next multiple of :data:`TILE`."""
    return functional.pad(tokens, (0, -len(tokens) % TILE))


def multiply_in_tiles(model: PreTrainedModel) -> None:
    """Let every linear layer of a model multiply in tiles from here on.

    Raises:
        UserFault: it has experts, whose products have as many rows as tokens go to each.
    """
    if getattr(model.config, "num_experts", None) or getattr(model.config, "num_local_experts", None):
        raise UserFault(
            f"learner.true_on_policy: {type(model).__name__} has experts, and how many tokens go to one changes how it "
            "rounds; take a dense model, or remove learner.true_on_policy"
        )
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = TiledLinear


def attend_row_by_row(queries: Tensor, keys: Tensor, values: Tensor, *, num_places: int, scale: float) -> Tensor:
    """Causal attention of a sequence by the products that decoding it makes, one position at a time.

    Args:
        queries: ``[L, K, G, D]``.
        keys: ``[K, L, D]``.
        values: ``[K, L, D]``.
        num_places: C, at least L.
        scale: of the scores.

    Returns:
        ``[L, K, G, D]``.
    """
    length = len(queries)
    place = torch.arange(num_places, device=queries.device)
    seen = place[None, :] <= place[:length, None]
    mask = queries.new_zeros(length, num_places).masked_fill_(~seen, float("-inf")).unsqueeze(1)
    filled = (0, 0, 0, num_places - length)
    keys, values = functional.pad(keys, filled), functional.pad(values, filled)
    heads: list[Tensor] = []
    for head, (own_keys, own_values) in enumerate(zip(keys, values, strict=True)):
        transposed = own_keys.t().expand(length, -1, -1)
        scores = torch.baddbmm(mask, queries[:, head], transposed, alpha=scale)
        heads.append(torch.bmm(torch.softmax(scores, -1), own_values.expand(length, -1, -1)))
    return torch.stack(heads, dim=1)
