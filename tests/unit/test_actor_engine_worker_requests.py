"""The EngineWorker and its requests: slots, versions, attempts, settlements."""

from __future__ import annotations

import actor_driver as drive
import pytest
from engine_bench import EngineBench, issued, submitted

from penstock.messages.commands import AbortGeneration, Generate, OpenEngine, Send
from penstock.messages.flow import (
    GenerationClosed,
    GenerationProgressed,
    SampleGenerated,
    SampleRevoked,
    SamplesSettled,
    SettledState,
)
from penstock.messages.local import EngineOpened, EpisodeMoved, GenerationAdvanced, GenerationEnded, Started
from penstock.messages.membership import EngineNoticed, HeldLease, LeaseStage
from penstock.messages.parts import join
from penstock.messages.samples import Cancelled, Completed, InfraError, Part, PolicyError, Purpose, SampleKey, Truncated
from penstock.messages.training import Activity, NoticeGiven, UpdateMode
from penstock.messages.weights import EngineReady

FIRST = SampleKey(0, 0)


def settled(sequence: int, floor: int, *above: int) -> SamplesSettled:
    return SamplesSettled(settled=SettledState(sequence, floor, above))


# --- start --------------------------------------------------------------------------------------------------------


def test_an_engine_that_is_open_says_so_to_those_who_use_it() -> None:
    bench = EngineBench(epoch=3)
    assert bench.hear(Started(epoch=3)) == [OpenEngine()]
    commands = bench.hear(EngineOpened(num_slots=5))
    ready = EngineReady(engine="engine/0", engine_epoch=3, num_slots=5)
    assert drive.sent(commands, EngineReady, to="prompt_source") == [ready]
    assert drive.sent(commands, EngineReady, to="weight_publisher") == [ready]
    bench.driver.ignores(EngineOpened(num_slots=7))


def test_how_an_engine_came_up_is_told_to_people_and_to_the_ledger() -> None:
    bench = EngineBench(epoch=3)
    bench.hear(Started(epoch=3))
    commands = bench.hear(EngineOpened(num_slots=5, notices=("has taken over its running server",)))
    text = "has taken over its running server"
    assert drive.sent(commands, NoticeGiven, to="supervisor") == [NoticeGiven(name="engine/0", text=text)]
    told = EngineNoticed(engine="engine/0", engine_epoch=3, text=text)
    assert drive.sent(commands, EngineNoticed, to="buffer") == [told]


def test_requests_wait_until_there_are_weights() -> None:
    bench = EngineBench().opened()
    assert bench.issue(0) == []
    assert bench.activity() is Activity.WAITING_FOR_WEIGHTS
    bench.stage(0)
    bench.commit(0)
    assert submitted(bench.swap()) == [0]
    assert bench.activity() is Activity.WORKING


# --- slots and versions -------------------------------------------------------------------------------------------


def test_not_more_requests_than_slots_are_submitted_and_the_others_follow_in_order() -> None:
    bench = EngineBench().serving(num_slots=2)
    assert submitted([c for group_id in range(4) for c in bench.issue(group_id)]) == [0, 1]
    assert bench.worker.occupancy == 1.0
    assert submitted(bench.end(1)) == [2]
    assert submitted(bench.end(0)) == [3]
    assert submitted(bench.end(2)) == []
    assert bench.worker.occupancy == 0.5


def moved(num_outside: int) -> EpisodeMoved:
    return EpisodeMoved(key=FIRST, attempt=0, num_outside=num_outside)


