"""The Megatron learner as one rank of a worker group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.backends.learners.megatron.cpu import no_cuda

if TYPE_CHECKING:
    from penstock.backends.learners.plan import LearnerPlan
    from penstock.backends.learners.worker_group.worker import LearnerWorker, WorkerHost
    from penstock.backends.learners.worker_group.workers import WorkerGroup


def open_rank(plan: LearnerPlan, workers: WorkerGroup, host: WorkerHost) -> LearnerWorker:
    """A worker of this learner; the first rank publishes the weights.

    Raises:
        WeightExportError: they cannot be published there.
    """
    no_cuda.install()
    if workers.device.type == "cpu":
        # megatron-core has some functions compiled, which takes a C++ compiler seconds and gains nothing on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Only now: megatron-core asks for CUDA while it is imported.
    from penstock.backends.learners.megatron.worker import MegatronWorker
    from penstock.backends.learners.worker_group.planned import exporter_of

    return MegatronWorker(plan, workers, host, exporter_of(plan, workers))
