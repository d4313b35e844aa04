"""Opens the two ends of a transport by its name.

| transport | carries weights | for |
|---|---|---|
| ``shared_memory`` | in ``/dev/shm`` of one machine | embedded engines beside the learner |
| ``disk`` | as a file of a shared folder | every engine; the only one that a server can stage |
| ``distributed`` | by a process group of learner and server | SGLang servers anywhere; embedded engines pull |
| ``tensor`` | in a call: as handles of GPU memory, by value on a CPU | SGLang servers beside the learner; others pull |
| ``none`` | nothing | engines that hold no weights |

Other packages bring more: :mod:`penstock.backends.registry`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.registry import PartError
from penstock.backends.weights.protocol import WeightFetchError
from penstock.backends.weights.spec import TRANSPORTS, ExportContext

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.backends.weights.protocol import FetchedWeights, WeightExporter, WeightFetcher
    from penstock.messages.weights import WeightManifest


def open_exporter(
    transport: str,
    *,
    run_id: str,
    learner_epoch: int,
    folder: Path,
    host: str = "127.0.0.1",
    options: Mapping[str, object] | None = None,
) -> WeightExporter:
    """The learner's end.

    ``auto`` is no transport: :func:`~penstock.backends.engines.transport_preflight.check_transport` decides it before.

    Args:
        transport: Its name.
        run_id: Names the shared-memory segments.
        learner_epoch: Of this incarnation.
        folder: Where ``disk`` writes.
        host: This machine's address as the engines see it, for the transports that push.
        options: ``weights.options``.

    Raises:
        PartError: there is no such transport.
        ValueError: the run id cannot be part of a file name.
        WeightExportError: the folder, or the address, cannot be used.
    """
    return TRANSPORTS.spec(transport).open_exporter(
        ExportContext(run_id=run_id, learner_epoch=learner_epoch, folder=folder, host=host, options=options or {})
    )


def open_fetcher() -> WeightFetcher:
    """An engine's end. It follows the manifest, so it needs no options and serves every transport."""
    return ManifestFetcher()


class ManifestFetcher:
    """Fetches by the transport that each manifest names."""

    def fetch(self, manifest: WeightManifest) -> FetchedWeights:
        """See :class:`~penstock.backends.weights.protocol.WeightFetcher`."""
        try:
            spec = TRANSPORTS.spec(manifest.transport)
        except PartError as error:
            raise WeightFetchError(f"this engine cannot fetch version {manifest.version}: {error}") from None
        return spec.fetch(manifest)
