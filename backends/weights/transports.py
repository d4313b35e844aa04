"""Opens the two ends of a transport by its name.

| transport | carries weights | for |
|---|---|---|
| ``shared_memory`` | in ``/dev/shm`` of one machine | embedded engines beside the learner |
| ``disk`` | as a file of a shared folder | every engine; the only one that a server can stage |
| ``distributed`` | by a process group of learner and server | SGLang servers anywhere; embedded engines pull |
| ``tensor`` | in a call: as handles of GPU memory, by value on a CPU | SGLang servers beside the learner; others pull |
| ``none`` | nothing | engines that hold no weights |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.backends.weights.disk import DISK, DiskExporter, fetch_disk
from penstock.backends.weights.nothing import NothingExporter
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.pulled import fetch_pushed
from penstock.backends.weights.pushing import PushExporter
from penstock.backends.weights.service_messages import DISTRIBUTED, TENSOR
from penstock.backends.weights.shared_memory import SHARED_MEMORY, SharedMemoryExporter, fetch_shared_memory

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.weights.protocol import FetchedWeights, WeightExporter, WeightFetcher
    from penstock.messages.weights import WeightManifest


def open_exporter(
    transport: Literal["shared_memory", "disk", "distributed", "tensor", "none"],
    *,
    run_id: str,
    learner_epoch: int,
    folder: Path,
    host: str = "127.0.0.1",
) -> WeightExporter:
    """The learner's end.

    ``auto`` is no transport: :func:`~penstock.backends.weights.preflight.check_transport` decides it before.

    Args:
        transport: Its name.
        run_id: Names the shared-memory segments.
        learner_epoch: Of this incarnation.
        folder: Where ``disk`` writes.
        host: This machine's address as the engines see it, for the transports that push.

    Raises:
        ValueError: the run id cannot be part of a file name.
        WeightExportError: the folder, or the address, cannot be used.
    """
    match transport:
        case "shared_memory":
            return SharedMemoryExporter(run_id, learner_epoch)
        case "disk":
            return DiskExporter(folder, learner_epoch)
        case "distributed" | "tensor":
            return PushExporter(transport, learner_epoch, host)
        case "none":
            return NothingExporter(learner_epoch)


def open_fetcher() -> WeightFetcher:
    """An engine's end. It follows the manifest, so it needs no options and serves every transport."""
    return ManifestFetcher()


class ManifestFetcher:
    """Fetches by the transport that each manifest names."""

    def fetch(self, manifest: WeightManifest) -> FetchedWeights:
        """See :class:`~penstock.backends.weights.protocol.WeightFetcher`."""
        match manifest.transport:
            case "shared_memory":
                return fetch_shared_memory(manifest)
            case "disk":
                return fetch_disk(manifest)
            case "distributed" | "tensor":
                return fetch_pushed(manifest)
            case other:
                known = ", ".join((SHARED_MEMORY, DISK, DISTRIBUTED, TENSOR))
                raise WeightFetchError(f"this engine knows the transports {known}; the manifest names {other!r}")
