"""What decides about sampling, on the virtual host with faults: the ledger balances, for the auditor too."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec
import pytest
from trials.faults import Fault, FaultKind
from trials.fuzz import TrialRun
from trials.trial import RowChoice, Trial

from penstock.actors.buffer import machine
from penstock.backends.ledger.audit_books import AuditBooks
from penstock.backends.ledger.memory import MemoryStore
from penstock.backends.simulated.rewards import JudgingModel
from penstock.messages.ledger import (
    BatchLeased,
    GroupClosed,
    GroupRecorded,
    GroupsGranted,
    RowsRecorded,
    StepRecorded,
)
from penstock.messages.names import BUFFER, FILTER, PROMPT_SOURCE
from penstock.messages.rows import ReplayOptions
from penstock.messages.samples import TerminalState
from penstock.messages.training import OnStale, UpdateMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.actors.buffer.books import Books
    from penstock.messages.ledger import LedgerEntry

FAULTS = tuple(
    Fault(at_s=at_s, kind=FaultKind.KILL, target=target, after_effects=after)
    for at_s, target, after in (
        (1.0, PROMPT_SOURCE, 0),
        (2.5, FILTER, 1),
        (4.0, BUFFER, 2),
        (5.5, PROMPT_SOURCE, 3),
        (7.0, BUFFER, 0),
        (8.0, "engine/0", 0),
    )
)
TRIAL = Trial(
    seed=3,
    policy="fully_async",
    max_staleness=2,
    update_mode=UpdateMode.IN_FLIGHT,
    num_steps=6,
    samples_per_group=3,
    num_rows=12,
    faults=FAULTS,
)
REPLAY = ReplayOptions(fraction=0.5, below_reward=0.6, max_times=2)
POLICIES: tuple[dict[str, Any], ...] = (
    {"policy": "sync", "max_staleness": 0, "update_mode": UpdateMode.DRAIN},
    {"policy": "one_step_off", "max_staleness": 1, "update_mode": UpdateMode.DRAIN},
    {},
)


def entries_of(trial: Trial) -> list[LedgerEntry]:
    """The ledger of a trial that passed the oracle, and that the auditor finds nothing wrong with."""
    run = TrialRun(trial, with_digest=False)
    run.run()
    entries = list(MemoryStore(run.host.ledger).entries())
    books = AuditBooks()
    for sequence, entry in enumerate(entries, 1):
        books.apply(sequence, 1, entry)
    assert books.findings == []
    num_ended = sum(counts[0] for counts in books.ended.values())
    assert books.issued == num_ended + books.in_system()[0]
    return entries


def trial(policy: dict[str, Any], **changes: object) -> Trial:
    return msgspec.structs.replace(TRIAL, **policy, **changes)


def of(entries: Sequence[LedgerEntry], kind: type[LedgerEntry]) -> list[LedgerEntry]:
    return [entry for entry in entries if isinstance(entry, kind)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.get("policy", "fully_async")))
def test_groups_are_kept_when_a_filter_turns_almost_everything_away(policy: dict[str, Any]) -> None:
    judging = JudgingModel(rejection_rate=0.95)
    entries = entries_of(trial(policy, judging=judging, keep_when_insufficient=2))
    since_batch = num_kept = 0
    for entry in entries:
        match entry:
            case GroupClosed():
                since_batch += bool(entry.rejected_cause)
            case GroupRecorded():
                num_kept += bool(entry.kept_cause)
                assert not entry.kept_cause or since_batch >= 4
            case BatchLeased():
                assert since_batch <= 4, "further ones are kept"
                since_batch = 0
            case _:
                pass
    assert num_kept > 0
    assert len(of(entries, StepRecorded)) == 6


@pytest.mark.parametrize("drops", ["before_statistics", "after_statistics"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.get("policy", "fully_async")))
def test_dropped_samples_end_once_as_filtered(policy: dict[str, Any], drops: str) -> None:
    entries = entries_of(trial(policy, judging=JudgingModel(drop_rate=0.3), drop_samples=drops, shows_groups=True))
    ends: Counter[TerminalState] = Counter()
    num_counted = 0
    for entry in entries:
        if isinstance(entry, GroupRecorded):
            ends.update(end.state for end in entry.ended)
            num_counted += 0 if entry.payload is None else len(entry.payload.counted)
    assert ends[TerminalState.FILTERED] > 0
    assert num_counted == 0 or drops == "after_statistics"


@pytest.mark.parametrize("has_priority", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.get("policy", "fully_async")))
def test_rows_are_recorded_once_for_each_group_that_comes_in(policy: dict[str, Any], has_priority: bool) -> None:
    replay = ReplayOptions(fraction=0.5, below_reward=0.6, max_times=2)
    entries = entries_of(trial(policy, has_priority=has_priority, replay=replay))
    rows = [row for entry in entries if isinstance(entry, RowsRecorded) for row in entry.rows]
    assert len({row.group_id for row in rows}) == len(rows)
    came = {entry.group_id for entry in entries if isinstance(entry, GroupRecorded)}
    assert came <= {row.group_id for row in rows}
    assert any(row.position < 0 for row in rows)
    taken = [row.position for row in rows if row.position >= 0]
    assert len(set(taken)) == len(taken), "a place of the stream is taken once"


def test_a_prompt_that_is_granted_anew_keeps_the_row_that_was_chosen() -> None:
    num_again = 0
    for seed in range(3, 9):
        entries = entries_of(
            trial(
                {},
                seed=seed,
                on_stale=OnStale.REQUEUE,
                max_staleness=1,
                num_rows=1000,
                num_steps=10,
                target_outstanding=8,
                rank="newest",
                replay=ReplayOptions(fraction=0.1, below_reward=0.5),
            )
        )
        num_again += _check_rows_of_groups_granted_anew(entries)
    assert num_again


def _check_rows_of_groups_granted_anew(entries: Sequence[LedgerEntry]) -> int:
    """How many groups were."""
    ordinals: dict[int, int] = {}
    rows: dict[int, int] = {}
    for entry in entries:
        if isinstance(entry, GroupsGranted):
            span = entry.span
            for offset in range(span.num_groups):
                ordinals[span.first_group + offset] = span.first_ordinal + offset
        elif isinstance(entry, RowsRecorded):
            rows |= {row.group_id: row.row for row in entry.rows}
    again = [entry.group_id for entry in entries if isinstance(entry, GroupClosed) and entry.is_requeued]
    for first in again:
        (_, *later) = sorted(group for group, ordinal in ordinals.items() if ordinal == ordinals[first])
        assert {rows[group] for group in later if group in rows} <= {rows[first]} if first in rows else True
    return len(again)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy.get("policy", "fully_async")))
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (RowChoice(), RowChoice(replay=REPLAY)),
        (RowChoice(), RowChoice(has_priority=True)),
        (RowChoice(replay=REPLAY), RowChoice()),
        (RowChoice(has_priority=True), RowChoice(replay=REPLAY)),
        (RowChoice(replay=REPLAY), RowChoice(replay=msgspec.structs.replace(REPLAY, below_reward=0.9, min_gap=3))),
    ],
    ids=["replay on", "curriculum on", "replay off", "curriculum off, replay on", "other replay"],
)
def test_a_run_that_goes_on_with_another_choice_of_rows_loses_none_and_takes_none_twice(
    policy: dict[str, Any], first: RowChoice, then: RowChoice
) -> None:
    faults = tuple(Fault(at_s=at_s, kind=FaultKind.MACHINE, target="") for at_s in (9.0, 21.0))
    given = {"has_priority": first.has_priority, "replay": first.replay, "row_choices": (then, first)}
    entries = entries_of(trial(policy, num_steps=16, faults=faults, **given))
    rows = {row.group_id: row for entry in entries if isinstance(entry, RowsRecorded) for row in entry.rows}
    came = [entry.group_id for entry in entries if isinstance(entry, GroupRecorded)]
    assert len(of(entries, StepRecorded)) == 16
    assert len(set(came)) == len(came)
    by_place = [group_id for group_id in came if group_id not in rows]
    assert bool(by_place) == (first == RowChoice()), "rows are recorded from the first choice on, for good"
    taken = [*by_place, *(row.position for row in rows.values() if row.position >= 0)]
    assert sorted(taken) == list(range(len(taken))), "each place of the stream is taken once, and none is passed over"
    assert len(rows) > len(taken) - len(by_place), "and others are chosen besides"


def nothing(books: Books) -> list[RowsRecorded]:
    return []


def test_a_switch_that_forgets_what_is_outstanding_is_noticed() -> None:
    loss = Fault(at_s=9.0, kind=FaultKind.MACHINE, target="")
    changed = trial({}, num_steps=16, faults=(loss,), row_choices=(RowChoice(has_priority=True),))
    with patch.object(machine, "rows_by_place", nothing), pytest.raises(AssertionError, match="issued otherwise"):
        TrialRun(changed, with_digest=False).run()


def test_old_tokens_are_masked_and_receipts_say_so() -> None:
    masked = entries_of(trial({}, mask_old_tokens=True, max_staleness=4, num_slots=1))
    plain = entries_of(trial({}, max_staleness=4, num_slots=1))
    assert sum(entry.num_masked_tokens for entry in masked if isinstance(entry, StepRecorded)) > 0
    assert sum(entry.num_masked_tokens for entry in plain if isinstance(entry, StepRecorded)) == 0


def test_the_same_seed_chooses_the_same_rows_twice() -> None:
    calm = trial({}, replay=ReplayOptions(fraction=0.5, below_reward=0.6), has_priority=True, faults=())
    assert entries_of(calm) == entries_of(calm)
