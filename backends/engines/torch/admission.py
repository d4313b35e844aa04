"""Bringing contexts into the cache: what is computed, what is copied, and what is there already.

Invariants:

* A prompt that some slot holds under the same weights is never computed again: its keys and values are copied. Of the
  requests whose prompt no slot holds, one a round is admitted and computes it; the others follow a step later.
* The last token of a context is not prefilled: the decode step feeds it. So every drawn token comes out of a decode
  step, whatever came before.
* Prompt and prefix are two stretches, whether the prompt is held or not, and attention sees each only beside others
  whose padded shape is the same. So what a request computes does not depend on what is admitted with it.
* On a CPU in float32 a prefix is computed by the products of the decode steps that first made it, so a response goes on
  from the bits that it would have had.
* Copies from slots that are about to be written over happen before the writing.

What fits into one pass rides along with the decode step: its rows share the matrix products, which for a few short
prompts cost little more than the step alone.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from penstock.backends.engines.torch.attention import (
    ContinuedAttention,
    FreshAttention,
    RaggedRows,
    ReplayedAttention,
    Segments,
    SlotRange,
)
from penstock.backends.engines.torch.cache import round_up
from penstock.backends.engines.torch.model import Rows
from penstock.backends.engines.torch.sight import Stretch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.backends.engines.torch.attention import Attention
    from penstock.backends.engines.torch.learner_model import LearnerModel
    from penstock.backends.engines.torch.model import DecoderModel
    from penstock.backends.engines.torch.requests import Running
    from penstock.backends.engines.torch.slots import PromptIndex

MAX_PREFILL_TOKENS: Final = 2048
"""Padded tokens of one pass; a longer context has a pass of its own."""
MAX_CONTINUED_TOKENS: Final = 512
"""Longest stretch of a continued context; it bounds the mask ``[tokens, reach]``."""


class Shape(NamedTuple):
    """What stretches must have in common to be attended together, in the order in which passes are made: a stretch
    that continues another one of its slot reaches further."""

    reach: int
    """Beyond the last position, rounded up; 0 for fresh contexts."""
    padded_length: int


class Prefill(NamedTuple):
    """One pass over packed contexts."""

    rows: Rows
    parts: list[tuple[int, Attention]]
    """Number of rows and attention of each group."""


class Admission:
    """Fills the cache for newcomers, on top of what the slots hold."""

    def __init__(self, model: DecoderModel | LearnerModel, prompts: PromptIndex, *, is_exact: bool = False) -> None:
        """
        Args:
            model: that is asked.
            prompts: which slot holds which.
            is_exact: prompts, too, are computed by the products of decode steps, and all at the cache's full length.
        """
        self._model = model
        self._is_exact = is_exact
        self._prompts = prompts
        self.num_prefilled = 0
        """Tokens whose keys and values were computed, since the start."""

    def fill(self, newcomers: Sequence[tuple[int, Running]]) -> Prefill | None:
        """Bring the context of each (slot, request), but for its last token, into the cache, up to the pass that is
        returned, which the caller has to make.

        A slot is entered as holding its prompt at once when that was copied, and at the end when it is still to be
        computed: so nobody copies what is not there. Should two of them want a prompt whose only holder is written
        over by a third, both compute it.
        """
        stretches: list[Stretch] = []
        computing: list[tuple[int, bytes]] = []
        for slot, running in newcomers:
            prompt = running.request.prompt_key
            source = self._prompts.find(prompt, {slot})
            num_held = len(running.prompt_tokens) - 1
            if source is None:
                self._prompts.put(slot, None)
                computing.append((slot, prompt))
                if num_held:
                    stretches.append(Stretch(slot, 0, running.prompt_tokens[:-1], not self._is_exact, running.sight))
            elif source != slot:
                self._model.cache.copy(source, slot, num_held)
                self._prompts.put(slot, prompt)
            if running.prefix_tokens:
                rest = running.prompt_tokens[-1:] + running.prefix_tokens[:-1]
                for begin in range(0, len(rest), MAX_CONTINUED_TOKENS):
                    tokens = rest[begin : begin + MAX_CONTINUED_TOKENS]
                    stretches.append(Stretch(slot, num_held + begin, tokens, False, running.sight))
        for slot, prompt in computing:
            self._prompts.put(slot, prompt)
        passes = list(_passes(stretches))
        for groups in passes[:-1]:
            prefill = self._packed(groups)
            self._model.hidden_states(prefill.rows, Segments(prefill.parts))
        return self._packed(passes[-1]) if passes else None

    def _packed(self, groups: list[tuple[Shape, list[Stretch]]]) -> Prefill:
        config, cache, device = self._model.weights.config, self._model.cache, self._model.weights.device
        tokens: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        addresses: list[torch.Tensor] = []
        parts: list[tuple[int, Attention]] = []
        for shape, stretches in groups:
            starts = [stretch.start for stretch in stretches]
            ragged = RaggedRows.pack([stretch.tokens for stretch in stretches], starts, device)
            slots = torch.tensor([stretch.slot for stretch in stretches], device=device)
            slot_of_row = slots.index_select(0, ragged.places // ragged.padded_length)
            attention: Attention
            if not shape.reach:
                attention = FreshAttention(config, ragged)
            elif cache.is_plain:
                reach = cache.capacity if self._is_exact else shape.reach
                parts_of_slots = [
                    (SlotRange(stretch.slot, stretch.slot + 1, reach), stretch.start, len(stretch.tokens))
                    for stretch in stretches
                ]
                attention = ReplayedAttention(config, cache, parts_of_slots)
            else:
                first = torch.tensor(starts, device=device)
                attention = ContinuedAttention(config, ragged, cache, slots, first, shape.reach)
            tokens.append(ragged.tokens)
            positions.append(ragged.positions)
            addresses.append(cache.addresses(slot_of_row, ragged.positions))
            parts.append((ragged.num_rows, attention))
        looking = [stretch for _, stretches in groups for stretch in stretches]
        turned, seen = torch.cat(positions), None
        if any(stretch.sight is not None for stretch in looking):
            assert self._model.weights.eyes is not None
            turned, seen = self._model.weights.eyes.rows(looking)
        rows = Rows(torch.cat(tokens), turned, torch.cat(addresses), num_kept=0, seen=seen)
        self.num_prefilled += rows.tokens.shape[0]
        return Prefill(rows, parts)


def _passes(stretches: Sequence[Stretch]) -> Iterator[list[tuple[Shape, list[Stretch]]]]:
    """Groups of stretches of one shape each; a pass has at most :data:`MAX_PREFILL_TOKENS` padded tokens."""
    by_shape: defaultdict[Shape, list[Stretch]] = defaultdict(list)
    for stretch in stretches:
        reach = 0 if stretch.is_fresh else round_up(stretch.start + len(stretch.tokens))
        by_shape[Shape(reach, round_up(len(stretch.tokens)))].append(stretch)
    groups: list[tuple[Shape, list[Stretch]]] = []
    room = MAX_PREFILL_TOKENS
    for shape in sorted(by_shape):
        left = by_shape[shape]
        while left:
            num_taken = room // shape.padded_length
            if not num_taken and groups:
                yield groups
                groups, room = [], MAX_PREFILL_TOKENS
                continue
            taken, left = left[: max(1, num_taken)], left[max(1, num_taken) :]
            groups.append((shape, taken))
            room -= shape.padded_length * len(taken)
    if groups:
        yield groups