def test_an_engine_whose_episodes_all_wait_for_tools_says_so_and_has_no_other_cause() -> None:
    bench = EngineBench().serving(num_slots=4)
    for group_id in range(2):
        bench.issue(group_id)
    assert (bench.activity(), bench.worker.occupancy, bench.worker.outside) == (Activity.WORKING, 0.5, 0.0)
    assert bench.hear(moved(1)) == []
    assert (bench.activity(), bench.worker.occupancy, bench.worker.outside) == (Activity.WORKING, 0.25, 0.25)
    bench.hear(moved(2))
    assert (bench.activity(), bench.worker.occupancy, bench.worker.outside) == (Activity.WAITING_FOR_TOOLS, 0.0, 0.5)
    bench.end(1)
    assert (bench.activity(), bench.worker.outside) == (Activity.WAITING_FOR_TOOLS, 0.25)
    bench.hear(moved(0))
    assert bench.activity() is Activity.WORKING
    bench.end(0)
    assert bench.activity() is Activity.WAITING_FOR_DEMAND


def test_an_engine_that_waits_for_tools_before_a_swap_waits_for_tools() -> None:
    bench = EngineBench().serving()
    bench.issue(0)
    bench.hear(moved(1))
    bench.stage(1)
    bench.commit(1, UpdateMode.DRAIN)
    assert bench.activity() is Activity.WAITING_FOR_TOOLS
    bench.end(0)
    assert bench.activity() is Activity.APPLYING_WEIGHTS


def test_a_request_is_given_to_the_engine_as_it_was_issued() -> None:
    bench = EngineBench().serving()
    event = issued(0, attempt=3, prefix=drive.part((0, 2)))
    assert bench.hear(event) == [
        Generate(
            key=FIRST,
            attempt=3,
            purpose=Purpose.TRAIN,
            prompt=event.prompt,
            seed=99,
            deadline_version=2,
            prefix=drive.part((0, 2)),
        )
    ]


def test_a_request_waits_for_its_version_and_holds_up_nobody() -> None:
    bench = EngineBench().serving(publish=1)
    assert submitted(bench.issue(0, min_version=2)) == []
    assert submitted(bench.issue(1, min_version=1)) == [1]
    bench.stage(2)
    bench.commit(2)
    assert submitted(bench.swap()) == [0]


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [Completed(), Truncated(), PolicyError(detail="malformed tool call")])
def test_what_the_model_is_responsible_for_goes_to_the_scorer(outcome: Completed | Truncated | PolicyError) -> None:
    bench = EngineBench().serving()
    bench.issue(0, attempt=2)
    commands = bench.end(0, drive.part((0, 3), (1, 1)), outcome, attempt=2)
    generated = drive.one_sent(commands, SampleGenerated, to="scorer")
    assert (generated.sample.key, generated.sample.attempt, generated.sample.engine) == (FIRST, 2, "engine/0")
    assert generated.sample.parts == (drive.part((0, 3), (1, 1)),)
    assert generated.sample.outcome == outcome
    assert (generated.group_size, generated.prompt) == (2, drive.prompt(0))
    closed = drive.one_sent(commands, GenerationClosed, to="prompt_source")
    assert (closed.key, closed.attempt, closed.outcome, closed.num_tokens) == (FIRST, 2, outcome, 4)


def test_the_sample_is_sent_before_the_word_that_it_has_left() -> None:
    bench = EngineBench().serving()
    bench.issue(0)
    sends = drive.every(bench.end(0), Send)
    assert [type(send.event) for send in sends] == [SampleGenerated, GenerationClosed]


def test_what_we_are_responsible_for_goes_back_and_is_kept_as_failed() -> None:
    bench = EngineBench().serving()
    bench.issue(0)
    commands = bench.fail(0)
    assert drive.sent(commands, SampleGenerated) == []
    closed = drive.one_sent(commands, GenerationClosed)
    assert closed.outcome == InfraError(detail="out of memory")
    assert bench.worker.leases() == (HeldLease(FIRST, 0, LeaseStage.FAILED, 2),)


def test_progress_is_reported_with_a_running_total() -> None:
    bench = EngineBench().serving()
    bench.issue(0)
    assert drive.one_sent(bench.advance(0, 0, drive.part((0, 64))), GenerationProgressed).num_tokens == 64
    report = drive.one_sent(bench.advance(0, 64, drive.part((0, 10))), GenerationProgressed, to="prompt_source")
    assert (report.from_token, report.num_tokens, report.chunk) == (64, 74, drive.part((0, 10)))
    assert [(lease.key, lease.num_tokens) for lease in bench.worker.leases()] == [(FIRST, 74)]


