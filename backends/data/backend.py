"""The PromptSource's backend: rows of a dataset that is already in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.messages.base import Metric
from penstock.messages.local import FetchedPrompt, PromptsFetched

if TYPE_CHECKING:
    from penstock.backends.data.dataset import Dataset
    from penstock.backends.protocol import Emit, Fail
    from penstock.messages.commands import FetchPrompts


class DatasetBackend:
    """Answers ``FetchPrompts`` before ``execute`` returns: a row is a slice of memory."""

    def __init__(self, dataset: Dataset) -> None:
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
            Metric("data/skipped_rows", float(self._dataset.num_skipped)),
        )

    def close(self, timeout_s: float) -> None:
        """Nothing runs, so nothing ends."""
