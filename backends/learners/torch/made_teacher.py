"""A small teacher made on the spot, for trying distillation out without a download: random weights, then imitation.

Invariants:

* The same options and seed give the same weights, and not those of the student that is made from the same seed.
* The folder appears when everything is in it; one that is there is left as it is, so a run that is resumed has the
  teacher that it had.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

import torch

from penstock.backends.checkpoint.make import make_model
from penstock.backends.learners.batch.sequences import demonstration_sequence
from penstock.backends.learners.options import LearnerOptions
from penstock.backends.learners.torch.model import PackedModel
from penstock.backends.learners.torch.warm_start import warm_start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.backends.checkpoint.make import ModelSize
    from penstock.backends.data.demonstrations import Demonstration
    from penstock.backends.learners.options import WarmStartOptions

SEED_OFFSET: Final = 1_000_003
"""Between the seed of the student and that of the teacher."""


def make_teacher(
    size: ModelSize,
    folder: Path,
    seed: int,
    *,
    block: WarmStartOptions | None,
    load_demonstrations: Callable[[Path], Sequence[Demonstration]],
    report: Callable[[float, float], None],
) -> None:
    """Write the teacher and its tokenizer to ``folder``, unless it is there.

    Args:
        size: of the model.
        folder: does not exist, or holds a teacher.
        seed: of the run.
        block: how it imitates; None leaves its weights random.
        load_demonstrations: reads them with the tokenizer of a folder.
        report: called after each step of imitation with the fraction done and the loss.

    Raises:
        DataError: the demonstrations cannot be read.
        DivergedError: a loss or a gradient is not finite.
    """
    if folder.is_dir():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_model(size, partial, seed + SEED_OFFSET)
    if block is not None:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more are slower for models as small as these
        try:
            model = PackedModel.load(partial, dtype="float32", device=torch.device("cpu"))
            given = load_demonstrations(partial)
            sequences = [
                demonstration_sequence(d.prompt_ids, d.response_ids, sample=index) for index, d in enumerate(given)
            ]
            warm_start(model, sequences, LearnerOptions(), block, seed=seed, report=report, check_stop=_never)
            model.save(partial)
        finally:
            torch.set_num_threads(num_threads)
    os.rename(partial, folder)


def _never() -> None:
    """Nothing stops it: the process that prepares a run ends with its driver."""
