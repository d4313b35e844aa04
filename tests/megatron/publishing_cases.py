"""What ranks do in the tests of publishing. Imported by ranks only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offload_cases import built, small_options, take_step, trainable_model
from weight_cases import BUCKET_BYTES, CPU

from penstock.backends.learners.megatron.layout.layout import layout_of
from penstock.backends.learners.megatron.model.build import close_groups, open_groups
from penstock.backends.learners.megatron.weights.publishing import WeightPublisher
from penstock.backends.weights.transports import open_exporter
from penstock.messages.weights import WeightManifest

if TYPE_CHECKING:
    from penstock.backends.learners.megatron.layout.model_config import Precision

Transport = Literal["shared_memory", "disk", "none"]


def published(
    rank: int,
    folder: str,
    keys: dict[str, Any],
    num_ranks: int,
    precision: Precision,
    transports: list[Transport],
    target: str,
    run_id: str,
    num_steps: int = 0,
) -> tuple[list[WeightManifest], list[dict[str, float]]]:
    """Publish through each transport what there is after a few steps; what was exported stays."""
    options = small_options(keys)
    open_groups(layout_of(options, num_ranks), seed=1)
    trainable = trainable_model(built(rank, folder, options, num_ranks, precision), options)
    for step in range(num_steps):
        take_step(trainable, rank, step)
    manifests: list[WeightManifest] = []
    figures: list[dict[str, float]] = []
    for transport in transports:
        exporter = None
        if rank == 0:
            exporter = open_exporter(transport, run_id=run_id, learner_epoch=1, folder=Path(target))
        publisher = WeightPublisher(trainable, exporter, rank=rank, device=CPU, max_bucket_bytes=BUCKET_BYTES)
        found = publisher.publish(version=num_steps, publish=1, canary=lambda: None)
        figures.append(dict(found.figures))
        if (export := found.export) is not None:
            manifests.append(export if isinstance(export, WeightManifest) else export.manifest())
    close_groups()
    return manifests, figures
