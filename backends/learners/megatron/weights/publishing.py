"""Publishes the weights of all ranks: gathered, put together and written bucket by bucket, at the same time.

Invariants:

* All ranks publish together. What is published is of the last optimizer step on every rank, also where
  ``overlap_param_gather`` would bring updated weights during the next forward pass only.
* While a bucket is written, the next one is on its way. No rank ever has more than two of them.
* The digest is that of the same weights under any layout, and of the torch learner's.

| wait | who ends it |
|---|---|
| for a bucket | see :mod:`.gather` |
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.backends.learners.megatron.weights.gather import GatherFigures, WeightGatherer
from penstock.backends.learners.training.command_worker import Published
from penstock.backends.learners.training.exports import begin_export
from penstock.backends.weights.stream import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from penstock.backends.learners.megatron.optimizer.trainable import TrainableModel
    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.weights import Canary


class WeightPublisher:
    """Every rank has one, and calls it when the others do."""

    def __init__(
        self,
        trainable: TrainableModel,
        exporter: WeightExporter | None,
        *,
        rank: int,
        device: torch.device,
        max_bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """A collective.

        Args:
            trainable: whose weights they are.
            exporter: None on every rank but the first.
            rank: which this is.
            device: of this rank.
            max_bucket_bytes: of what is gathered at once; a larger parameter comes alone.
        """
        self._trainable = trainable
        self._exporter = exporter
        self._gatherer = WeightGatherer(trainable.model, rank=rank, device=device, max_bucket_bytes=max_bucket_bytes)

    def publish(self, *, version: int, publish: int, canary: Callable[[], Canary | None]) -> Published:
        """A collective.

        Args:
            version: of the weights.
            publish: number of this publish.
            canary: asks the model; called on every rank when it has the weights.

        Raises:
            WeightExportError: they cannot be written.
        """
        began_s = time.perf_counter()
        self._gatherer.figures = GatherFigures()
        self._trainable.gather_weights()
        synced_s = time.perf_counter()
        said = canary()
        asked_s = time.perf_counter()
        stream = _Stream(self._gatherer)
        export = None
        if self._exporter is not None:
            export = begin_export(self._exporter, stream, version=version, publish=publish, canary=said)
        stream.finish()
        return Published(export, self._figures(began_s, synced_s, asked_s))

    def _figures(self, began_s: float, synced_s: float, asked_s: float) -> dict[str, float]:
        """What is neither waiting nor putting together is the transport's: copies, digest, disk."""
        found, ended_s = self._gatherer.figures, time.perf_counter()
        return {
            "learner/publish_time_s": ended_s - began_s,
            "learner/publish_sync_time_s": synced_s - began_s,
            "learner/publish_canary_time_s": asked_s - synced_s,
            "learner/publish_wait_time_s": found.wait_s,
            "learner/publish_merge_time_s": found.merge_s,
            "learner/publish_write_time_s": ended_s - asked_s - found.wait_s - found.merge_s,
            "learner/publish_bytes": float(self._gatherer.size_bytes),
            "learner/publish_received_bytes": float(found.received_bytes),
        }


class _Stream:
    """See :class:`.WeightStream`."""

    def __init__(self, gatherer: WeightGatherer) -> None:
        self._gatherer = gatherer
        self._tensors = (tensor for bucket in gatherer.buckets() for tensor in bucket)

    @property
    def shapes(self) -> Mapping[str, torch.Tensor]:
        return self._gatherer.shapes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._tensors

    def finish(self) -> None:
        """Take part in what nobody has asked for: other ranks send it, and wait until they have."""
        for _ in self._tensors:
            pass
