"""Which tokens an engine drew from, where a cut-off (top-p, top-k, min-p) left only some of the vocabulary.

Invariants:

* The token that was drawn is among those that were kept for it.
* A token without a record was drawn from the whole vocabulary, or nobody knows: its log-prob is of the whole
  distribution. With a record it is of the tokens that were kept, which add up to 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.messages.arrays import TOKEN_BYTES, ArrayLengthError
from penstock.messages.base import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

COUNT_BYTES: Final = 2
MAX_COUNT: Final = (1 << 16) - 1
"""That a record can say of one token."""
MAX_KEPT: Final = 4096
"""That a scenario can ask for: as many as a stock SGLang server names."""


class KeptTokens(Value, frozen=True, array_like=True):
    """Of T tokens: ``2 T`` bytes, and 4 for each token that was kept for one of them."""

    counts: bytes
    """uint16 ``[T]``: how many were kept; 0 where nothing was recorded."""
    ids: bytes
    """int32, those of the first token, then those of the second, …"""

    def __post_init__(self) -> None:
        if len(self.counts) % COUNT_BYTES or self._num_ids(0, self.num_tokens) * TOKEN_BYTES != len(self.ids):
            raise ArrayLengthError(
                f"kept tokens: {len(self.counts)} bytes of counts do not add up to {len(self.ids)} bytes of ids"
            )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.counts) // COUNT_BYTES

    @property
    def num_recorded(self) -> int:
        """Tokens of which something was recorded."""
        return sum(map(bool, memoryview(self.counts).cast("H")))

    def between(self, begin: int, end: int) -> KeptTokens | None:
        """Of the tokens ``begin`` … ``end − 1``; None where nothing was recorded of them."""
        first = self._num_ids(0, begin) * TOKEN_BYTES
        last = first + self._num_ids(begin, end) * TOKEN_BYTES
        counts = self.counts[begin * COUNT_BYTES : end * COUNT_BYTES]
        return KeptTokens(counts, self.ids[first:last]) if last > first else None

    def _num_ids(self, begin: int, end: int) -> int:
        return sum(memoryview(self.counts).cast("H")[begin:end])


def joined_kept(stretches: Iterable[tuple[KeptTokens | None, int]]) -> KeptTokens | None:
    """Of successive stretches of so many tokens each; None where nothing was recorded of any."""
    found = list(stretches)
    if all(kept is None for kept, _ in found):
        return None
    return KeptTokens(
        b"".join(bytes(count * COUNT_BYTES) if kept is None else kept.counts for kept, count in found),
        b"".join(kept.ids for kept, _ in found if kept is not None),
    )
