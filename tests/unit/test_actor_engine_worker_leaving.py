"""The EngineWorker that is to leave: what becomes of what it has."""

from __future__ import annotations

import actor_driver as drive
from engine_bench import EngineBench

from penstock.messages.commands import ApplyWeights, Generate, InterruptGenerations
from penstock.messages.flow import GenerationClosed, GenerationProgressed
from penstock.messages.membership import EngineLeaving, LeaseStage
from penstock.messages.samples import Cancelled
from penstock.messages.training import UpdateMode

LEAVES = EngineLeaving(name="engine/0", epoch=0)


def test_what_waits_is_handed_back_at_once_and_what_runs_when_it_is_broken_off_with_its_last_tokens() -> None:
    bench = EngineBench().serving(num_slots=1)
    bench.issue(0)
    bench.issue(1)
    bench.advance(0, 0, drive.part((0, 4)))
    commands = bench.hear(LEAVES)
    assert InterruptGenerations() in commands
    assert [event.key.group_id for event in drive.sent(commands, GenerationClosed)] == [1]
    commands = bench.interrupted(0, drive.part((0, 7)))
    (told,) = drive.sent(commands, GenerationProgressed)
    (closed,) = drive.sent(commands, GenerationClosed)
    assert (told.from_token, told.num_tokens) == (4, 7)
    assert (closed.outcome, closed.num_tokens) == (Cancelled(cause="handed back"), 7)
    held = {lease.key.group_id: lease for lease in bench.worker.leases()}
    assert {lease.stage for lease in held.values()} == {LeaseStage.HANDED_BACK}
    assert held[0].prefix is not None
    assert held[0].prefix.num_tokens == 7


def test_what_comes_later_is_handed_back_and_no_weights_are_taken() -> None:
    bench = EngineBench().serving(num_slots=2)
    bench.hear(LEAVES)
    commands = bench.issue(0)
    assert drive.every(commands, Generate) == []
    assert [event.key.group_id for event in drive.sent(commands, GenerationClosed)] == [0]
    bench.stage(1)
    assert drive.every(bench.commit(1), ApplyWeights) == []


def test_what_runs_while_weights_are_applied_is_broken_off_after_the_swap() -> None:
    bench = EngineBench().serving(num_slots=2)
    bench.issue(0)
    bench.stage(1)
    bench.commit(1, UpdateMode.IN_FLIGHT)
    assert drive.every(bench.hear(LEAVES), InterruptGenerations) == []
    assert drive.every(bench.swap(), InterruptGenerations) == [InterruptGenerations()]


def test_word_that_another_engine_leaves_changes_nothing() -> None:
    bench = EngineBench().serving(num_slots=2)
    assert bench.hear(EngineLeaving(name="engine/1", epoch=0)) == []
    assert drive.every(bench.issue(0), Generate) != []
