"""What a learner publishes its weights with, whichever library trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.checkpoint.fp8_publish import quantizing_exporter
from penstock.backends.weights.renamed import renamed_exporter
from penstock.backends.weights.transports import open_exporter

if TYPE_CHECKING:
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.weights.protocol import WeightExporter


def exporter_of(plan: LearnerPlan, workers: WorkerGroup) -> WeightExporter | None:
    """What the first rank publishes with; None on the others.

    Raises:
        WeightExportError: weights cannot be published there.
        UserCodeError: the function that names them cannot be loaded.
    """
    return open_export(plan) if workers.is_first else None


def open_export(plan: LearnerPlan) -> WeightExporter:
    """The learner's end of the transport, with the names that engines call weights by.

    Raises:
        PartError, ValueError, WeightExportError: see :func:`~penstock.backends.weights.transports.open_exporter`.
        UserCodeError: the function that names them cannot be loaded.
    """
    export = plan.export
    exporter = open_exporter(
        export.transport,
        run_id=export.run_id,
        learner_epoch=plan.epoch,
        folder=Path(export.folder),
        host=export.host,
        options=export.options,
    )
    return quantizing_exporter(renamed_exporter(exporter, export.names_function), quantizes=export.quantizes)
