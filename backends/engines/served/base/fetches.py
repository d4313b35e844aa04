"""Brings weights near for one engine, one publish after the other.

| waits for | who ends it |
|---|---|
| another fetch | its end: the staging has its own deadlines |
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic

from penstock.backends.engines.served.base.dialect import EndpointT
from penstock.backends.engines.staged_weights import StagedWeights
from penstock.backends.weights.protocol import WeightFetchError
from penstock.messages.local import WeightsStagedLocally

if TYPE_CHECKING:
    from penstock.backends.engines.served.base.dialect import Loadable, Staging
    from penstock.messages.weights import WeightManifest


class Fetches(Generic[EndpointT]):
    """Everything here belongs to the loop of one engine's backend."""

    def __init__(self, staging: Staging[EndpointT]) -> None:
        self.staged: StagedWeights[Loadable[EndpointT]] = StagedWeights()
        self._staging = staging
        self._fetching = asyncio.Lock()

    async def fetch(self, manifest: WeightManifest) -> WeightsStagedLocally:
        """Bring weights near; what is told of it."""
        digest = story = ""
        async with self._fetching:
            try:
                self.staged.keep(manifest, await self._staging.stage(manifest))
                digest = manifest.digest
            except WeightFetchError as error:
                story = str(error)
        return WeightsStagedLocally(version=manifest.version, publish=manifest.publish, digest=digest, error=story)

    async def close(self, *, is_open: bool) -> None:
        """Let go of everything; of the staging only where an engine was opened."""
        self.staged.close()
        if is_open:
            await self._staging.close()
