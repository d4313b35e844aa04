"""Brings the weights of a manifest near, by whichever transport it names, and has servers load them.

Invariants:

* What was staged has passed every check that can be made without the server; a server hears only of such weights.
* A server's version is stamped once, when all of it is loaded.

| waits for | who ends it |
|---|---|
| the weight service of the learner | its answer, or the deadlines of :mod:`.bucket_source` |
| a server's calls | the server, or the deadline that ``load`` is given |
"""

from __future__ import annotations

import asyncio
import contextlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.backends.engines.served.base.bucket_source import open_source
from penstock.backends.engines.served.base.http import CallError
from penstock.backends.engines.served.base.staging import FILE_TRANSPORTS, stage
from penstock.backends.engines.served.sglang.adapters import LoadedBase, stage_adapter
from penstock.backends.engines.served.sglang.bucket_push import PushError, ServerGroup, ServerRanks, push_tensors
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.spec import DISTRIBUTED, TENSOR
from penstock.messages.errors import UserFault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from penstock.backends.engines.served.base.bucket_source import PublishSource
    from penstock.backends.engines.served.base.dialect import Loadable
    from penstock.backends.engines.served.expectation import Expectation
    from penstock.backends.engines.served.sglang.endpoint import SglangEndpoint
    from penstock.messages.weights import WeightManifest

NOTHING: Final[Mapping[str, torch.Tensor]] = MappingProxyType({})


class ServerStaging:
    """Of one engine."""

    def __init__(
        self, *, engine: str, model_folder: Path, folder: Path, expected: Expectation, bucket_size_bytes: int
    ) -> None:
        self.expected: Final = expected
        self.bucket_size_bytes: Final = bucket_size_bytes
        self._engine = engine
        self._model_folder = model_folder
        self._folder = folder
        self._groups: dict[str, ServerGroup] = {}
        self._loaded_base = LoadedBase()

    async def stage(self, manifest: WeightManifest) -> Loadable[SglangEndpoint]:
        """Fetch and check.

        Raises:
            WeightFetchError: they are not there, or not for this model.
        """
        if manifest.low_rank is not None:
            return await asyncio.to_thread(
                stage_adapter,
                manifest,
                model_folder=self._model_folder,
                folder=self._folder,
                expected=self.expected,
                loaded=self._loaded_base,
            )
        if manifest.transport in FILE_TRANSPORTS:
            return await asyncio.to_thread(
                stage, manifest, model_folder=self._model_folder, folder=self._folder, expected=self.expected
            )
        if manifest.transport in (DISTRIBUTED, TENSOR):
            with contextlib.closing(await open_source(manifest)) as source:
                source.check(self.expected)
            return PushedWeights(manifest, self)
        raise WeightFetchError(f"SGLang engines know no transport {manifest.transport!r}")

    async def close(self) -> None:
        """Leave the groups with the servers."""
        for group in self._groups.values():
            await group.leave()

    def ranks_of(self, endpoint: SglangEndpoint) -> ServerRanks:
        """Of a server of this engine."""
        info = endpoint.info
        return ServerRanks(
            f"{self._engine} {endpoint.http.base_url}",
            info.tp_size,
            info.pp_size,
            info.dp_size,
            info.device,
            endpoint.libraries,
            info.drafts_from_model,
        )

    def group_of(self, endpoint: SglangEndpoint) -> ServerGroup:
        """The learner's group with this server; made with its first update and kept."""
        group = self._groups.get(endpoint.http.base_url)
        if group is None:
            group = self._groups[endpoint.http.base_url] = ServerGroup(endpoint.control, self.ranks_of(endpoint))
        return group


class PushedWeights:
    """Weights that the learner sends while the servers are paused."""

    def __init__(self, manifest: WeightManifest, staging: ServerStaging) -> None:
        self.manifest = manifest
        self._staging = staging

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """None pass through this process."""
        return NOTHING

    def digest_now(self) -> str:
        """The manifest's: the learner's service keeps them to itself."""
        return self.manifest.digest

    async def load(self, endpoint: SglangEndpoint, label: str, *, flush: bool, timeout_s: float) -> None:
        """Have them sent to one server.

        Raises:
            CallError: it broke off; the server holds part of them.
        """
        try:
            # Anew: a line that broke since they were staged stays broken.
            with contextlib.closing(await open_source(self.manifest)) as source:
                await self._push(endpoint, source, flush=flush, timeout_s=timeout_s)
        except (PushError, WeightFetchError, UserFault) as error:
            raise CallError(str(error)) from error
        await endpoint.control.update_weight_version(label)

    async def _push(self, endpoint: SglangEndpoint, source: PublishSource, *, flush: bool, timeout_s: float) -> None:
        staging = self._staging
        if self.manifest.transport == TENSOR:
            await push_tensors(
                endpoint.control,
                endpoint.http.base_url,
                staging.ranks_of(endpoint),
                source,
                staging.expected,
                bucket_size_bytes=staging.bucket_size_bytes,
                flush=flush,
                timeout_s=timeout_s,
            )
        else:
            await staging.group_of(endpoint).push(
                source,
                staging.expected,
                bucket_size_bytes=staging.bucket_size_bytes,
                flush=flush,
                timeout_s=timeout_s,
            )

    def close(self) -> None:
        """Nothing is held: the learner keeps them."""
