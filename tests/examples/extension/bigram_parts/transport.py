"""A transport: the files of the built-in one, on another disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.backends.weights.disk import DiskExporter

if TYPE_CHECKING:
    from penstock.backends.weights.stream import AnyWeights
    from penstock.messages.weights import Canary, WeightManifest


class ScratchExporter:
    """The learner's end."""

    def __init__(self, folder: str, run_id: str, learner_epoch: int) -> None:
        self._files = DiskExporter(Path(folder) / run_id, learner_epoch)

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        manifest = self._files.export(tensors, version=version, publish=publish, canary=canary)
        return replace(manifest, transport="scratch")  # by this name an engine finds how to fetch it

    def release(self, below_version: int) -> None:
        self._files.release(below_version)

    def close(self) -> None:
        self._files.close()
