"""The way in: a learner over several processes, checked before they are started. Nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.learners.check_demonstrations import check_demonstrations
from penstock.backends.learners.worker_group.backend import WorkerGroupBackend
from penstock.backends.learners.worker_group.plan import LearnerPlan, PackedDemonstration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.worker_group.other_nodes import FurtherNodes
    from penstock.backends.learners.worker_group.plan import ExportPlan
    from penstock.backends.protocol import Backend
    from penstock.messages.commands import LearnerCommand


def open_worker_group(
    *,
    rank: str,
    model_folder: Path,
    checkpoints_folder: Path,
    options: LearnerOptions,
    temperature: float,
    dtype: str,
    seed: int,
    num_steps: int,
    epoch: int,
    export: ExportPlan,
    demonstrations: Sequence[tuple[Sequence[int], Sequence[int]]] | None,
    log_path: Callable[[int], Path],
    further: FurtherNodes | None = None,
) -> Backend[LearnerCommand]:
    """As :func:`.open_torch_learner`, by ``options.num_ranks`` processes.

    Args, of those that are not there:
        rank: opens what works in a rank (:class:`.RankOpener`): ``module:function``.
        export: where the first rank publishes the weights.
        demonstrations: for the warm start; given exactly when ``options.warm_start`` is.
        log_path: where the output of each rank goes.
        further: the nodes that have ranks beside this one; None where all are here.

    Raises:
        UserFault: the demonstrations of ``options.warm_start`` are missing.
    """
    check_demonstrations(options.warm_start, demonstrations)
    plan = LearnerPlan(
        rank=rank,
        model_folder=str(model_folder.absolute()),
        checkpoints_folder=str(checkpoints_folder.absolute()),
        options=options,
        temperature=temperature or 1.0,
        dtype=dtype,
        seed=seed,
        num_steps=num_steps,
        epoch=epoch,
        export=export,
        demonstrations=tuple(
            PackedDemonstration(_packed(prompt), _packed(response)) for prompt, response in demonstrations or ()
        ),
    )
    return WorkerGroupBackend(plan, log_path=log_path, further=further)


def _packed(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()
