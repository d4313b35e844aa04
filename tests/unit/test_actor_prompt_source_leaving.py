"""The PromptSource: engines that come late, and those that are to leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
from source_bench import KEEPERS, SourceBench

from penstock.messages.commands import Send, StartTimer
from penstock.messages.flow import GenerationClosed, SampleIssued
from penstock.messages.local import TimerFired
from penstock.messages.membership import (
    EngineEmptied,
    EngineLeaving,
    HeldLease,
    LeasesAsked,
    LeaseStage,
)
from penstock.messages.samples import Cancelled, InfraError, SampleKey
from penstock.messages.weights import EngineReady

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand

FIRST = SampleKey(0, 0)
HANDED_BACK = Cancelled(cause="handed back")


def bench_with(num_engines: int, num_groups: int = 1) -> tuple[SourceBench, dict[SampleKey, str]]:
    """Where each sample was issued."""
    bench = SourceBench().started(num_engines=num_engines)
    issued = sends(bench.grant(num_groups))
    return bench, {event.key: to for to, event in issued}


def sends(commands: list[AnyCommand]) -> list[tuple[str, SampleIssued]]:
    """To whom what is issued."""
    return [
        (command.to, command.event)
        for command in commands
        if isinstance(command, Send) and isinstance(command.event, SampleIssued)
    ]


def leaves(bench: SourceBench, name: str) -> list[AnyCommand]:
    return bench.hear(EngineLeaving(name=name, epoch=0))


def test_what_a_leaver_hands_back_goes_on_elsewhere_from_its_tokens_at_no_cost_to_its_retries() -> None:
    bench, where = bench_with(2)
    bench.progressed(where[FIRST], FIRST, 0, drive.part((0, 4)))
    leaves(bench, where[FIRST])
    again = sends(bench.closed(where[FIRST], FIRST, HANDED_BACK))
    assert [(event.key, event.attempt) for _, event in again] == [(FIRST, 1)]
    assert again[0][0] not in ("", where[FIRST])
    assert again[0][1].prefix is not None
    assert again[0][1].prefix.num_tokens == 4
    lease = bench.source.table.lease(FIRST)
    assert lease is not None
    assert (lease.num_vanished, lease.num_engine_losses) == (1, 0)


def test_a_leaver_is_issued_nothing_more() -> None:
    bench, _ = bench_with(2, num_groups=0)
    leaves(bench, "engine/0")
    assert {to for to, _ in sends(bench.grant(8))} == {"engine/1"}


def test_a_leaver_goes_after_a_census_in_which_nobody_but_it_lacks_what_it_finished() -> None:
    bench, where = bench_with(1)
    for key in where:
        bench.closed("engine/0", key)
    assert drive.sent(leaves(bench, "engine/0"), LeasesAsked) != []
    held = [HeldLease(key, 0, LeaseStage.PASSED_ON) for key in where]
    bench.answer("engine/0", *held)
    commands = [command for name in KEEPERS for command in bench.answer(name)]
    assert drive.sent(commands, EngineEmptied) == [], "what it finished is on its way to the Scorer"
    assert StartTimer("leaving", 0.5) in commands
    bench.hear(TimerFired(key="leaving"))
    bench.answer("engine/0", *held)
    commands = [command for name in KEEPERS for command in bench.answer(name, *(held if name == "scorer" else ()))]
    assert drive.sent(commands, EngineEmptied) == [EngineEmptied(engine="engine/0", engine_epoch=0)]


def test_what_fails_at_a_leaver_goes_elsewhere_although_its_tokens_are_there() -> None:
    bench, where = bench_with(2)
    leaves(bench, where[FIRST])
    broke = InfraError(detail="broke")
    closed = GenerationClosed(engine=where[FIRST], key=FIRST, attempt=0, outcome=broke, num_tokens=4)
    assert [to for to, _ in sends(bench.hear(closed))] == ["engine/1"]


def test_a_leaver_that_says_how_many_slots_it_has_is_given_none() -> None:
    bench, _ = bench_with(1)
    leaves(bench, "engine/0")
    bench.driver.ignores(EngineReady(engine="engine/0", engine_epoch=0, num_slots=8))


def test_word_of_an_engine_that_is_not_there_retires_nobody() -> None:
    bench, _ = bench_with(1, num_groups=0)
    bench.driver.ignores(EngineLeaving(name="engine/7", epoch=0))
    bench.driver.ignores(EngineLeaving(name="engine/0", epoch=1))


def test_what_a_leaver_has_handed_back_to_who_knows_the_sample_does_not_hold_it() -> None:
    bench, where = bench_with(2)
    assert set(where.values()) == {"engine/0"}
    leaves(bench, "engine/0")
    commands = [command for key in where for command in bench.closed("engine/0", key, HANDED_BACK)]
    assert drive.sent(commands, LeasesAsked) != []
    bench.answer("engine/0", *(HeldLease(key, 0, LeaseStage.HANDED_BACK) for key in where))
    commands = bench.answer("engine/1")  # what was issued to it is on its way still
    commands += [command for name in KEEPERS for command in bench.answer(name)]
    assert drive.sent(commands, EngineEmptied) == [EngineEmptied(engine="engine/0", engine_epoch=0)]


def test_a_leaver_that_turns_out_to_have_a_sample_is_let_go_by_a_later_census() -> None:
    """A new PromptSource hears of the group while the census about the leaver is open."""
    bench = SourceBench(epoch=1).started(num_engines=2)
    running = HeldLease(FIRST, 0, LeaseStage.RUNNING)
    bench.answers(engine_0=(running,))
    assert drive.sent(leaves(bench, "engine/0"), LeasesAsked) != []
    bench.grant(1)
    assert drive.sent(bench.answers(engine_0=(running,)), EngineEmptied) == []
    assert drive.sent(bench.closed("engine/0", FIRST, HANDED_BACK), LeasesAsked) != []


def test_a_new_prompt_source_goes_on_from_what_a_leaver_tells_it() -> None:
    bench = SourceBench(epoch=1)
    bench.started(num_engines=2)
    leaves(bench, "engine/0")
    bench.grant(1)
    handed = HeldLease(FIRST, 3, LeaseStage.HANDED_BACK, 5, drive.part((0, 5)))
    commands = bench.answer("engine/0", handed) + bench.answer("engine/1")
    for name in KEEPERS:
        commands += bench.answer(name)
    issued = {event.key: event for event in drive.sent(commands, SampleIssued)}
    prefix = issued[FIRST].prefix
    assert issued[FIRST].attempt == 4
    assert prefix is not None
    assert prefix.num_tokens == 5


def test_who_comes_when_others_serve_is_issued_nothing_before_it_serves() -> None:
    bench, _ = bench_with(1, num_groups=0)
    bench.serves("engine/0", 0)
    bench.joins("engine/1")
    assert {to for to, _ in sends(bench.grant(60))} == {"engine/0"}
    assert {to for to, _ in sends(bench.serves("engine/1", 0))} == {"engine/1"}
