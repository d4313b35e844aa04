"""The torch learner as one rank of a worker group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.learners.torch.worker import LearnerSetup, TorchWorker
from penstock.backends.learners.worker_group.planned import demonstrations_of, exporter_of

if TYPE_CHECKING:
    from penstock.backends.learners.worker_group.plan import LearnerPlan
    from penstock.backends.learners.worker_group.worker import WorkerHost
    from penstock.backends.learners.worker_group.workers import WorkerGroup


def open_rank(plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost) -> TorchWorker:
    """A worker of this learner; the first rank publishes the weights.

    Raises:
        WeightExportError: they cannot be published there.
    """
    setup = LearnerSetup(
        model_folder=Path(plan.model_folder),
        checkpoints_folder=Path(plan.checkpoints_folder),
        options=plan.options,
        temperature=plan.temperature,
        dtype=plan.dtype,
        seed=plan.seed,
        num_steps=plan.num_steps,
        epoch=plan.epoch,
        exporter=exporter_of(plan, workers),
        demonstrations=demonstrations_of(plan),
    )
    return TorchWorker(setup, workers, host)
