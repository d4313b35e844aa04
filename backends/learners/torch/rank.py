"""The torch learner as one rank of a gang."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.learners.torch.worker import LearnerSetup, TorchWorker
from penstock.backends.weights.transports import open_exporter

if TYPE_CHECKING:
    from penstock.backends.learners.gang.gang import Gang
    from penstock.backends.learners.gang.plan import GangPlan, PackedDemonstration
    from penstock.backends.learners.gang.worker import WorkerHost
    from penstock.backends.learners.torch.worker import Demonstration


def open_torch_rank(plan: GangPlan, gang: Gang, host: WorkerHost) -> TorchWorker:
    """A worker of this learner; the first rank publishes the weights.

    Raises:
        WeightExportError: they cannot be published there.
    """
    exporter = None
    if gang.is_first:
        exporter = open_exporter(
            plan.export.transport,
            run_id=plan.export.run_id,
            learner_epoch=plan.epoch,
            folder=Path(plan.export.folder),
            host=plan.export.host,
        )
    setup = LearnerSetup(
        model_folder=Path(plan.model_folder),
        checkpoints_folder=Path(plan.checkpoints_folder),
        options=plan.options,
        temperature=plan.temperature,
        dtype=plan.dtype,
        seed=plan.seed,
        num_steps=plan.num_steps,
        epoch=plan.epoch,
        exporter=exporter,
        demonstrations=[_unpacked(demonstration) for demonstration in plan.demonstrations],
    )
    return TorchWorker(setup, gang, host)


def _unpacked(demonstration: PackedDemonstration) -> Demonstration:
    prompt, response = (np.frombuffer(ids, dtype=np.int32) for ids in (demonstration.prompt, demonstration.response))
    return prompt.tolist(), response.tolist()
