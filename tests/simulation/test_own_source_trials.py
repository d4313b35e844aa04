"""Rows that a class makes, under faults: each place is taken once, and each end is told once and in order."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import Trial

from penstock.actors.buffer.histories import RowHistory
from penstock.backends.ledger.memory import MemoryStore
from penstock.backends.simulated.rewards import JudgingModel, SimulatedPrompts
from penstock.messages.commands import ChooseRows
from penstock.messages.ledger import GroupClosed, GroupRecorded, RowsRecorded, StepRecorded
from penstock.messages.names import BUFFER, FILTER, PROMPT_SOURCE
from penstock.messages.training import OnStale, UpdateMode

if TYPE_CHECKING:
    from penstock.messages.commands import PromptCommand
    from penstock.messages.flow import RowOutcome
    from penstock.messages.ledger import LedgerEntry


def trial(seed: int) -> Trial:
    rng = random.Random(seed)
    faults = tuple(
        Fault(
            at_s=rng.uniform(0.5, 20.0),
            kind=FaultKind.KILL,
            target=rng.choice((PROMPT_SOURCE, PROMPT_SOURCE, BUFFER, FILTER, "engine/0")),
            after_effects=rng.randrange(4),
        )
        for _ in range(rng.randint(1, 4))
    )
    return Trial(
        seed=seed,
        policy="fully_async",
        max_staleness=rng.choice((1, 2, 4)),
        update_mode=UpdateMode.IN_FLIGHT,
        on_stale=rng.choice((OnStale.WAIT, OnStale.REQUEUE, OnStale.DROP)),
        num_steps=8,
        num_rows=1 << 20,
        own_source=True,
        over_sampling=rng.choice((1.0, 1.5)),
        judging=JudgingModel(rejection_rate=rng.choice((0.0, 0.3))),
        faults=faults,
    )


class Told:
    """What each incarnation of the PromptSource's backend was told."""

    def __init__(self) -> None:
        self.by_backend: dict[int, list[RowOutcome]] = defaultdict(list)
        self._backends: list[SimulatedPrompts] = []

    def hear(self, backend: SimulatedPrompts, command: PromptCommand) -> None:
        if isinstance(command, ChooseRows):
            self._backends.append(backend)  # kept, so that no other gets its id
            self.by_backend[id(backend)] += command.outcomes


def entries_and_told(of: Trial) -> tuple[list[LedgerEntry], list[list[RowOutcome]]]:
    told, execute = Told(), SimulatedPrompts.execute

    def heard(backend: SimulatedPrompts, command: PromptCommand, /) -> None:
        told.hear(backend, command)
        execute(backend, command)

    with patch.object(SimulatedPrompts, "execute", heard):
        run = TrialRun(of, with_digest=False)
        run.run()
    return list(MemoryStore(run.host.ledger).entries()), list(told.by_backend.values())


def check(entries: list[LedgerEntry], told: list[list[RowOutcome]]) -> None:
    """Against a list that is made anew from the ledger."""
    rows = {row.group_id: row for entry in entries if isinstance(entry, RowsRecorded) for row in entry.rows}
    again = {entry.group_id for entry in entries if isinstance(entry, GroupClosed) and entry.is_requeued}
    places = [row.position for row in rows.values()]
    assert sorted(set(places)) == list(range(len(set(places)))), "no row of the source is left out"
    assert len(places) - len(set(places)) <= len(again), "only what is drawn again has a row twice"
    expected: list[tuple[int, str]] = []
    for entry in entries:
        match entry:
            case GroupRecorded():
                expected.append((rows[entry.group_id].row, "admitted"))
            case GroupClosed() if entry.group_id in rows:
                end = "requeued" if entry.is_requeued else entry.ended[0].state.value
                expected.append((rows[entry.group_id].row, "rejected" if entry.rejected_cause else end))
            case StepRecorded():
                expected += [(rows[group_id].row, "trained") for group_id in entry.group_ids]
            case _:
                pass
    assert told
    for outcomes in told:
        heard = [(o.row, o.end or ("rejected" if o.is_rejected else "admitted")) for o in outcomes]
        assert heard == expected[: len(heard)], "each once, in the order of the ledger, from the first"


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_made_once_and_their_ends_are_told_once_whatever_dies(seed: int) -> None:
    check(*entries_and_told(trial(seed)))


def test_an_end_that_is_not_told_is_noticed() -> None:
    def silent(history: RowHistory, tracked: object) -> None:
        return

    with patch.object(RowHistory, "trained", silent), pytest.raises(AssertionError, match="in the order of the ledger"):
        check(*entries_and_told(trial(0)))
