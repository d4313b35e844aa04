"""How large micro-batches are where memory does not suffice for those that were asked for."""

from __future__ import annotations

import logging
from typing import Final

_log: Final = logging.getLogger(__name__)


class MicroBatchSize:
    """How many inputs a micro-batch may have; found once, if the one that was asked for does not fit."""

    def __init__(self, max_tokens: int, *, is_speaker: bool, advice: str) -> None:
        """
        Args:
            max_tokens: that was asked for.
            is_speaker: whether this rank tells of it.
            advice: for who has nothing to halve.
        """
        self._advice = advice
        self.max_tokens = max_tokens
        self._is_speaker = is_speaker
        self._told = max_tokens

    def go_on_with(self, max_tokens: int) -> None:
        """Another learner of the run has found it, and told."""
        self.max_tokens = self._told = min(self.max_tokens, max(1, max_tokens))

    def halve(self, *, can_be_finer: bool) -> None:
        """
        Args:
            can_be_finer: whether some micro-batch has several sequences.

        Raises:
            MemoryError: there is nothing to divide.
        """
        if not can_be_finer:
            raise MemoryError(
                f"out of memory with each sequence in a micro-batch of its own (at {self.max_tokens} tokens each); "
                f"{self._advice}"
            )
        self.max_tokens = max(1, self.max_tokens // 2)

    def worked(self, *, step: int) -> None:
        """A step was computed with it, after one that lacked memory."""
        if self.max_tokens != self._told and self._is_speaker:
            _log.warning(
                "step %d: out of memory with micro-batches of %d tokens, so they have %d from now on; the result is "
                "the same. Write it into the scenario to save the search: learner.max_tokens_per_micro_batch: %d",
                step,
                self._told,
                self.max_tokens,
                self.max_tokens,
            )
        self._told = self.max_tokens
