"""Loads new weights into an engine's servers while they are paused, and looks at what they hold then.

Invariants:

* A server's version is stamped once, when all is loaded.
* The prefix cache is flushed with the load, but under ``in_flight``, where requests that run keep theirs.
* What the servers hold is compared with what was exported where that can be computed, and told as a checksum in the
  servers' own layout everywhere.
* Whatever fails in between raises: the servers may hold half of the new weights, and whoever takes them over loads all.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.backends.engines.served.base.versions import label_of
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.backends.engines.served.base.dialect import EndpointT, Loadable

NUM_NAMED: Final = 3


class Loaded(NamedTuple):
    """What the servers hold now."""

    digest: str
    """The manifest's, or another when they hold something else."""
    layout: str
    checksum: str


async def load(
    endpoints: Sequence[EndpointT], weights: Loadable[EndpointT], mode: UpdateMode, timeout_s: float
) -> Loaded:
    """Load them while the servers are paused, and look at what is there."""
    label, flush = label_of(weights.manifest), mode is not UpdateMode.IN_FLIGHT
    await asyncio.gather(*(weights.load(endpoint, label, flush=flush, timeout_s=timeout_s) for endpoint in endpoints))
    tensors = weights.tensors
    digest, held = await asyncio.gather(
        asyncio.to_thread(weights.digest_now),
        asyncio.gather(*(endpoint.held(tensors, timeout_s) for endpoint in endpoints)),
    )
    if wrong := [name for each in held for name in each.wrong]:
        named = ", ".join(wrong[:NUM_NAMED]) + (f" and {len(wrong) - NUM_NAMED} more" if len(wrong) > NUM_NAMED else "")
        digest = f"not {digest}: {named} differ on the server"
    layout = "; ".join(endpoint.layout for endpoint in endpoints)
    return Loaded(digest, layout, checksum_of(each.checksum for each in held))


def checksum_of(checksums: Iterable[str]) -> str:
    """Of the weights of an engine, from those of its servers."""
    return hashlib.sha256("".join(checksums).encode()).hexdigest()
