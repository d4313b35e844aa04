"""Opens the two ends of a transport by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.backends.weights.disk import DISK, DiskExporter, fetch_disk
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.shared_memory import SHARED_MEMORY, SharedMemoryExporter, fetch_shared_memory

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.weights.protocol import FetchedWeights, WeightExporter, WeightFetcher
    from penstock.messages.weights import WeightManifest


def open_exporter(
    transport: Literal["shared_memory", "disk"], *, run_id: str, learner_epoch: int, folder: Path
) -> WeightExporter:
    """The learner's end. ``folder`` is where ``disk`` writes; ``run_id`` names the shared-memory segments.

    ``auto`` is no transport: :func:`~penstock.backends.weights.preflight.check_transport` decides it before.

    Raises:
        ValueError: the run id cannot be part of a file name.
        WeightExportError: the folder cannot be used.
    """
    if transport == SHARED_MEMORY:
        return SharedMemoryExporter(run_id, learner_epoch)
    return DiskExporter(folder, learner_epoch)


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
            case other:
                raise WeightFetchError(
                    f"this engine knows the transports {SHARED_MEMORY} and {DISK}; the manifest names {other!r}"
                )
