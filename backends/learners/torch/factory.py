"""The way in: what a torch learner needs, checked before its thread starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.devices import choose_device
from penstock.backends.learners.check_demonstrations import check_demonstrations
from penstock.backends.learners.torch.backend import TorchLearnerBackend
from penstock.backends.learners.torch.worker import LearnerSetup
from penstock.backends.learners.worker_group.workers import alone_on

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.backends.learners.options import LearnerOptions
    from penstock.backends.learners.torch.worker import Demonstration
    from penstock.backends.protocol import Backend
    from penstock.backends.weights.protocol import WeightExporter
    from penstock.messages.commands import LearnerCommand


def open_torch_learner(
    *,
    model_folder: Path,
    checkpoints_folder: Path,
    options: LearnerOptions,
    temperature: float,
    dtype: str,
    seed: int,
    num_steps: int,
    epoch: int,
    exporter: WeightExporter,
    demonstrations: Sequence[Demonstration] | None,
) -> Backend[LearnerCommand]:
    """A learner that trains the checkpoint in ``model_folder``; the model is loaded by its ``OpenLearner``.

    Args:
        model_folder: config, weights and tokenizer in Hugging Face format.
        checkpoints_folder: where ``SaveCheckpoint`` writes ``version-0000123`` (``version-0000123-e4`` with epoch 4).
        options: the ``learner:`` block.
        temperature: of the sampling; 0 means 1, as engines then report log-probs of temperature 1.
        dtype: ``float32``, or ``bfloat16`` with float32 copies of the weights in the optimizer.
        seed: of the run.
        num_steps: batches of the run, for the schedule of the learning rate.
        epoch: of this incarnation of the learner; no two of one run have the same.
        exporter: closed by the learner at its normal end, and left as it is when the learner fails.
        demonstrations: for the warm start; given exactly when ``options.warm_start`` is.

    Raises:
        UserFault: the demonstrations of ``options.warm_start`` are missing, or the device does not exist.
    """
    check_demonstrations(options.warm_start, demonstrations)
    return TorchLearnerBackend(
        LearnerSetup(
            model_folder=model_folder,
            checkpoints_folder=checkpoints_folder,
            options=options,
            temperature=temperature or 1.0,
            dtype=dtype,
            seed=seed,
            num_steps=num_steps,
            epoch=epoch,
            exporter=exporter,
            demonstrations=demonstrations or (),
        ),
        alone_on(choose_device(options.device, "learner.device")),
    )
