"""Bringing requests into slots: who goes where, and which keys and values are computed, copied, or there already.

Invariants:

* Of each distinct prompt that no slot holds, one request of a round computes the keys and values; the others of the
  round copy them. A prompt that some slot holds under the same weights is never computed again.
* The last token of a context is not prefilled: the first decode step feeds it. So every drawn token comes out of a
  decode step, whatever came before.
* Copies from slots that are about to be written over happen before the writing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.engines.torch.attention import ContinuedAttention, FreshAttention, RaggedRows
from penstock.backends.engines.torch.cache import round_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.engines.torch.cache import KeyValueCache
    from penstock.backends.engines.torch.model import DecoderModel
    from penstock.backends.engines.torch.requests import Running
    from penstock.backends.engines.torch.slots import PromptIndex

MAX_PREFILL_TOKENS: Final = 2048
"""Padded tokens of one prefill pass; a longer context has a pass of its own."""
MAX_CONTINUED_TOKENS: Final = 512
"""Tokens by which one pass continues a context; it bounds the mask ``[tokens, reach]``."""


class Stretch(NamedTuple):
    """Tokens of a context that are to enter the cache of a slot."""

    slot: int
    start: int
    tokens: list[int]


class Admission:
    """One round of admissions, on top of what the slots hold."""

    def __init__(self, model: DecoderModel, cache: KeyValueCache, prompts: PromptIndex) -> None:
        self._model = model
        self._cache = cache
        self._prompts = prompts
        self.num_prefilled = 0
        """Tokens whose keys and values were computed, since the start."""

    def fill(self, newcomers: Sequence[tuple[int, Running]]) -> None:
        """Bring the context of each (slot, request), but for its last token, into the cache."""
        fresh: list[Stretch] = []
        continued: list[Stretch] = []
        copies: list[tuple[int, int, int]] = []
        leaders: dict[bytes, int] = {}
        for slot, running in newcomers:
            prompt = running.request.prompt
            shared = len(running.prompt_tokens) - 1
            context = running.prompt_tokens + running.prefix_tokens
            source = self._prompts.find(prompt, {slot})
            if source is not None and prompt not in leaders:
                if source != slot:
                    self._cache.copy(source, slot, shared)
            elif prompt in leaders:
                copies.append((leaders[prompt], slot, shared))
            else:
                leaders[prompt] = slot
                shared = 0
            self._prompts.put(slot, prompt)
            if len(context) - 1 > shared:
                stretch = Stretch(slot, shared, context[shared:-1])
                (continued if shared else fresh).append(stretch)
        self._prefill(fresh)
        for source, target, length in copies:
            self._cache.copy(source, target, length)
        self._continue(continued)

    def _prefill(self, stretches: list[Stretch]) -> None:
        for batch in _batches(stretches):
            rows, addresses, _ = self._packed(batch)
            attention = FreshAttention(self._model.weights.config, rows, self._cache, addresses)
            self._model.hidden_states(rows.tokens, rows.positions, attention)

    def _continue(self, stretches: list[Stretch]) -> None:
        while stretches:
            heads = [s._replace(tokens=s.tokens[:MAX_CONTINUED_TOKENS]) for s in stretches]
            for batch in _batches(heads):
                rows, addresses, slots = self._packed(batch)
                starts = torch.tensor([stretch.start for stretch in batch], device=slots.device)
                reach = round_up(max(stretch.start + len(stretch.tokens) for stretch in batch))
                attention = ContinuedAttention(
                    self._model.weights.config, rows, self._cache, addresses, slots, starts, reach
                )
                self._model.hidden_states(rows.tokens, rows.positions, attention)
            stretches = [
                Stretch(s.slot, s.start + MAX_CONTINUED_TOKENS, s.tokens[MAX_CONTINUED_TOKENS:])
                for s in stretches
                if len(s.tokens) > MAX_CONTINUED_TOKENS
            ]

    def _packed(self, batch: list[Stretch]) -> tuple[RaggedRows, torch.Tensor, torch.Tensor]:
        device = self._model.weights.device
        rows = RaggedRows.pack([s.tokens for s in batch], [s.start for s in batch], device)
        slots = torch.tensor([stretch.slot for stretch in batch], device=device)
        slot_of_row = slots[rows.places // rows.longest]
        self.num_prefilled += rows.tokens.shape[0]
        return rows, self._cache.addresses(slot_of_row, rows.positions), slots


def _batches(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Stretches of similar length together, at most :data:`MAX_PREFILL_TOKENS` padded tokens each."""
    batch: list[Stretch] = []
    for stretch in sorted(stretches, key=lambda s: len(s.tokens), reverse=True):
        if batch and len(batch[0].tokens) * (len(batch) + 1) > MAX_PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(stretch)
    if batch:
        yield batch
