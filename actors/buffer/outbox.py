"""Who has to hear what is settled and what is granted, and when.

Invariants:

* Settlements are told soon after they are recorded, those of a short while together.
* Samples of groups that came in since are held in the census: those who sent them may have died, and nobody else knows
  yet that they are written down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.actors.buffer.table import Status
from penstock.messages.commands import Send, StartTimer
from penstock.messages.evaluation import EvaluationDue
from penstock.messages.flow import DemandGranted, SamplesSettled
from penstock.messages.membership import HeldLease, LeaseStage
from penstock.messages.names import FILTER, PROMPT_SOURCE, SCORER, SUPERVISOR
from penstock.messages.training import FailuresCounted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.actors.buffer.books import Books
    from penstock.messages.commands import AnyCommand
    from penstock.messages.samples import SampleKey

SETTLE_TIMER: Final = "settle"


class Outbox:
    """What was told, and what is due to be."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._is_due = False
        self.num_known_outcomes = 0
        """That PromptSource has said it knows."""
        self._untold: list[tuple[SampleKey, ...]] = []
        self._num_failures_told = 0

    def leases(self) -> tuple[HeldLease, ...]:
        """The samples that came in since settlements were last told."""
        return tuple(HeldLease(key, 0, LeaseStage.PASSED_ON) for keys in self._untold for key in keys)

    def came_in(self, keys: Iterable[SampleKey]) -> None:
        """These samples are written down now."""
        self._untold.append(tuple(keys))

    def soon(self) -> list[AnyCommand]:
        """Something was settled: tell it when a short while has gone by."""
        if self._is_due:
            return []
        self._is_due = True
        return [StartTimer(SETTLE_TIMER, self._books.settings.settle_delay_s)]

    def settled(self, *, is_due: bool = False) -> list[AnyCommand]:
        """Tell all who keep; ``is_due``: because the short while has gone by."""
        if is_due:
            self._is_due = False
        self._untold = []
        event = SamplesSettled(settled=self._books.settled.snapshot())
        keepers = (PROMPT_SOURCE, SCORER, FILTER, *self._books.settings.engines)
        return [Send(keeper, event) for keeper in keepers]

    def failures(self) -> list[AnyCommand]:
        """Tell people how many samples have failed, and why, if there are more than they know of."""
        failures = self._books.failures
        if failures.num_samples == self._num_failures_told:
            return []
        self._num_failures_told = failures.num_samples
        return [Send(SUPERVISOR, FailuresCounted(counts=failures.counts(), num_samples=failures.num_samples))]

    def evaluation(self) -> list[AnyCommand]:
        """Tell PromptSource which evaluation is open; it hears what is settled too."""
        self._untold = []
        settled = self._books.settled.snapshot()
        return [Send(PROMPT_SOURCE, EvaluationDue(evaluation=self._books.evaluations.open, settled=settled))]

    def demand(self) -> list[AnyCommand]:
        """Tell PromptSource everything that is granted; it hears what is settled too."""
        self._untold = []
        grants, snapshot = self._books.grants, self._books.settled.snapshot()
        spans = grants.snapshot(snapshot.floor)
        demand = DemandGranted(total=grants.total, spans=spans, settled=snapshot)
        if self._books.settings.chooses_rows:
            in_generation = (t for t in self._books.table.outstanding() if t.status is Status.GRANTED)
            demand = self._books.history.fill(demand, in_generation, num_known=self.num_known_outcomes)
        return [Send(PROMPT_SOURCE, demand)]
