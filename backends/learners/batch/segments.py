"""Sums and means over the tokens of each sample, for tensors that are laid end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segments:
    """Which of the ``N`` tokens belong to which of ``count`` segments (samples, or groups of them)."""

    index: Tensor
    """Segment of each token, int64 ``[N]``, in any order."""
    count: int
    mask: Tensor | None = None
    """0 where a token is not counted ``[N]``; None: all are."""

    def sums(self, values: Tensor) -> Tensor:
        """Sum of ``values [N]`` over the counted tokens of each segment ``[count]``."""
        counted = values if self.mask is None else values * self.mask
        return values.new_zeros(self.count).index_add(0, self.index, counted)

    def sizes(self, like: Tensor) -> Tensor:
        """Counted tokens of each segment ``[count]``, in the dtype of ``like [N]``."""
        return self.sums(like.new_ones(like.shape))

    def means(self, values: Tensor) -> Tensor:
        """Mean over the counted tokens of each segment ``[count]``; 0 for a segment without any."""
        return self.sums(values) / self.sizes(values).clamp(min=1)

    def spread(self, per_segment: Tensor) -> Tensor:
        """Of each token, the value of its segment: ``[count]`` → ``[N]``, masked tokens included."""
        return per_segment[self.index]
