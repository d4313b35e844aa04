"""One SGLang server of an engine: how its weights are swapped, checked, given up and taken again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.engines.served.base.dialect import Held, Memory
from penstock.backends.engines.served.sglang.control import PauseMode
from penstock.backends.engines.served.sglang.layout import compare_checksums
from penstock.messages.training import UpdateMode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from penstock.backends.engines.served.base.http import ServerHttp
    from penstock.backends.engines.served.sglang.control import SglangControl
    from penstock.backends.engines.served.sglang.server_facts import RankChecksums, ServerInfo
    from penstock.backends.weights.service_messages import Libraries

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_NAMED: Final = 3
MEMORY: Final = {Memory.WEIGHTS: ("weights",), Memory.REST: ("kv_cache", "cuda_graph")}
IDLE_S: Final = 10.0
"""For a server to come to the end of what it does, when its last request has ended."""

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class SglangEndpoint:
    """See :class:`~penstock.backends.engines.served.base.dialect.Endpoint`."""

    http: ServerHttp
    control: SglangControl
    info: ServerInfo
    num_kv_heads: int
    """Of the model."""
    libraries: Libraries | None = None
    """Of its environment, when it is ours."""
    adapters: set[str] = field(default_factory=set[str])
    """Names of those that it has loaded."""

    @property
    def layout(self) -> str:
        """What its checksums depend on besides the weights."""
        info = self.info
        return f"sglang {info.version} {info.device} {info.dtype} tp{info.tp_size} pp{info.pp_size} dp{info.dp_size}"

    async def pause(self, mode: UpdateMode, timeout_s: float) -> None:
        """Stop generating; what runs is kept."""
        kept = PauseMode.IN_PLACE if mode is UpdateMode.IN_FLIGHT else PauseMode.RETRACT
        await self.control.pause(kept, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        """Go on generating."""
        await self.control.continue_(timeout_s)

    async def load_folder(self, folder: Path, label: str, *, flush: bool, timeout_s: float) -> None:
        """Load a checkpoint of this node."""
        await self.control.update_from_disk(str(folder), version=label, flush=flush, timeout_s=timeout_s)

    async def load_adapter(self, name: str, folder: Path, timeout_s: float) -> None:
        """Load one for requests that name it, anew if it is there."""
        if name in self.adapters:
            await self.control.unload_adapter(name, timeout_s)
        await self.control.load_adapter(name, str(folder), timeout_s)
        self.adapters.add(name)

    async def forget_adapters(self, used: Collection[str], timeout_s: float) -> None:
        """See :class:`~penstock.backends.engines.served.base.dialect.Endpoint`."""
        for name in sorted(self.adapters.difference(used)):
            await self.control.unload_adapter(name, timeout_s)
            self.adapters.discard(name)

    async def held(self, tensors: Mapping[str, torch.Tensor], timeout_s: float) -> Held:
        """What is there; only a CPU server hashes in a way that can be compared."""
        found = await self.control.weights_checksum(timeout_s)
        if self.info.device != "cpu" or not tensors:
            return Held(found.overall, ())
        return Held(found.overall, await asyncio.to_thread(self._wrong, found.ranks, tensors))

    async def sleep(self, timeout_s: float) -> None:
        """A server that is not idle would not survive it, so that is asked first, by a flush, which it refuses then."""
        await self.control.flush_cache(IDLE_S)
        await self.control.release_memory((*MEMORY[Memory.WEIGHTS], *MEMORY[Memory.REST]), timeout_s)

    async def wake(self, memory: Memory, timeout_s: float) -> None:
        """Take a part of its memory again."""
        await self.control.resume_memory(MEMORY[memory], timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self.http.close()

    def _wrong(self, ranks: Sequence[RankChecksums], tensors: Mapping[str, torch.Tensor]) -> Sequence[str]:
        dtype = DTYPES[self.info.dtype]
        cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        comparison = compare_checksums(cast, ranks, tp_size=self.info.tp_size, num_kv_heads=self.num_kv_heads)
        if comparison.unknown:
            _log.info(
                "%d of %d parameters of the server cannot be checked by their hash: %s",
                len(comparison.unknown),
                comparison.num_right + len(comparison.wrong) + len(comparison.unknown),
                ", ".join(comparison.unknown[:NUM_NAMED]),
            )
        return comparison.wrong
