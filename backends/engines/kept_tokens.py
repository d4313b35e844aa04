"""Tokens that were kept for each draw, as they travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.kept_tokens import KeptTokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def pack_kept(kept: NDArray[np.int32]) -> KeptTokens | None:
    """From ids ``[T, W]`` in which −1 stands for none; None where there are none at all."""
    is_kept = kept >= 0
    if not is_kept.any():
        return None
    return KeptTokens(is_kept.sum(1).astype("<u2").tobytes(), kept[is_kept].astype("<i4").tobytes())
