"""The PromptSource's backend: rows of a dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.backends.data.rows import num_skipped
from penstock.messages.base import Metric
from penstock.messages.local import FetchedPrompt, PromptsFetched

if TYPE_CHECKING:
    from penstock.backends.data.rows import Rows
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.commands import FetchPrompts


class DatasetBackend:
    """Answers ``FetchPrompts`` before ``execute`` returns: a row in memory is a slice of it. Rows that are read from
    files need a thread around it (:class:`~penstock.backends.data.streamed.BackgroundRows`)."""

    def __init__(self, dataset: Rows) -> None:
        self._dataset = dataset
        self._emit: Emit | None = None

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        self._emit = emit

    def execute(self, command: FetchPrompts, /) -> None:
        """Emit the prompts.

        Raises:
            IndexError: a row that the dataset does not have.
        """
        assert self._emit is not None, "start comes before execute"
        prompts = (
            FetchedPrompt(request.group_id, self._dataset.prompt(request.row, request.epoch))
            for request in command.requests
        )
        self._emit(PromptsFetched(prompts=tuple(prompts)))

    def gauges(self) -> tuple[Metric, ...]:
        """The size of the dataset."""
        return (
            Metric("data/rows", float(self._dataset.num_rows)),
            Metric("data/skipped_rows", float(num_skipped(self._dataset))),
        )

    def close(self, timeout_s: float) -> None:
        """Nothing runs, so nothing ends."""
