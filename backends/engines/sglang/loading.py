"""Brings the weights of a manifest near, by whichever transport it names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.backends.engines.sglang.staging import FILE_TRANSPORTS, stage
from penstock.backends.weights.protocol import WeightFetchError

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.engines.sglang.updates import Loadable
    from penstock.backends.weights.expectation import Expectation
    from penstock.messages.weights import WeightManifest


class ServerStaging:
    """Of one engine."""

    def __init__(self, *, model_folder: Path, folder: Path, expected: Expectation) -> None:
        self._model_folder = model_folder
        self._folder = folder
        self._expected = expected

    async def stage(self, manifest: WeightManifest) -> Loadable:
        """Fetch and check.

        Raises:
            WeightFetchError: they are not there, or not for this model.
        """
        if manifest.transport in FILE_TRANSPORTS:
            return await asyncio.to_thread(
                stage, manifest, model_folder=self._model_folder, folder=self._folder, expected=self._expected
            )
        raise WeightFetchError(f"SGLang engines know no transport {manifest.transport!r}")

    async def close(self) -> None:
        """Nothing is held open."""
