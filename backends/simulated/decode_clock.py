"""How quickly all running requests of a modelled engine advance, and what holds them up.

One step gives every running request a token. With ``n`` requests that hold ``C`` tokens together it takes

    token_s + (n − 1) · token_load_s + C · context_token_s

seconds. ``C`` grows by ``n`` a step, so ``x`` steps take ``x·B + context_token_s·n·x²/2`` with ``B`` the time of the
first; nothing happens per token. Prefills come first: while one is computed nobody advances.

Invariants:

* The count never goes back; between two calls of :meth:`DecodeClock.advance` nobody is admitted and nobody leaves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backends.engines.options import LatencyOptions


class DecodeClock:
    """The shared count of tokens of one engine."""

    __slots__ = (
        "_context_s", "_counted_s", "_held_s", "_load_s", "_prefill_token_s", "_speed", "_token_s",
        "context_tokens", "count", "num_running",
    )  # fmt: skip

    def __init__(self, model: LatencyOptions, *, speed: float, now_s: float) -> None:
        self.count = 0.0
        """Tokens that a request would have made that ran from the start."""
        self.num_running = 0
        self.context_tokens = 0.0
        """That the running requests hold together: prompts and what was made."""
        self._prefill_token_s = model.prefill_token_s
        self._token_s, self._load_s, self._context_s = model.token_s, model.token_load_s, model.context_token_s
        self._speed = speed
        self._counted_s = now_s
        self._held_s = 0.0
        """What is left of the prefills."""

    def admit(self, context_tokens: int, prefill_tokens: float) -> None:
        """A request that holds so many tokens runs from now on; so many of them have to be computed first."""
        self.num_running += 1
        self.context_tokens += context_tokens
        self._held_s += self._prefill_token_s * prefill_tokens / self._speed

    def leave(self, context_tokens: float) -> None:
        """One that was admitted with so many, plus what the count has gained since, runs no more."""
        self.num_running -= 1
        self.context_tokens = self.context_tokens - context_tokens if self.num_running else 0.0

    def advance(self, now_s: float, *, is_paused: bool) -> None:
        """Bring the count up to now."""
        elapsed_s, self._counted_s = now_s - self._counted_s, now_s
        if is_paused or not self.num_running:
            return
        if self._held_s:
            held_s = min(elapsed_s, self._held_s)
            self._held_s -= held_s
            elapsed_s -= held_s
        gained = self._tokens_in(elapsed_s)
        self.count += gained
        self.context_tokens += gained * self.num_running

    def when(self, count: float) -> float:
        """The moment at which the count will be there, if nothing changes."""
        tokens, step_s = max(0.0, count - self.count), self.step_s
        growth_s = self._context_s * self.num_running / self._speed
        return self._counted_s + self._held_s + tokens * step_s + growth_s * tokens * tokens / 2

    def count_at(self, context_tokens: float) -> float:
        """The count at which the running requests will hold so many tokens; never, where none runs."""
        left = context_tokens - self.context_tokens
        return self.count + left / self.num_running if self.num_running else math.inf

    @property
    def step_s(self) -> float:
        """Of the next token of every running request."""
        load_s = (self.num_running - 1) * self._load_s + self.context_tokens * self._context_s
        return (self._token_s + load_s) / self._speed

    def _tokens_in(self, seconds: float) -> float:
        step_s = self.step_s
        if not self._context_s:
            return seconds / step_s
        growth_s = self._context_s * self.num_running / self._speed
        # The root of growth_s·x²/2 + step_s·x = seconds, written so that nothing cancels.
        return 2 * seconds / (step_s + math.sqrt(step_s * step_s + 2 * growth_s * seconds))