def test_what_an_engine_says_of_a_request_that_is_not_here_changes_nothing() -> None:
    bench = EngineBench().serving()
    bench.driver.ignores(GenerationEnded(key=FIRST, attempt=0, outcome=Completed(), part=drive.part((0, 1))))
    bench.issue(0, attempt=1)
    bench.driver.ignores(GenerationEnded(key=FIRST, attempt=0, outcome=Completed(), part=drive.part((0, 1))))
    bench.driver.ignores(GenerationAdvanced(key=FIRST, attempt=0, from_token=0, chunk=drive.part((0, 1))))


# --- attempts -----------------------------------------------------------------------------------------------------


def test_a_later_attempt_replaces_the_one_that_runs() -> None:
    bench = EngineBench().serving(num_slots=1)
    bench.issue(0)
    commands = bench.issue(0, attempt=1, prefix=drive.part((0, 2)))
    assert commands[0] == AbortGeneration(FIRST, 0)
    assert [generate.attempt for generate in drive.every(commands, Generate)] == [1]
    assert drive.sent(bench.end(0, attempt=0), SampleGenerated) == []
    assert drive.one_sent(bench.end(0, attempt=1), SampleGenerated).sample.attempt == 1


def test_a_later_attempt_replaces_one_that_waits() -> None:
    bench = EngineBench().opened()
    bench.issue(0)
    assert bench.issue(0, attempt=1) == []
    assert bench.worker.leases() == (HeldLease(FIRST, 1, LeaseStage.WAITING, 0),)


def test_an_attempt_that_is_here_or_was_before_changes_nothing() -> None:
    bench = EngineBench().serving()
    bench.issue(0, attempt=1)
    bench.driver.ignores(issued(0, attempt=1))
    bench.driver.ignores(issued(0, attempt=0))


def test_an_attempt_that_is_over_is_not_begun_again() -> None:
    """A message that comes twice must not make the engine generate what it has passed on, or has failed at."""
    bench = EngineBench().serving()
    bench.issue(0)
    bench.end(0)
    bench.driver.ignores(issued(0))
    bench.issue(1)
    bench.fail(1)
    bench.driver.ignores(issued(1))
    assert submitted(bench.issue(1, attempt=1)) == [1]
    assert bench.worker.leases() == (HeldLease(SampleKey(1, 0), 1, LeaseStage.RUNNING, 0),)


# --- settlements --------------------------------------------------------------------------------------------------


def test_settled_requests_are_aborted_and_their_slots_are_free() -> None:
    bench = EngineBench().serving(num_slots=1)
    bench.issue(0)
    bench.issue(1)
    bench.issue(2)
    commands = bench.hear(settled(1, 1, 2))
    assert commands[0] == AbortGeneration(FIRST, 0)
    assert submitted(commands) == [1]
    assert [lease.key.group_id for lease in bench.worker.leases()] == [1]


def test_what_arrives_of_a_settled_group_is_not_begun() -> None:
    bench = EngineBench().serving()
    bench.hear(settled(1, 1, 3))
    bench.driver.ignores(issued(0))
    bench.driver.ignores(issued(3))
    assert submitted(bench.issue(2)) == [2]


def test_an_older_settlement_changes_nothing() -> None:
    bench = EngineBench().serving()
    bench.hear(settled(5, 3))
    bench.driver.ignores(settled(4, 1))
    bench.driver.ignores(issued(2))


def test_nothing_is_remembered_of_settled_groups() -> None:
    fresh, used = EngineBench().serving(num_slots=9), EngineBench().serving(num_slots=9)
    for group_id in range(6):
        used.issue(group_id)
    used.end(0)
    used.fail(1)
    used.hear(settled(1, 6))
    fresh.hear(settled(1, 6))
    assert drive.snapshot(used.worker) == drive.snapshot(fresh.worker)


