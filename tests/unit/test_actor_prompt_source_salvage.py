"""The PromptSource when tokens are to be saved: what a replacement hears of responses, and samples that stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

import actor_driver as drive
from source_bench import SourceBench, asked, held, keys

from penstock.actors.prompt_source.machine import SWEEP_TIMER
from penstock.messages.base import Metric
from penstock.messages.commands import ReplaceActor
from penstock.messages.flow import GenerationClosed, SampleFailed, SampleIssued, SampleRevoked
from penstock.messages.local import TimerFired
from penstock.messages.membership import HeldLease, LeasesAsked, LeaseStage
from penstock.messages.samples import InfraError, Part, SampleKey
from penstock.messages.training import NoticeGiven

if TYPE_CHECKING:
    from penstock.messages.commands import AnyCommand

FIRST, SECOND = SampleKey(0, 0), SampleKey(0, 1)


def with_prefix(key: SampleKey, prefix: Part, attempt: int = 0) -> HeldLease:
    return HeldLease(key, attempt, LeaseStage.RUNNING, prefix.num_tokens, prefix)


def replaced() -> SourceBench:
    """A PromptSource that has taken another's place, and whose census is open."""
    return SourceBench(epoch=1, num_samples=1).started()


# --- a replacement is told of prefixes ----------------------------------------------------------------------------


def test_only_a_replacement_asks_for_prefixes_and_only_at_first() -> None:
    bench = SourceBench(num_samples=1).started()
    bench.grant(1)
    assert {question.with_prefixes for question in drive.sent(bench.loses("engine/0"), LeasesAsked)} == {False}
    bench = SourceBench(epoch=1)
    bench.returns("buffer")
    assert drive.sent(bench.loses("buffer"), LeasesAsked) == []
    bench.started()
    bench.grant(1)
    assert {question.with_prefixes for question in drive.sent(bench.loses("filter"), LeasesAsked)} == {True}
    bench.returns("filter", epoch=1)
    bench.answers()
    assert {question.with_prefixes for question in drive.sent(bench.loses("filter"), LeasesAsked)} == {False}


def test_what_an_engine_told_a_replacement_goes_on_elsewhere_when_it_dies() -> None:
    bench = replaced()
    bench.grant(1)
    made = drive.part((3, 5), (4, 2))
    bench.answers(engine_0=(with_prefix(FIRST, made, attempt=2),))
    bench.loses("engine/0")
    again = drive.one_sent(bench.answers(), SampleIssued, to="engine/1")
    assert (again.attempt, again.prefix) == (3, made)
    assert bench.source.issuing.num_salvaged_tokens == 7


def test_a_conversation_that_nobody_can_restore_starts_over() -> None:
    bench = SourceBench(num_samples=1, salvages_responses=False).started()
    bench.grant(1)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 5)))
    bench.loses("engine/0")
    again = drive.one_sent(bench.answers(), SampleIssued, to="engine/1")
    assert (again.attempt, again.prefix) == (1, None)
    assert (bench.source.issuing.num_salvaged_tokens, bench.source.issuing.num_lost_tokens) == (0, 5)
    bench.progressed("engine/1", FIRST, 0, drive.part((1, 3)), attempt=1)
    bench.loses("engine/1")
    assert bench.source.issuing.num_salvaged_tokens == 0


def test_reports_between_the_answer_and_the_grant_are_joined_to_the_prefix() -> None:
    bench = replaced()
    whole = drive.part((0, 6))
    bench.answer("engine/0", with_prefix(FIRST, drive.part((0, 2))))
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 2)))  # was on its way before the answer: it is in there
    bench.progressed("engine/0", FIRST, 2, part_of(whole, 2, 4))
    for name in ("scorer", "filter", "buffer", "engine/1"):
        bench.answer(name)
    bench.progressed("engine/0", FIRST, 4, part_of(whole, 4, 6))
    bench.grant(1)
    bench.loses("engine/0")
    assert drive.one_sent(bench.answers(), SampleIssued).prefix == whole


def test_a_later_census_keeps_the_prefix_that_the_first_was_told() -> None:
    bench = replaced()
    bench.answers(engine_0=(with_prefix(FIRST, drive.part((0, 4))),))
    bench.loses("filter")
    bench.returns("filter", epoch=1)
    bench.answers(engine_0=(held(0, 0, num_tokens=4),))
    bench.grant(1)
    bench.loses("engine/0")
    assert drive.one_sent(bench.answers(), SampleIssued).prefix == drive.part((0, 4))


