"""The learner's end of the transports that keep snapshots in its process: ``distributed``, ``tensor`` and ``network``.

Nothing is staged on a server, so the exporter keeps whole snapshots in the learner's process and serves them: a server
is sent its weights when its EngineWorker asks, by broadcast or in the body of a call. Embedded engines pull the bytes
from the same service, and with ``network`` so do SGLang's. All keep and serve alike; which of them is meant decides
how an engine asks.

Invariants, besides those of :mod:`~penstock.backends.weights.protocol`:

* ``export`` is done with the learner's tensors when it returns. What engines do later touches the snapshot only.
* What was exported ends with the process, so the promise of the other transports that weights outlive the learner that
  made them does not hold here: an engine that starts while there is no learner waits for the next one's publish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.backends.weights.service import WeightService
from penstock.backends.weights.service_messages import PublishId, location_of
from penstock.backends.weights.snapshots import SnapshotShelf, take_snapshot
from penstock.messages.weights import WeightManifest

if TYPE_CHECKING:
    from penstock.backends.weights.stream import AnyWeights
    from penstock.messages.weights import Canary


class PushExporter:
    """Keeps the snapshots, and the service that engines call."""

    def __init__(self, transport: Literal["distributed", "tensor", "network"], learner_epoch: int, host: str) -> None:
        """Serves from here on.

        Args:
            transport: How servers are to ask.
            learner_epoch: Of this incarnation.
            host: This machine's address as the engines see it.

        Raises:
            WeightExportError: the service cannot listen there.
        """
        self._transport = transport
        self._epoch = learner_epoch
        self._shelf = SnapshotShelf()
        self._service = WeightService(self._shelf, host)

    def export(self, tensors: AnyWeights, *, version: int, publish: int, canary: Canary | None) -> WeightManifest:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        self._service.check()
        snapshot = take_snapshot(tensors, PublishId(self._epoch, version, publish))
        self._shelf.add(snapshot)
        return WeightManifest(
            version=version,
            publish=publish,
            learner_epoch=self._epoch,
            transport=self._transport,
            location=location_of(self._service.address),
            size_bytes=snapshot.layout.size_bytes,
            digest=snapshot.digest,
            canary=canary,
        )

    def release(self, below_version: int) -> None:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        self._shelf.release(below_version)

    def close(self) -> None:
        """See :class:`~penstock.backends.weights.protocol.WeightExporter`."""
        self._service.close()
        self._shelf.clear()
