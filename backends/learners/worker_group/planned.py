"""What ranks make of the plan of their learner, whichever library trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.weights.renamed import renamed_exporter
from penstock.backends.weights.transports import open_exporter

if TYPE_CHECKING:
    from penstock.backends.learners.worker_group.plan import ExportPlan, LearnerPlan
    from penstock.backends.learners.worker_group.workers import WorkerGroup
    from penstock.backends.weights.protocol import WeightExporter


def exporter_of(plan: LearnerPlan, workers: WorkerGroup) -> WeightExporter | None:
    """What the first rank publishes with; None on the others.

    Raises:
        WeightExportError: weights cannot be published there.
        UserCodeError: the function that names them cannot be loaded.
    """
    if not workers.is_first:
        return None
    return open_export(plan.export, plan.epoch)


def open_export(export: ExportPlan, epoch: int) -> WeightExporter:
    """The learner's end of the transport, with the names that engines call weights by.

    Raises:
        PartError, ValueError, WeightExportError: see :func:`~penstock.backends.weights.transports.open_exporter`.
        UserCodeError: the function that names them cannot be loaded.
    """
    exporter = open_exporter(
        export.transport,
        run_id=export.run_id,
        learner_epoch=epoch,
        folder=Path(export.folder),
        host=export.host,
        options=export.options,
    )
    return renamed_exporter(exporter, export.names_function)


def demonstrations_of(plan: LearnerPlan) -> list[tuple[list[int], list[int]]]:
    """Token ids of a prompt and of a response each, the end token included."""
    return [(_ids(each.prompt), _ids(each.response)) for each in plan.demonstrations]


def _ids(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, dtype=np.int32).tolist()
    return ids