def test_tokens_of_an_earlier_attempt_are_not_joined_to_those_of_a_later_one() -> None:
    bench = SourceBench(num_samples=1).started()
    bench.grant(1)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 5)))
    bench.loses("filter")
    bench.returns("filter", epoch=1)
    bench.answers(engine_0=(held(0, 0, attempt=1),))
    lease = bench.source.table.lease(FIRST)
    assert lease is not None
    assert (lease.attempt, lease.prefix()) == (1, None)


def test_tokens_that_a_failed_attempt_never_reported_are_counted_as_lost() -> None:
    bench = SourceBench(num_samples=1).started()
    bench.grant(1)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 5)))
    error = InfraError(detail="out of memory")
    bench.hear(GenerationClosed(engine="engine/0", key=FIRST, attempt=0, outcome=error, num_tokens=9))
    assert {Metric("prompt_source/lost_tokens", 4), Metric("prompt_source/salvaged_tokens", 5)} <= set(
        bench.source.metrics
    )


# --- samples that stand still -------------------------------------------------------------------------------------


def sweep(bench: SourceBench, **leases: tuple[HeldLease, ...]) -> list[AnyCommand]:
    """The overdue timer runs out; if a census follows, everyone answers."""
    commands = bench.hear(TimerFired(key=SWEEP_TIMER))
    return [*commands, *bench.answers(**leases)] if asked(commands) else commands


def sweeps(bench: SourceBench, num: int, **leases: tuple[HeldLease, ...]) -> list[AnyCommand]:
    return [command for _ in range(num) for command in sweep(bench, **leases)]


def two_on_one_engine() -> SourceBench:
    """Samples 0/0 and 0/1 are on engine/0, the first has made five tokens."""
    bench = SourceBench(num_retries=1).started()
    assert keys(bench.grant(1), "engine/0") == [(0, 0), (0, 1)]
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 5)))
    return bench


def test_a_sample_that_stands_still_beside_others_that_move_goes_on_elsewhere() -> None:
    bench = two_on_one_engine()
    found: list[AnyCommand] = []
    number = 0
    while number < 7 and not drive.sent(found, SampleRevoked):
        number += 1
        bench.progressed("engine/0", SECOND, number - 1, drive.part((0, 1)))
        found = sweep(bench, engine_0=(held(0, 0, num_tokens=5), held(0, 1, num_tokens=number)))
    assert drive.sent(found, SampleRevoked, to="engine/0") == [SampleRevoked(key=FIRST, attempt=0)]
    again = drive.one_sent(found, SampleIssued, to="engine/1")
    assert (again.key, again.attempt, again.prefix) == (FIRST, 1, drive.part((0, 5)))
    text = "1 sample of engine/0 stood still and goes on elsewhere, 5 tokens saved"
    assert drive.one_sent(found, NoticeGiven).text == text
    assert number == 4, "two sweeps until a census looks, two more until it is sure"


def test_a_sample_whose_revocation_and_next_attempt_are_lost_is_revoked_and_issued_again() -> None:
    bench = two_on_one_engine()
    found: list[AnyCommand] = []
    for number in range(1, 5):
        bench.progressed("engine/0", SECOND, number - 1, drive.part((0, 1)))
        found = sweep(bench, engine_0=(held(0, 0, num_tokens=5), held(0, 1, num_tokens=number)))
    assert drive.one_sent(found, SampleIssued, to="engine/1").attempt == 1
    bench.closed("engine/0", SECOND)
    left = (held(0, 1, LeaseStage.PASSED_ON),)
    found = sweeps(bench, 2, engine_0=(held(0, 0, num_tokens=5),), scorer=left)
    assert drive.one_sent(found, SampleRevoked, to="engine/0") == SampleRevoked(key=FIRST, attempt=0)
    found = sweeps(bench, 2, engine_0=(held(0, 0, LeaseStage.FAILED, num_tokens=5),), scorer=left)
    again = drive.one_sent(found, SampleIssued, to="engine/1")
    assert (again.key, again.attempt, again.prefix) == (FIRST, 2, drive.part((0, 5)))
    assert drive.sent(found, SampleRevoked) == []


def test_an_engine_keeps_no_slot_for_what_goes_on_elsewhere_or_was_given_up() -> None:
    """Others may wait for that slot, and the settlement of its group for them."""
    bench = SourceBench(num_samples=3, num_retries=0).started()
    bench.grant(1)
    bench.failed("engine/0", FIRST)
    bench.loses("scorer")
    bench.returns("scorer", epoch=1)
    found = bench.answers(
        engine_0=(held(0, 0), held(0, 1), held(0, 2, LeaseStage.WAITING)),
        engine_1=(held(0, 1, LeaseStage.WAITING, attempt=1),),
        scorer=(held(0, 0, LeaseStage.PASSED_ON),),
    )
    revoked = [SampleRevoked(key=FIRST, attempt=0), SampleRevoked(key=SECOND, attempt=0)]
    assert drive.sent(found, SampleRevoked) == drive.sent(found, SampleRevoked, to="engine/0") == revoked


