"""The Megatron learner as one rank of a gang."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.backends.learners.megatron import no_cuda

if TYPE_CHECKING:
    from penstock.backends.learners.worker_group.gang import Gang
    from penstock.backends.learners.worker_group.plan import GangPlan
    from penstock.backends.learners.worker_group.worker import LearnerWorker, WorkerHost


def open_rank(plan: GangPlan, gang: Gang, host: WorkerHost) -> LearnerWorker:
    """A worker of this learner; the first rank publishes the weights."""
    no_cuda.install()
    if gang.device.type == "cpu":
        # megatron-core has some functions compiled, which takes a C++ compiler seconds and gains nothing on a CPU.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Only now: megatron-core asks for CUDA while it is imported.
    from penstock.backends.learners.megatron.worker import open_megatron_worker

    return open_megatron_worker(plan, gang, host)
