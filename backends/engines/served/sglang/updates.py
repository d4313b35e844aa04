"""Swaps the weights of an engine's servers: pause, load, checksum, continue, canary.

Invariants:

* Between the pause and the end of the loading nothing is submitted, and the server's version is stamped once, when all
  is loaded.
* Requests that run stay open: under ``in_flight`` they keep their cache, which must not be flushed then; otherwise they
  are retracted, the cache is flushed, and what they have is computed again under the new weights.
* What the servers hold is compared with what was exported where that can be computed, and told as a checksum in the
  servers' own layout everywhere.
* Whatever fails in between raises: the servers may hold half of the new weights, and whoever takes them over loads all.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from penstock.backends.engines.served.sglang.control import PauseMode
from penstock.backends.engines.served.sglang.layout import compare_checksums
from penstock.backends.engines.served.sglang.versions import label_of
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.backends.engines.served.sglang.control import WeightChecksums
    from penstock.backends.engines.served.sglang.opening import Endpoint
    from penstock.messages.weights import WeightManifest

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_NAMED: Final = 3
WEIGHTS_MEMORY: Final = ("weights",)
OTHER_MEMORY: Final = ("kv_cache", "cuda_graph")
"""Taken after the load, which may need room of its own."""
ALL_MEMORY: Final = WEIGHTS_MEMORY + OTHER_MEMORY
IDLE_S: Final = 10.0
"""For a server to come to the end of what it does, when its last request has ended."""

_log: Final = logging.getLogger(__name__)


class Loadable(Protocol):
    """Weights that are near and checked."""

    manifest: WeightManifest

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What can be compared with; empty where the bytes never pass through this process."""
        ...

    def digest_now(self) -> str:
        """Of the bytes as they are now; they may have been changed since they were checked. The manifest's where they
        are nowhere to be changed."""
        ...

    async def load(self, endpoint: Endpoint, label: str, *, flush: bool, timeout_s: float) -> None:
        """Have one server load them, and call them ``label``."""
        ...

    def close(self) -> None:
        """Let go of them."""
        ...


class Loaded(NamedTuple):
    """What the servers hold now."""

    digest: str
    """The manifest's, or another when they hold something else."""
    layout: str
    checksum: str


async def pause(endpoints: Sequence[Endpoint], mode: UpdateMode, timeout_s: float) -> None:
    """Stop generating; what runs is kept."""
    kept = PauseMode.IN_PLACE if mode is UpdateMode.IN_FLIGHT else PauseMode.RETRACT
    await asyncio.gather(*(endpoint.control.pause(kept, timeout_s) for endpoint in endpoints))


async def load(
    endpoints: Sequence[Endpoint], weights: Loadable, mode: UpdateMode, *, num_kv_heads: int, timeout_s: float
) -> Loaded:
    """Load them while the servers are paused, and look at what is there."""
    label, flush = label_of(weights.manifest), mode is not UpdateMode.IN_FLIGHT
    await asyncio.gather(*(weights.load(endpoint, label, flush=flush, timeout_s=timeout_s) for endpoint in endpoints))
    digest, checksums = await asyncio.gather(
        asyncio.to_thread(weights.digest_now),
        asyncio.gather(*(endpoint.control.weights_checksum(timeout_s) for endpoint in endpoints)),
    )
    tensors = weights.tensors
    wrong: list[str] = []
    for endpoint, found in zip(endpoints, checksums, strict=True):
        wrong += await asyncio.to_thread(_wrong, endpoint, found, tensors, num_kv_heads)
    if wrong:
        named = ", ".join(wrong[:NUM_NAMED]) + (f" and {len(wrong) - NUM_NAMED} more" if len(wrong) > NUM_NAMED else "")
        digest = f"not {digest}: {named} differ on the server"
    layout = "; ".join(_layout_of(endpoint) for endpoint in endpoints)
    return Loaded(digest, layout, hashlib.sha256("".join(c.overall for c in checksums).encode()).hexdigest())


async def sleep(endpoints: Sequence[Endpoint], timeout_s: float) -> None:
    """Have the servers give their device memory up, weights included.

    A server that is not idle would not survive it, so that is asked first, by a flush, which it refuses then.
    """
    await asyncio.gather(*(endpoint.control.flush_cache(IDLE_S) for endpoint in endpoints))
    await asyncio.gather(*(endpoint.control.release_memory(ALL_MEMORY, timeout_s) for endpoint in endpoints))


async def wake(endpoints: Sequence[Endpoint], tags: Sequence[str], timeout_s: float) -> None:
    """Have them take a part of it again: ``WEIGHTS_MEMORY`` before the load, ``OTHER_MEMORY`` after it."""
    await asyncio.gather(*(endpoint.control.resume_memory(tags, timeout_s) for endpoint in endpoints))


async def resume(endpoints: Sequence[Endpoint], timeout_s: float) -> None:
    """Go on generating."""
    await asyncio.gather(*(endpoint.control.continue_(timeout_s) for endpoint in endpoints))


def _layout_of(endpoint: Endpoint) -> str:
    info = endpoint.info
    return f"sglang {info.version} {info.device} {info.dtype} tp{info.tp_size} pp{info.pp_size} dp{info.dp_size}"


def _wrong(
    endpoint: Endpoint, found: WeightChecksums, tensors: Mapping[str, torch.Tensor], num_kv_heads: int
) -> Sequence[str]:
    if endpoint.info.device != "cpu" or not tensors:
        return ()
    dtype = DTYPES[endpoint.info.dtype]
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    comparison = compare_checksums(cast, found.ranks, tp_size=endpoint.info.tp_size, num_kv_heads=num_kv_heads)
    if comparison.unknown:
        _log.info(
            "%d of %d parameters of the server cannot be checked by their hash: %s",
            len(comparison.unknown),
            comparison.num_right + len(comparison.wrong) + len(comparison.unknown),
            ", ".join(comparison.unknown[:NUM_NAMED]),
        )
    return comparison.wrong
