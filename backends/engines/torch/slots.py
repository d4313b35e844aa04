"""The state of every slot that a decode step reads and writes, on the device.

Legend: S slots, n of them running, C positions, m newcomers.

Invariants:

* The running requests occupy slots 0 … n−1, so a step works on the slice ``[:n]`` of every tensor here.
* An idle slot that a step feeds writes behind the context that it held: keys and values of that context's prompt stay
  good for copies.
* Row ``s`` of ``tokens`` and ``logprobs`` belongs to the context in slot ``s``, by position; nothing is fetched from
  the device before someone asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import torch

from penstock.backends.engines.kept_tokens import pack_kept
from penstock.backends.engines.torch.sampling import SampleWords, as_uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.engines.torch.cache import KeyValueCache
    from penstock.backends.engines.torch.requests import Running
    from penstock.messages.kept_tokens import KeptTokens

MASKED: Final = float("-inf")
MIN_ROWS: Final = 4
"""A step feeds at least so many slots. Matrix products of fewer rows go through other kernels, with other rounding;
from here on a row's result does not depend on the number of rows (with MKL on AVX-512; elsewhere it may)."""


class RunningSlots(NamedTuple):
    """Views on the state of the slots 0 … m−1, of which n ≤ m run. Made once for each n: at one request a view costs as
    much as a small matrix product."""

    num_running: int
    """n"""
    fed: torch.Tensor
    """int64 ``[m]``"""
    position: torch.Tensor
    """int64 ``[m]``"""
    advancing: torch.Tensor
    """int64 ``[n]``: the positions of those that run."""
    at: torch.Tensor
    """int64 ``[m, 1]``: the positions of all."""
    last: torch.Tensor
    """int64 ``[m]``"""
    first_address: torch.Tensor
    """int64 ``[m, 2K]``: of the slots' keys and values in the cache."""
    mask: torch.Tensor
    """``[m, C]``"""
    shift: torch.Tensor
    """int64 ``[m]``"""
    uniform: torch.Tensor
    """float64 ``[m, C]``"""
    tokens: torch.Tensor
    """int64 ``[m, C]``"""
    logprobs: torch.Tensor
    """float32 ``[m, C]``"""
    kept: torch.Tensor | None
    """int32 ``[m, C, W]``"""


