"""The PromptSource where rows are chosen: what it asks its backend, what it tells the Buffer, and what it issues."""

from __future__ import annotations

import actor_driver as drive
from msgspec.structs import replace
from source_bench import SourceBench

from penstock.actors.prompt_source.machine import PromptSource
from penstock.messages.commands import AnyCommand, ChooseRows, FetchPrompts, PromptRequest, StreamPlace
from penstock.messages.flow import (
    DemandGranted,
    GrantSpan,
    GroupRow,
    RowOutcome,
    RowsChosen,
    SampleIssued,
    SamplesSettled,
    SettledState,
)
from penstock.messages.local import RowsDrawn

OUTCOMES = tuple(RowOutcome(index, 0.25 * index, False) for index in range(4))


def bench_of(epoch: int = 0) -> SourceBench:
    bench = SourceBench(epoch=epoch)
    settings = replace(bench.source.settings, chooses_rows=True)
    bench.driver = drive.Driver(PromptSource(settings))
    return bench.started()


def demand(
    total: int,
    rows: tuple[GroupRow, ...] = (),
    *,
    first: int = 0,
    outcomes: tuple[RowOutcome, ...] = (),
    num_outcomes: int | None = None,
    next_position: int = 0,
    floor: int = 0,
) -> DemandGranted:
    return DemandGranted(
        total=total,
        spans=(GrantSpan(floor, total - floor, floor, 0, 2),),
        settled=SettledState(floor, floor, ()),
        rows=rows,
        next_position=next_position,
        first_outcome=first,
        outcomes=outcomes,
        num_outcomes=first + len(outcomes) if num_outcomes is None else num_outcomes,
    )


def chosen(commands: list[AnyCommand]) -> RowsChosen:
    return drive.one_sent(commands, RowsChosen, to="buffer")


def test_a_group_waits_for_the_row_that_the_buffer_has_recorded() -> None:
    bench = bench_of()
    asked = drive.one(bench.hear(demand(2)), ChooseRows)
    assert asked == ChooseRows((0, 1), (StreamPlace(0, 0, 0), StreamPlace(1, 1, 0)), (), ())
    drawn = (GroupRow(0, 40, 3, -1), GroupRow(1, 0, 0, 0))
    commands = bench.hear(RowsDrawn(rows=drawn))
    assert chosen(commands).rows == drawn
    assert drive.every(commands, FetchPrompts) == []
    commands = bench.hear(demand(2, drawn, next_position=1))
    assert drive.one(commands, FetchPrompts).requests == (PromptRequest(0, 40, 3), PromptRequest(1, 0, 0))
    assert {issued.prompt.row for issued in drive.sent(commands, SampleIssued)} == {0, 40}
    assert drive.every(bench.hear(demand(2, drawn, next_position=1)), FetchPrompts) == []


def test_what_the_buffer_recorded_counts_and_not_what_was_chosen() -> None:
    bench = bench_of()
    bench.hear(demand(1))
    bench.hear(RowsDrawn(rows=(GroupRow(0, 5, 0, 0),)))
    commands = bench.hear(demand(1, (GroupRow(0, 9, 0, -1),)))
    assert {issued.prompt.row for issued in drive.sent(commands, SampleIssued)} == {9}


def test_one_choice_at_a_time_and_all_that_is_not_recorded_is_told_each_time() -> None:
    bench = bench_of()
    bench.hear(demand(1))
    assert drive.every(bench.hear(demand(3)), ChooseRows) == []
    commands = bench.hear(RowsDrawn(rows=(GroupRow(0, 0, 0, 0),)))
    assert chosen(commands).rows == (GroupRow(0, 0, 0, 0),)
    asked = drive.one(commands, ChooseRows)
    assert (asked.group_ids, [place.position for place in asked.stream]) == ((1, 2), [1, 2])
    assert asked.in_flight == (0,)
    commands = bench.hear(RowsDrawn(rows=(GroupRow(1, 1, 0, 1), GroupRow(2, 7, 0, -1))))
    assert [row.group_id for row in chosen(commands).rows] == [0, 1, 2]


def test_outcomes_are_handed_on_once_and_rows_are_chosen_when_all_of_them_are_known() -> None:
    bench = bench_of()
    commands = bench.hear(demand(1, outcomes=OUTCOMES[:2], num_outcomes=4))
    assert drive.every(commands, ChooseRows) == []
    assert chosen(commands).num_outcomes == 2
    asked = drive.one(bench.hear(demand(1, first=2, outcomes=OUTCOMES[2:])), ChooseRows)
    assert asked.outcomes == OUTCOMES
    bench.hear(RowsDrawn(rows=(GroupRow(0, 0, 0, 0),)))
    later = RowOutcome(9, 1.0, True)
    commands = bench.hear(demand(2, first=2, outcomes=(*OUTCOMES[2:], later)))
    assert drive.one(commands, ChooseRows).outcomes == (later,)


def test_a_gap_in_the_outcomes_is_asked_for() -> None:
    bench = bench_of()
    commands = bench.hear(demand(1, first=3, outcomes=OUTCOMES[3:]))
    assert drive.every(commands, ChooseRows) == []
    assert chosen(commands) == RowsChosen(rows=(), num_outcomes=0)


def test_a_successor_takes_recorded_rows_and_chooses_the_others_anew() -> None:
    bench = bench_of(epoch=1)
    bench.answers()
    commands = bench.hear(demand(3, (GroupRow(1, 40, 0, 4),), outcomes=OUTCOMES, next_position=5))
    assert drive.one(commands, FetchPrompts).requests == (PromptRequest(1, 40, 0),)
    asked = drive.one(commands, ChooseRows)
    assert (asked.group_ids, asked.in_flight, asked.outcomes) == ((0, 2), (40,), OUTCOMES)
    assert [place.position for place in asked.stream] == [5, 6]


def test_a_group_that_is_settled_needs_no_row() -> None:
    bench = bench_of()
    bench.hear(demand(2))
    bench.hear(SamplesSettled(settled=SettledState(1, 1, ())))
    commands = bench.hear(RowsDrawn(rows=(GroupRow(0, 0, 0, 0), GroupRow(1, 1, 0, 1))))
    assert chosen(commands).rows == (GroupRow(1, 1, 0, 1),)
    assert drive.every(bench.hear(demand(2, (GroupRow(1, 1, 0, 1),), floor=1)), FetchPrompts)
