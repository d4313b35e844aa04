"""The PromptSource's backend of a run that evaluates: rows to train on come from the backend of the run's data, prompts
of an evaluation from its own datasets, which are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.messages.base import Metric
from penstock.messages.commands import FetchPrompts
from penstock.messages.local import FetchedPrompt, PromptsFetched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.evaluation.rows import EvaluationRows
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.messages.commands import PromptCommand


class PromptsWithEvaluation:
    """Implements ``penstock.backends.protocol.Backend``."""

    def __init__(self, training: Backend[PromptCommand], datasets: Sequence[EvaluationRows]) -> None:
        self._training = training
        self._datasets = datasets

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._emit = emit
        self._training.start(emit, fail)

    def execute(self, command: PromptCommand, /) -> None:
        """Emit the prompts of an evaluation before this returns, and hand the others on.

        Raises:
            IndexError: a row that the dataset does not have.
        """
        if not isinstance(command, FetchPrompts):
            self._training.execute(command)
            return
        evaluated = tuple(
            FetchedPrompt(request.group_id, self._datasets[request.dataset].prompt(request.row))
            for request in command.requests
            if request.dataset is not None
        )
        if evaluated:
            self._emit(PromptsFetched(prompts=evaluated))
            trained = tuple(request for request in command.requests if request.dataset is None)
            command = msgspec.structs.replace(command, requests=trained)
        if command.requests or command.ahead:
            self._training.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Those of training, and the size of each dataset."""
        sizes = (Metric(f"data/eval/{rows.each.name}/prompts", float(rows.num_prompts)) for rows in self._datasets)
        return (*self._training.gauges(), *sizes)

    def close(self, timeout_s: float) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._training.close(timeout_s)
