"""The PromptSource's backend where rows are chosen: beside one that reads prompts, a thread that chooses rows.

Invariants:

* Each ``ChooseRows`` is answered by one ``RowsDrawn``, in the order in which they were asked.
* Nothing of the user's function runs on the actor's thread.

| waits for | who ends it |
|---|---|
| the priorities of candidates | the curriculum's process; its deadline |
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from penstock.backends.data.row_chooser import ChoosingSettings, RowChooser
from penstock.backends.rewards.sampling_calls import PromptHistory
from penstock.messages.base import Metric
from penstock.messages.commands import ChooseRows, FetchPrompts
from penstock.messages.local import RowsDrawn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.backends.data.row_chooser import RowRecord
    from penstock.backends.protocol import Backend, Emit, Fail
    from penstock.backends.rewards.sampling import PriorityFunction
    from penstock.messages.commands import PromptCommand
    from penstock.messages.samples import Prompt


class ChoosingPrompts:
    """Reads prompts with another backend, and chooses rows."""

    def __init__(
        self,
        prompts: Backend[FetchPrompts],
        settings: ChoosingSettings,
        *,
        prompt_of: Callable[[int], Prompt],
        priority: PriorityFunction | None,
    ) -> None:
        """
        Args:
            prompts: what reads them.
            settings: of the choice.
            prompt_of: the prompt of a row, for the curriculum.
            priority: the curriculum; None: there is none.
        """
        self._prompts = prompts
        self._prompt_of = prompt_of
        self._priority = priority
        self._chooser = RowChooser(settings, None if priority is None else self._weigh)
        self._asked: queue.SimpleQueue[ChooseRows | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rows", daemon=True)

    def start(self, emit: Emit, fail: Fail) -> None:
        """See :class:`~penstock.backends.protocol.Backend`. A curriculum that cannot be loaded comes to ``fail``."""
        self._emit, self._fail = emit, fail
        self._prompts.start(emit, fail)
        if self._priority is not None:
            self._priority.start(fail)
        self._thread.start()

    def execute(self, command: PromptCommand, /) -> None:
        """See :class:`~penstock.backends.protocol.Backend`."""
        if isinstance(command, ChooseRows):
            self._asked.put(command)
        else:
            self._prompts.execute(command)

    def gauges(self) -> tuple[Metric, ...]:
        """Those of the reader, replayed prompts, and prompts that the curriculum gave no number."""
        own = [Metric("prompt_source/replayed", float(self._chooser.num_replayed))]
        if self._priority is not None:
            failed = self._priority.num_failed + self._priority.num_late
            own.append(Metric("prompt_source/priority_failed", float(failed)))
        return (*self._prompts.gauges(), *own)

    def close(self, timeout_s: float) -> None:
        """End the thread and the curriculum's process."""
        self._asked.put(None)
        if self._priority is not None:
            self._priority.close(timeout_s)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._prompts.close(timeout_s)

    def _run(self) -> None:
        try:
            while (command := self._asked.get()) is not None:
                self._emit(RowsDrawn(rows=self._chooser.choose(command)))
        except BaseException as error:  # the thread's end must not go unnoticed, whatever ended it
            self._fail(error)

    def _weigh(self, rows: Sequence[tuple[int, RowRecord]]) -> list[float | None]:
        assert self._priority is not None
        return self._priority.weigh([(self._prompt_of(row), history_of(record)) for row, record in rows])


def history_of(record: RowRecord) -> PromptHistory:
    """As users see it."""
    return PromptHistory(record.seen, record.rejected, record.mean_reward, record.last_reward)