def test_the_census_hears_of_what_waits_runs_and_failed() -> None:
    bench = EngineBench().serving(num_slots=1)
    bench.issue(0)
    bench.fail(0)
    bench.issue(1, attempt=2)
    bench.issue(2, prefix=drive.part((0, 6)))
    assert set(bench.worker.leases()) == {
        HeldLease(SampleKey(0, 0), 0, LeaseStage.FAILED, 2),
        HeldLease(SampleKey(1, 0), 2, LeaseStage.RUNNING, 0),
        HeldLease(SampleKey(2, 0), 0, LeaseStage.WAITING, 6, drive.part((0, 6))),
    }


# --- what is known of responses -----------------------------------------------------------------------------------


def prefixes(bench: EngineBench) -> dict[int, Part | None]:
    return {lease.key.group_id: lease.prefix for lease in bench.worker.leases()}


def test_the_census_hears_what_was_reported_of_each_response() -> None:
    bench = EngineBench().serving(num_slots=1)
    bench.issue(0)
    bench.issue(1, prefix=drive.part((0, 3)))
    bench.issue(2)
    bench.advance(0, 0, drive.part((0, 2)))
    assert prefixes(bench) == {0: drive.part((0, 2)), 1: drive.part((0, 3)), 2: None}
    bench.advance(0, 2, drive.part((0, 1)))
    assert [lease.num_tokens for lease in bench.worker.leases()] == [3, 3, 0]
    assert prefixes(bench)[0] == join([drive.part((0, 2)), drive.part((0, 1))])


def test_a_response_that_was_interrupted_is_known_with_the_versions_that_made_it() -> None:
    bench = EngineBench().serving()
    bench.issue(0)
    bench.advance(0, 0, drive.part((0, 2)))
    bench.stage(1)
    bench.commit(1, UpdateMode.INTERRUPT)
    bench.interrupted(0, drive.part((0, 5)))
    bench.swap()
    assert prefixes(bench)[0] == drive.part((0, 5))
    bench.advance(0, 5, drive.part((1, 4)))
    assert prefixes(bench) == {0: join([drive.part((0, 5)), drive.part((1, 4))])}


def test_what_stands_still_while_weights_are_swapped_is_said_to_wait() -> None:
    bench = EngineBench().serving()
    bench.issue(0)
    bench.stage(1)
    bench.commit(1, UpdateMode.IN_FLIGHT)
    assert [lease.stage for lease in bench.worker.leases()] == [LeaseStage.WAITING]
    bench.swap()
    assert [lease.stage for lease in bench.worker.leases()] == [LeaseStage.RUNNING]


def test_an_attempt_that_is_revoked_is_aborted_and_gives_its_place_to_the_next() -> None:
    bench = EngineBench().serving(num_slots=1)
    bench.issue(0)
    bench.issue(1)
    commands = bench.hear(SampleRevoked(key=SampleKey(0, 0), attempt=0))
    assert drive.one(commands, AbortGeneration) == AbortGeneration(SampleKey(0, 0), 0)
    assert submitted(commands) == [1]
    bench.driver.ignores(issued(0))
    assert (
        submitted(
            bench.hear(
                GenerationEnded(
                    key=SampleKey(0, 0), attempt=0, outcome=Cancelled(cause="aborted"), part=drive.part((0, 4))
                )
            )
        )
        == []
    )
    assert {lease.key.group_id: lease.stage for lease in bench.worker.leases()} == {
        0: LeaseStage.FAILED,
        1: LeaseStage.RUNNING,
    }


def test_a_revocation_of_an_attempt_that_is_not_here_changes_nothing() -> None:
    bench = EngineBench().serving()
    bench.issue(0, attempt=1)
    bench.driver.ignores(SampleRevoked(key=SampleKey(0, 0), attempt=0))
    bench.driver.ignores(SampleRevoked(key=SampleKey(7, 0), attempt=0))
