"""The PromptSource where groups are pushed from outside: what is told of versions and of what is settled."""

from __future__ import annotations

import actor_driver as drive
from msgspec.structs import replace
from source_bench import SourceBench

from penstock.actors.prompt_source.machine import PromptSource
from penstock.messages.commands import FetchPrompts, PromptRequest, TellPushers
from penstock.messages.flow import DemandGranted, GrantSpan, GroupRow, SamplesSettled, SettledState
from penstock.messages.local import RowsDrawn
from penstock.messages.weights import VersionAnnounced

ROWS = tuple(GroupRow(number, number, 0, number) for number in range(3))


def bench_of(*, awaits_pushes: bool) -> SourceBench:
    bench = SourceBench()
    settings = replace(bench.source.settings, chooses_rows=True, awaits_pushes=awaits_pushes)
    bench.driver = drive.Driver(PromptSource(settings))
    return bench.started()


def granted(floor: int = 0) -> DemandGranted:
    spans = (GrantSpan(0, 2, 0, 4, 6), GrantSpan(2, 1, 2, 5, 7))
    return DemandGranted(
        total=3, spans=spans, settled=SettledState(floor, floor, ()), rows=ROWS[floor:], next_position=3
    )


def test_who_pushes_is_told_how_old_a_group_may_be_what_is_announced_and_what_nobody_wants() -> None:
    bench = bench_of(awaits_pushes=True)
    assert drive.one(bench.driver.hear(VersionAnnounced(version=5, publish=6)), TellPushers).version == 5
    bench.driver.hear(replace(granted(), rows=()), RowsDrawn(rows=ROWS))
    fetch = drive.one(bench.driver.hear(granted()), FetchPrompts)  # and nothing has been pushed yet
    assert fetch.requests == tuple(PromptRequest(n, n, 0, None, oldest) for n, oldest in enumerate((4, 4, 5)))
    settled = SamplesSettled(settled=SettledState(2, 1, (2,)))
    assert drive.one(bench.driver.hear(settled), TellPushers) == TellPushers(5, (0, 2))
    assert drive.every(bench.driver.hear(settled), TellPushers) == [], "said once"


def test_nobody_is_told_where_nobody_pushes() -> None:
    bench = bench_of(awaits_pushes=False)
    commands = bench.driver.hear(VersionAnnounced(version=5, publish=6), replace(granted(), rows=()))
    commands += bench.driver.hear(granted(), SamplesSettled(settled=SettledState(3, 3, ())))
    assert drive.one(commands, FetchPrompts).requests[0].min_version == 0
    assert drive.every(commands, TellPushers) == []