class SlotState:
    """S slots of C positions each."""

    def __init__(
        self, num_slots: int, cache: KeyValueCache, dtype: torch.dtype, device: torch.device, num_recorded: int = 0
    ) -> None:
        """``num_recorded``: W, tokens that are kept for one at most and recorded; 0: none are."""
        self._cache = cache
        self._device = device
        self._words = SampleWords()
        shape = (num_slots, cache.capacity)
        self._numbers = torch.zeros(4, num_slots, dtype=torch.int64, device=device)
        self.fed, self.position, self.last, self.shift = self._numbers.unbind(0)
        """``[S]`` each: the token that the next step feeds, its position, the position at which the length limit ends
        the response, and what the rotary embedding adds to positions after the prompt."""
        self.mask = torch.full(shape, MASKED, dtype=dtype, device=device)
        """``[S, C]``: 0 for the positions that are in the cache, −∞ for the others."""
        self.uniform = torch.zeros(shape, dtype=torch.float64, device=device)
        """``[S, C]``: the number that draws the token after the one at this position."""
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        """``[S, C]``: the drawn token after the one at this position."""
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        """``[S, C]``: its log-prob."""
        self.kept = torch.full((*shape, num_recorded), -1, dtype=torch.int32, device=device) if num_recorded else None
        """``[S, C, W]``: what it was drawn from, −1 where there are fewer."""
        self._range = torch.arange(cache.capacity, device=device)
        self._seen = torch.zeros((), dtype=dtype, device=device)
        self._hidden = torch.full((), MASKED, dtype=dtype, device=device)

    def place(self, newcomers: Sequence[tuple[int, Running]]) -> None:
        """Make these slots ready to decode these requests, whose contexts but for the last token are, or are about
        to be, in the cache."""
        slots = torch.tensor([slot for slot, _ in newcomers], device=self._device)
        numbers = [(each.last_token, each.first_position, each.last_position, each.shift) for _, each in newcomers]
        packed = torch.tensor(numbers, device=self._device).t()
        self._numbers.index_copy_(1, slots, packed)
        self.mask.index_copy_(0, slots, torch.where(self._range < packed[1, :, None], self._seen, self._hidden))
        words = np.zeros((len(newcomers), self._cache.capacity), dtype=np.uint64)
        for row, (_, running) in enumerate(newcomers):
            limit = running.request.max_new_tokens
            begin = len(running.prompt_tokens) - 1
            words[row, begin : begin + limit] = self._words.of(running.request.seed, limit)
        self.uniform.index_copy_(0, slots, torch.as_tensor(as_uniforms(words)).to(self._device))

    def running(self, n: int, m: int) -> RunningSlots:
        """The first ``n`` slots, which run, and idle ones to make up ``m``."""
        position = self.position[:m]
        return RunningSlots(
            num_running=n,
            fed=self.fed[:m],
            position=position,
            advancing=position[:n],
            at=position[:, None],
            last=self.last[:m],
            first_address=self._cache.first_addresses(m),
            mask=self.mask[:m],
            shift=self.shift[:m],
            uniform=self.uniform[:m],
            tokens=self.tokens[:m],
            logprobs=self.logprobs[:m],
            kept=None if self.kept is None else self.kept[:m],
        )

    def move(self, source: int, target: int, num_positions: int) -> None:
        """Let slot ``target`` go on where ``source`` stands, ``num_positions`` into its context."""
        self._cache.copy(source, target, num_positions)
        self._numbers[:, target].copy_(self._numbers[:, source])
        for table in (self.mask, self.uniform, self.tokens, self.logprobs, self.kept):
            if table is not None:
                table[target].copy_(table[source])

    def drawn(self, slot: int, begin: int, end: int) -> tuple[bytes, bytes]:
        """Tokens (int32) and log-probs (float32) drawn at the positions ``begin`` … ``end − 1``."""
        tokens = self.tokens[slot, begin:end].cpu().numpy().astype(np.int32)
        return tokens.tobytes(), self.logprobs[slot, begin:end].cpu().numpy().tobytes()

    def kept_for(self, slot: int, begin: int, end: int) -> KeptTokens | None:
        """What these were drawn from."""
        if self.kept is None:
            return None
        # Memory that NumPy has seen cannot be given up while the engine sleeps.
        return pack_kept(self.kept[slot, begin:end].to("cpu", copy=True).numpy())


class PromptIndex:
    """Which slots hold the keys and values of which prompt, made by the weights that are loaded now.

    A slot that has ended keeps its entry until it is written over, so the rest of a group finds its prompt there.
    """

    def __init__(self, num_slots: int) -> None:
        self._prompt_of: list[bytes | None] = [None] * num_slots
        self._slots_of: dict[bytes, set[int]] = {}

    def find(self, prompt: bytes, preferred: set[int]) -> int | None:
        """A slot with this prompt, one of the ``preferred`` if possible."""
        slots = self._slots_of.get(prompt)
        if not slots:
            return None
        return min(slots & preferred, default=min(slots))

    def put(self, slot: int, prompt: bytes | None) -> None:
        """``slot`` now holds this prompt and no other; None: nothing of use."""
        old = self._prompt_of[slot]
        if old is not None:
            self._slots_of[old].discard(slot)
            if not self._slots_of[old]:
                del self._slots_of[old]
        self._prompt_of[slot] = prompt
        if prompt is not None:
            self._slots_of.setdefault(prompt, set()).add(slot)

    def prompt_in(self, slot: int) -> bytes | None:
        """The prompt that the slot holds."""
        return self._prompt_of[slot]

    def clear(self) -> None:
        """Forget all: other weights were loaded."""
        self._prompt_of = [None] * len(self._prompt_of)
        self._slots_of.clear()


def integers(tensor: torch.Tensor) -> list[int]:
    """Its numbers, one after the other."""
    return cast("list[int]", tensor.flatten().tolist())  # pyright: ignore[reportUnknownMemberType]  # torch has no type
