"""What a learner computes about single tokens, for ``learner.dump``: taken where the loss is, so that every learner and
every layout gives the same.

Invariants:

* Training is what it would be without: everything is copied after it was computed, and nothing is computed for it but
  the ratio.
* A place is recorded by the ranks that ran its token, with the same bits; all ranks know all of them afterwards.
* A token is recorded by the first optimizer step that trains it.
"""

# torch.from_numpy is typed in part only:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from penstock.backends.learners.objectives.objective import old_logprobs
from penstock.backends.learners.step_dumps import FIGURES, DumpedSequence, write_step

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backends.learners.batch.sequences import TrainBatch
    from penstock.backends.learners.objectives.protocol import ObjectiveFunction, ObjectiveTerms, PolicyTokens
    from penstock.backends.learners.options import ObjectiveOptions
    from penstock.backends.learners.recording_options import DumpOptions
    from penstock.backends.learners.worker_group.workers import WorkerGroup

_ABSENT: Final = -(2**31)
"""The bits of −0.0, which no recorded value has."""
_log: Final = logging.getLogger(__name__)


class _Taken(NamedTuple):
    places: Tensor
    """Of tokens among those of the batch ``[T]``."""
    values: Tensor
    """float32 ``[figures, T]``; NaN where there is none."""


class TokenRecorder:
    """One rank's."""

    def __init__(self, options: DumpOptions, workers: WorkerGroup, run_folder: Path) -> None:
        """
        Args:
            options: which steps.
            workers: all ranks, each of which has such a recorder.
            run_folder: where the first rank writes.
        """
        self._options = options
        self._workers = workers
        self._run_folder = run_folder
        self._taken: list[_Taken] | None = None
        """None: nothing is recorded now."""

    def around(self, objective: ObjectiveFunction) -> ObjectiveFunction:
        """The same objective, listened to."""

        def call(tokens: PolicyTokens, options: ObjectiveOptions, /) -> ObjectiveTerms:
            terms = objective(tokens, options)
            if self._taken is not None and tokens.places is not None:
                self._taken.append(_Taken(tokens.places, _figures(tokens, terms, options)))
            return terms

        return call

    def begin(self, step: int) -> None:
        """From here on the tokens of this step are recorded, if it is one to be written down."""
        self._taken = [] if self._options.takes(step) else None

    def forget(self) -> None:
        """What was recorded is going to be computed anew."""
        if self._taken is not None:
            self._taken.clear()

    def write(self, batch: TrainBatch, step: int) -> None:
        """Bring what all ranks have recorded together, and write it on the first; nothing is recorded from here on.
        Every rank calls it."""
        if self._taken is None:
            return
        taken, self._taken = self._taken, None
        found = _of_all(taken, batch.num_trained_tokens, self._workers)
        if self._workers.is_first:
            try:
                write_step(self._run_folder, step, _rows(batch, found))
            except OSError as error:  # what is written for people to look at ends no run
                _log.warning("learner.dump: step %d could not be written down: %s", step, error)


def _figures(tokens: PolicyTokens, terms: ObjectiveTerms, options: ObjectiveOptions) -> Tensor:
    new, old = tokens.logprobs.detach(), old_logprobs(tokens, options)
    known: dict[str, Tensor | None] = {
        "num_kept": None,  # the batch knows it
        "rollout_logprobs": tokens.rollout_logprobs,
        "reference_logprobs": tokens.reference_logprobs,
        "proximal_logprobs": None if options.old_logprobs == "engine" else old,
        "advantages": tokens.advantages,
        "logprobs": new,
        "ratios": (new - old).exp(),
        "losses": terms.per_token,
    }
    unknown = torch.full_like(new, math.nan, dtype=torch.float32)
    return torch.stack([unknown if (one := known[name]) is None else one.detach().float() for name in FIGURES])


def _of_all(taken: list[_Taken], count: int, workers: WorkerGroup) -> Mapping[str, NDArray[np.float32]]:
    bits = torch.full((len(FIGURES), count), _ABSENT, dtype=torch.int32, device=workers.device)
    for places, values in taken:
        bits[:, places] = (values + 0.0).contiguous().view(torch.int32)
    whole = workers.max_(bits).cpu()
    found: NDArray[np.float32] = whole.view(torch.float32).masked_fill(whole == _ABSENT, math.nan).numpy()
    return dict(zip(FIGURES, found, strict=True))


def _rows(batch: TrainBatch, found: Mapping[str, NDArray[np.float32]]) -> list[DumpedSequence]:
    keys: list[tuple[int, int]] = []
    for group in batch.groups:
        keys += [(sample.key.group_id, sample.key.index) for sample in group.samples]
        keys += [(group.group_id, -1)] * len(group.counted)
    rows: list[DumpedSequence] = []
    for sequence in batch.sequences:
        tokens = sequence.tokens[sequence.num_context :]
        mask, versions = np.zeros(len(tokens), dtype=np.bool_), np.full(len(tokens), -1, dtype=np.int32)
        trained = sequence.trained - sequence.num_context
        mask[trained], versions[trained] = True, sequence.versions
        figures: dict[str, NDArray[np.float32]] = {}
        for name, values in found.items():
            figures[name] = np.full(len(tokens), np.nan, dtype=np.float32)
            figures[name][trained] = values[sequence.first : sequence.first + len(trained)]
        if sequence.kept is not None:
            counts = sequence.kept.counts
            figures["num_kept"][trained] = np.where(counts > 0, counts, np.nan)
        context = sequence.tokens[: sequence.num_context]
        rows.append(DumpedSequence(*keys[sequence.sample], sequence.part, context, tokens, mask, versions, figures))
    return rows