def test_a_census_that_takes_longer_than_a_sweep_is_not_begun_again_by_the_next_one() -> None:
    bench = two_on_one_engine()
    begun = [bench.hear(TimerFired(key=SWEEP_TIMER)) for _ in range(4)]
    assert [bool(asked(commands)) for commands in begun] == [False, True, False, False]
    (round_of,) = {question.round for question in drive.sent(begun[1], LeasesAsked)}
    bench.answers(engine_0=(held(0, 0), held(0, 1)))
    assert bench.source.census.round == round_of
    assert not bench.source.census.is_open


def part_of(whole: Part, begin: int, end: int) -> Part:
    """Some of the tokens of a part that one version made."""
    made = drive.part((whole.spans[0].version, end - begin))
    return Part(
        tokens=whole.tokens[4 * begin : 4 * end], logprobs=whole.logprobs[4 * begin : 4 * end], spans=made.spans
    )


def test_an_engine_on_which_nothing_moves_is_replaced() -> None:
    bench = two_on_one_engine()
    found = sweeps(bench, 4, engine_0=(held(0, 0, num_tokens=5), held(0, 1)))
    assert drive.every(found, ReplaceActor) == [ReplaceActor("engine/0", 0, "no progress on 2 samples for 600 s")]
    assert not drive.sent(found, SampleRevoked)


def test_tokens_that_were_not_reported_are_progress_too() -> None:
    bench = two_on_one_engine()
    for num_tokens in range(6, 20):
        found = sweep(bench, engine_0=(held(0, 0, num_tokens=num_tokens), held(0, 1, num_tokens=num_tokens)))
        assert not drive.every(found, ReplaceActor)


def test_samples_that_wait_for_weights_do_not_stand_still() -> None:
    bench = two_on_one_engine()
    waiting = (held(0, 0, LeaseStage.WAITING, num_tokens=5), held(0, 1, LeaseStage.WAITING))
    found = sweeps(bench, 12, engine_0=waiting)
    assert not drive.every(found, ReplaceActor)
    assert not drive.sent(found, SampleRevoked)


def test_a_sample_that_ran_before_it_waited_for_weights_does_not_stand_still() -> None:
    bench = two_on_one_engine()
    sweeps(bench, 2, engine_0=(held(0, 0, num_tokens=5), held(0, 1)))
    waiting = (held(0, 0, LeaseStage.WAITING, num_tokens=5), held(0, 1, LeaseStage.WAITING))
    assert not drive.every(sweeps(bench, 6, engine_0=waiting), ReplaceActor)


def test_an_engine_whose_requests_end_moves_although_none_of_their_tokens_is_reported() -> None:
    bench = SourceBench(num_samples=1).started(num_engines=1)
    bench.grant(9)
    found: list[AnyCommand] = []
    for number in range(1, 6):
        bench.closed("engine/0", SampleKey(number, 0))
        left = tuple(held(each, 0, LeaseStage.PASSED_ON) for each in range(1, number + 1))
        running = tuple(held(each, 0) for each in (0, *range(number + 1, 9)))
        found += sweep(bench, engine_0=running, scorer=left)
    assert not drive.every(found, ReplaceActor)
    assert FIRST in [revoked.key for revoked in drive.sent(found, SampleRevoked)]


def test_a_sample_that_always_stands_still_spends_its_retries() -> None:
    bench = SourceBench(num_samples=1, num_retries=1).started(num_engines=1)
    bench.grant(2)
    num_issues = 1
    failed: list[SampleFailed] = []
    for tokens in range(1, 20):
        bench.progressed("engine/0", SampleKey(1, 0), tokens - 1, drive.part((0, 1)))
        attempt = num_issues - 1
        found = sweep(bench, engine_0=(held(0, 0, attempt=attempt), held(1, 0, num_tokens=tokens)))
        num_issues += len(drive.sent(found, SampleIssued))
        failed += drive.sent(found, SampleFailed)
        if failed:
            break
    assert num_issues == 2
    assert [(f.key, f.reason) for f in failed] == [(FIRST, "no progress for 600 s (2 attempts)")]
