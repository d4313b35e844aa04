"""Bringing contexts into the cache: what is computed, what is copied, and what is there already.

Invariants:

* A prompt that some slot holds under the same weights is never computed again: its keys and values are copied. Of the
  requests whose prompt no slot holds, one a round is admitted and computes it; the others follow a step later.
* The last token of a context is not prefilled: the decode step feeds it. So every drawn token comes out of a decode
  step, whatever came before.
* Copies from slots that are about to be written over happen before the writing.

What fits into one pass rides along with the decode step: its rows share the matrix products, which for a few short
prompts cost little more than the step alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.engines.torch.attention import ContinuedAttention, FreshAttention, RaggedRows
from penstock.backends.engines.torch.cache import round_up
from penstock.backends.engines.torch.model import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.engines.torch.attention import Attention
    from penstock.backends.engines.torch.model import DecoderModel
    from penstock.backends.engines.torch.requests import Running
    from penstock.backends.engines.torch.slots import PromptIndex

MAX_PREFILL_TOKENS: Final = 2048
"""Padded tokens of one pass; a longer context has a pass of its own."""
MAX_CONTINUED_TOKENS: Final = 512
"""Tokens by which one pass continues a context; it bounds the mask ``[tokens, reach]``."""


class Stretch(NamedTuple):
    """Tokens of a context that are to enter the cache of a slot."""

    slot: int
    start: int
    tokens: list[int]


class Prefill(NamedTuple):
    """One pass over packed contexts."""

    rows: Rows
    attention: Attention


class Admission:
    """Fills the cache for newcomers, on top of what the slots hold."""

    def __init__(self, model: DecoderModel, prompts: PromptIndex) -> None:
        self._model = model
        self._prompts = prompts
        self.num_prefilled = 0
        """Tokens whose keys and values were computed, since the start."""

    def fill(self, newcomers: Sequence[tuple[int, Running]]) -> Prefill | None:
        """Bring the context of each (slot, request), but for its last token, into the cache, up to the pass that is
        returned, which the caller has to make. No two of them may have a prompt that no slot holds yet."""
        fresh: list[Stretch] = []
        continued: list[Stretch] = []
        for slot, running in newcomers:
            prompt = running.request.prompt
            source = self._prompts.find(prompt, {slot})
            num_held = 0 if source is None else len(running.prompt_tokens) - 1
            if source is not None and source != slot:
                self._model.cache.copy(source, slot, num_held)
            self._prompts.put(slot, prompt)
            tokens = running.prompt_tokens + running.prefix_tokens
            if len(tokens) - 1 > num_held:
                (continued if num_held else fresh).append(Stretch(slot, num_held, tokens[num_held:-1]))
        waiting: Prefill | None = None
        for prefill in self._passes(fresh, continued):
            if waiting is not None:
                self._model.hidden_states(waiting.rows, waiting.attention)
            waiting = prefill
        return waiting

    def _passes(self, fresh: list[Stretch], continued: list[Stretch]) -> Iterator[Prefill]:
        config = self._model.weights.config
        for batch in _batches(fresh):
            ragged, rows, _ = self._packed(batch)
            yield Prefill(rows, FreshAttention(config, ragged))
        while continued:
            for batch in _batches([s._replace(tokens=s.tokens[:MAX_CONTINUED_TOKENS]) for s in continued]):
                ragged, rows, slots = self._packed(batch)
                starts = torch.tensor([stretch.start for stretch in batch], device=slots.device)
                reach = round_up(max(stretch.start + len(stretch.tokens) for stretch in batch))
                yield Prefill(rows, ContinuedAttention(config, ragged, self._model.cache, slots, starts, reach))
            continued = [
                Stretch(s.slot, s.start + MAX_CONTINUED_TOKENS, s.tokens[MAX_CONTINUED_TOKENS:])
                for s in continued
                if len(s.tokens) > MAX_CONTINUED_TOKENS
            ]

    def _packed(self, batch: list[Stretch]) -> tuple[RaggedRows, Rows, torch.Tensor]:
        device = self._model.weights.device
        ragged = RaggedRows.pack([s.tokens for s in batch], [s.start for s in batch], device)
        slots = torch.tensor([stretch.slot for stretch in batch], device=device)
        slot_of_row = slots.index_select(0, ragged.places // ragged.longest)
        addresses = self._model.cache.addresses(slot_of_row, ragged.positions)
        self.num_prefilled += ragged.tokens.shape[0]
        return ragged, Rows(ragged.tokens, ragged.positions, addresses, num_kept=0), slots


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
