"""Adapters that are published as such: the model beneath them once, and of each version the adapters alone.

Invariants:

* The base is what every incarnation of a learner exports first, and it does so once: nothing of it changes.
* Every rank goes through the same tensors in the same order, as with whole models.
* What is exported are the values that the learner computes with: float32, and where ranks have parts of them, which are
  rounded to ``model.dtype`` before each use, rounded likewise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.backends.learners.torch.publishing import GatheredWeights
from penstock.backends.weights.protocol import BaseExporter, WeightExportError
from penstock.messages.weights import ADAPTER_DOWN, ADAPTER_UP, LowRank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from penstock.backends.learners.torch.lora import Adapters
    from penstock.backends.learners.torch.model import PackedModel
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.weights import Canary, WeightManifest


class AdapterPublisher:
    """Publishes for one incarnation of a learner; every rank has one."""

    def __init__(self, workers: WorkerGroup, exporter: WeightExporter | None) -> None:
        """``exporter``: None on every rank but the first.

        Raises:
            WeightExportError: its transport does not keep the model beneath the adapters.
        """
        if exporter is not None and not isinstance(exporter, BaseExporter):
            raise WeightExportError(
                "learner.lora.publish is adapter, and this transport does not keep the model that adapters belong to; "
                "set weights.transport: shared_memory or disk, or learner.lora.publish: merged"
            )
        self._workers, self._exporter = workers, exporter
        self._has_base = False
        self._base: WeightManifest | None = None

    def publish(
        self, model: PackedModel, base: PackedModel, *, version: int, publish: int, canary: Canary | None
    ) -> WeightManifest | None:
        """Called by all ranks.

        Args:
            model: has adapters.
            base: the same without them.
            version, publish, canary: see :class:`.WeightExporter`.

        Returns:
            The manifest of the adapters, on the first rank.

        Raises:
            WeightExportError: they could not be written.
        """
        assert model.adapters is not None
        if not self._has_base:
            weights = GatheredWeights(base, self._workers)
            if self._exporter is not None:
                self._base = self._exporter.export_base(weights, version=version, publish=publish)
            weights.finish()
            self._has_base = True
        adapters = AdapterTensors(model, model.adapters)
        weights = GatheredWeights(adapters, self._workers)
        manifest = None
        if self._exporter is not None:
            exported = self._exporter.export(weights, version=version, publish=publish, canary=canary)
            manifest = msgspec.structs.replace(exported, low_rank=adapters.low_rank(), base=self._base)
        weights.finish()
        return manifest


class AdapterTensors:
    """The adapters of a model, as a :class:`.WeightSource` whose names are those of checkpoints already."""

    def __init__(self, model: PackedModel, adapters: Adapters) -> None:
        self._packed, self._adapters = model, adapters

    @property
    def model(self) -> nn.Module:
        return self._packed.model

    @property
    def dtype(self) -> torch.dtype:
        return self._packed.dtype

    @property
    def checkpoint_names(self) -> AdapterTensors:
        return self

    @property
    def can_rename_one_by_one(self) -> bool:
        return True

    def rename(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See :class:`.CheckpointNames`."""
        return dict(tensors)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """``A`` and ``B`` of each adapted matrix."""
        for name, matrix, down, up in self._adapters.matrices():
            path = self._path(name, matrix)
            yield path + ADAPTER_DOWN, down.detach()
            yield path + ADAPTER_UP, up.detach()

    def bare_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights()

    def low_rank(self) -> LowRank:
        """What a manifest says of them."""
        found = [(self._path(name, matrix), down) for name, matrix, down, _ in self._adapters.matrices()]
        modules = dict.fromkeys(path.rpartition(".")[2] for path, _ in found)
        return LowRank(rank=found[0][1].shape[0], scale=self._adapters.scale, target_modules=tuple(modules))

    def _path(self, name: str, matrix: Tensor) -> str:
        """
        Raises:
            WeightExportError: in a checkpoint it is no matrix of its own.
        """
        shape_only = torch.empty(matrix.shape, dtype=matrix.dtype, device="meta")
        (found, *others) = self._packed.checkpoint_names.rename({name: shape_only})
        if others or not found.endswith(".weight"):
            raise WeightExportError(
                f"learner.lora.publish is adapter, and {name} is no matrix of its own in a checkpoint; set "
                "learner.lora.publish: merged, or leave it out of learner.lora.target_modules"
            )
        return found.removesuffix(".weight")
