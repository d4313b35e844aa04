"""The PromptSource after a loss: who is asked, when the answers may be judged, and what is issued again."""

from __future__ import annotations

import actor_driver as drive
import pytest
from source_bench import KEEPERS, SourceBench, asked, held, keys

from penstock.actors.prompt_source.machine import CENSUS_TIMER, SWEEP_TIMER
from penstock.messages.commands import StartTimer
from penstock.messages.flow import (
    DemandGranted,
    GenerationClosed,
    GrantSpan,
    RefillAsked,
    SampleFailed,
    SampleIssued,
    SamplesSettled,
    SettledState,
)
from penstock.messages.local import FetchedPrompt, PromptsFetched, Started, TimerFired
from penstock.messages.membership import (
    ActorEpoch,
    ActorLost,
    ActorReturned,
    EngineLost,
    LeasesAsked,
    LeaseStage,
    LineRestored,
)
from penstock.messages.samples import InfraError, SampleKey
from penstock.messages.training import NoticeGiven

FIRST, SECOND = SampleKey(0, 0), SampleKey(0, 1)


def lost_engine(num_retries: int = 1, max_engine_losses: int = 2) -> SourceBench:
    """Group 0 is on engine/0, which has just died; its census is open."""
    bench = SourceBench(num_retries=num_retries, max_engine_losses=max_engine_losses).started()
    assert keys(bench.grant(1), "engine/0") == [(0, 0), (0, 1)]
    bench.loses("engine/0")
    return bench


# --- asking -------------------------------------------------------------------------------------------------------


def test_after_the_loss_of_an_engine_every_keeper_and_every_other_engine_is_asked() -> None:
    bench = SourceBench().started()
    bench.grant(1)
    commands = bench.loses("engine/0")
    assert sorted(asked(commands)) == ["buffer", "engine/1", "filter", "scorer"]
    question = drive.sent(commands, LeasesAsked, to="filter")[0]
    assert question.round == 1
    assert set(question.members) == {ActorEpoch(name, 0) for name in (*KEEPERS, "engine/1")}
    assert drive.one(commands, StartTimer) == StartTimer(CENSUS_TIMER, 2.0)


@pytest.mark.parametrize("name", KEEPERS)
def test_after_the_loss_of_a_keeper_a_census_is_taken(name: str) -> None:
    assert name not in asked(SourceBench().started().loses(name))
    assert len(asked(SourceBench().started().loses(name))) == 4


@pytest.mark.parametrize("name", ["learner", "weight_publisher"])
def test_the_loss_of_one_that_keeps_no_samples_needs_no_census(name: str) -> None:
    bench = SourceBench().started()
    bench.returns(name)
    assert bench.loses(name) == []


def test_the_loss_of_an_incarnation_that_is_not_there_changes_nothing() -> None:
    bench = SourceBench().started()
    bench.joins("engine/0", epoch=1)
    bench.driver.ignores(EngineLost(name="engine/0", epoch=0))
    bench.driver.ignores(ActorLost(name="scorer", epoch=4))
    bench.driver.ignores(ActorReturned(name="scorer", epoch=0))


def test_the_silent_are_asked_again() -> None:
    bench = lost_engine()
    bench.answer("scorer")
    bench.answer("engine/1")
    assert sorted(asked(bench.hear(TimerFired(key=CENSUS_TIMER)))) == ["buffer", "filter"]


def test_nobody_is_asked_again_when_the_census_is_over() -> None:
    bench = lost_engine()
    bench.answers()
    assert bench.hear(TimerFired(key=CENSUS_TIMER)) == []


def test_a_loss_restarts_the_round() -> None:
    bench = lost_engine()
    bench.answer("scorer")
    commands = bench.loses("filter")
    assert sorted(asked(commands)) == ["buffer", "engine/1", "scorer"]
    assert drive.sent(commands, LeasesAsked)[0].round == 2
    bench.returns("filter", epoch=1)
    bench.answer("scorer", census_round=1)
    bench.answer("engine/1")
    bench.answer("buffer")
    assert keys(bench.answer("filter")) == [], "the Scorer's answer to the first round does not count in the second"
    assert keys(bench.answer("scorer")) == [(0, 0), (0, 1)]


def test_a_keeper_that_returns_meanwhile_is_asked_too() -> None:
    bench = lost_engine()
    for name in (*KEEPERS, "engine/1"):
        if name != "filter":
            bench.answer(name)
    bench.loses("filter")
    for name in ("scorer", "buffer", "engine/1"):
        bench.answer(name)
    assert "filter" in asked(bench.returns("filter", epoch=1))
    assert keys(bench.answer("filter")) == [(0, 0), (0, 1)]


def test_an_engine_that_joins_meanwhile_is_asked_too() -> None:
    bench = lost_engine()
    bench.answer("scorer")
    assert "engine/0" in asked(bench.joins("engine/0", epoch=1))
    for name in ("filter", "buffer", "engine/1"):
        assert keys(bench.answer(name)) == []
    assert keys(bench.answer("engine/0")) != []


@pytest.mark.parametrize("name", KEEPERS)
def test_a_keeper_that_is_lost_is_waited_for(name: str) -> None:
    bench = lost_engine()
    bench.loses(name)
    bench.answers()
    assert bench.source.census.is_open
    bench.returns(name, epoch=1)
    assert keys(bench.answer(name)) == [(0, 0), (0, 1)]


# --- judging ------------------------------------------------------------------------------------------------------


def test_what_nobody_holds_is_issued_again_with_its_prefix() -> None:
    bench = SourceBench().started()
    bench.grant(1)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 5)))
    bench.loses("engine/0")
    commands = bench.answers()
    issued = drive.sent(commands, SampleIssued, to="engine/1")
    assert [(s.key, s.attempt, s.prefix) for s in issued] == [(FIRST, 1, drive.part((0, 5))), (SECOND, 1, None)]
    assert drive.one_sent(commands, NoticeGiven).text == "2 samples of engine/0 go on elsewhere, 5 tokens saved"
    assert (bench.source.issuing.num_reissued, bench.source.issuing.num_salvaged_tokens) == (2, 5)


def test_what_is_issued_again_goes_before_what_was_never_issued_and_in_order() -> None:
    bench = SourceBench(num_samples=1, max_load=9.0).started(num_engines=2, num_slots=1)
    bench.grant(30)
    bench.loses("engine/0")
    on_the_other = tuple(held(group_id, 0) for group_id in range(1, 18, 2))
    assert keys(bench.answers(engine_1=on_the_other)) == []
    # No more are new: fewer would wait behind them than the other engine starts meanwhile.
    lost, new = [(group_id, 0) for group_id in range(0, 18, 2)], [(group_id, 0) for group_id in range(18, 23)]
    assert keys(bench.joins("engine/0", epoch=1, num_slots=2)) == [*lost, *new]


def test_what_somebody_holds_is_not_issued_again() -> None:
    bench = lost_engine()
    commands = bench.answers(scorer=(held(0, 0, LeaseStage.RUNNING),), buffer=(held(0, 1, LeaseStage.PASSED_ON),))
    assert keys(commands) == []


def test_what_is_settled_is_not_issued_again() -> None:
    """The keepers have forgotten it, and our own notice is still on its way: the answers say how much they know."""
    bench = lost_engine()
    for name in ("scorer", "filter", "engine/1"):
        bench.answer(name)
    assert keys(bench.answer("buffer", sequence=1)) == []
    assert bench.source.census.is_open
    assert keys(bench.hear(SamplesSettled(settled=SettledState(1, 1, ())))) == []
    assert not bench.source.census.is_open


def test_the_highest_settled_sequence_among_the_answers_counts() -> None:
    bench = lost_engine()
    for name, sequence in (("scorer", 3), ("filter", 0), ("engine/1", 1), ("buffer", 2)):
        assert keys(bench.answer(name, sequence=sequence)) == []
    assert keys(bench.hear(SamplesSettled(settled=SettledState(2, 0, ())))) == []
    assert keys(bench.hear(SamplesSettled(settled=SettledState(3, 0, ())))) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    "wrong", [{"census_round": 0}, {"census_round": 2}, {"epoch": 1}, {"asker_epoch": 1}, {"asker_epoch": -1}]
)
def test_an_answer_to_another_round_or_between_other_incarnations_does_not_count(wrong: dict[str, int]) -> None:
    bench = lost_engine()
    for name in ("scorer", "filter", "engine/1"):
        bench.answer(name)
    assert keys(bench.answer("buffer", **wrong)) == []
    assert bench.source.census.is_open


def test_an_answer_of_one_that_was_not_asked_does_not_count() -> None:
    bench = lost_engine()
    assert keys(bench.answer("engine/0", held(0, 0))) == []
    assert keys(bench.answers()) == [(0, 0), (0, 1)]


def test_what_was_issued_during_the_round_is_not_judged_by_it() -> None:
    bench = lost_engine()
    assert keys(bench.grant(2)) == [(1, 0), (1, 1)]
    assert keys(bench.answers()) == [(0, 0), (0, 1)]


def test_an_attempt_that_somebody_knows_of_is_adopted() -> None:
    """A later failure names it, and must not be taken for an old one."""
    bench = lost_engine(num_retries=2)
    bench.answers(engine_1=(held(0, 0, attempt=1),), filter=(held(0, 1, LeaseStage.PASSED_ON),))
    assert keys(bench.failed("engine/1", FIRST, attempt=0)) == []
    assert keys(bench.failed("engine/1", FIRST, attempt=1)) == [(0, 0)]


def test_a_failure_that_was_not_heard_of_is_found_by_the_census() -> None:
    bench = SourceBench().started()
    bench.grant(1)
    bench.loses("scorer")
    bench.returns("scorer", epoch=1)
    commands = bench.answers(engine_0=(held(0, 0, LeaseStage.FAILED), held(0, 1)))
    assert [(s.key, s.attempt) for s in drive.sent(commands, SampleIssued)] == [(FIRST, 1)]


def test_a_failure_of_what_was_thought_to_have_left_its_engine_is_found_by_the_census() -> None:
    """Nobody holds the sample, and the record of its failure says that nobody ever will."""
    bench = SourceBench().started()
    bench.grant(1)
    bench.closed("engine/0", FIRST)
    bench.loses("scorer")
    bench.returns("scorer", epoch=1)
    commands = bench.answers(engine_0=(held(0, 0, LeaseStage.FAILED), held(0, 1)))
    assert [(s.key, s.attempt) for s in drive.sent(commands, SampleIssued)] == [(FIRST, 1)]


def test_what_failed_at_once_sends_the_others_of_its_group_elsewhere_too() -> None:
    bench = SourceBench().started()
    assert keys(bench.grant(2), "engine/1") == [(1, 0), (1, 1)]
    for index in (0, 1):
        bench.closed("engine/0", SampleKey(0, index))
    bench.loses("filter")
    bench.returns("filter", epoch=1)
    left = (held(0, 0, LeaseStage.PASSED_ON), held(0, 1, LeaseStage.PASSED_ON))
    commands = bench.answers(scorer=left, engine_1=(held(1, 0, LeaseStage.FAILED),))
    assert keys(commands, "engine/0") == [(1, 1), (1, 0)], "1/1 was lost, and 1/0 failed without a token"


def test_a_sample_of_which_the_scorer_holds_an_earlier_attempt_is_not_issued_again() -> None:
    bench = lost_engine()
    assert FIRST in [s.key for s in drive.sent(bench.answers(), SampleIssued, to="engine/1")]
    bench.joins("engine/0", epoch=1)
    bench.loses("engine/1")
    assert keys(bench.answers(scorer=(held(0, 0, LeaseStage.PASSED_ON),))) == [(0, 1)]


def test_a_failure_of_a_later_attempt_than_is_known_here_is_followed_by_one_that_is_later_still() -> None:
    bench = SourceBench(num_retries=1).started()
    bench.grant(1)
    assert drive.one_sent(bench.failed("engine/0", FIRST, attempt=2), SampleIssued).attempt == 3


def test_a_sample_that_has_just_left_its_engine_is_not_looked_for() -> None:
    bench = SourceBench(num_samples=1).started()
    bench.grant(1)
    bench.hear(TimerFired(key=SWEEP_TIMER))
    bench.closed("engine/0", FIRST)
    assert asked(bench.hear(TimerFired(key=SWEEP_TIMER))) == []


def test_the_record_of_an_attempt_that_failed_before_is_no_holding() -> None:
    """Attempt 0 failed on engine/0, which remembers it; attempt 1 went down with engine/1."""
    bench = SourceBench(num_samples=1).started()
    bench.grant(1)
    bench.loses("engine/1")
    bench.answers(engine_0=(held(0, 0),))
    bench.joins("engine/1", epoch=1)
    bench.joins("engine/2")
    failed = InfraError(detail="out of memory")  # before its first token, so that it does not go on where its cache is
    issued = bench.hear(GenerationClosed(engine="engine/0", key=FIRST, attempt=0, outcome=failed, num_tokens=0))
    (target,) = (name for name in ("engine/1", "engine/2") if keys(issued, name))
    bench.loses(target)
    commands = bench.answers(engine_0=(held(0, 0, LeaseStage.FAILED),))
    assert [(s.key, s.attempt) for s in drive.sent(commands, SampleIssued)] == [(FIRST, 2)]


def test_of_several_holders_the_latest_attempt_counts() -> None:
    bench = SourceBench(num_retries=5).started()
    bench.grant(1)
    bench.loses("scorer")
    bench.returns("scorer", epoch=1)
    bench.answers(engine_0=(held(0, 0, attempt=1), held(0, 1)), engine_1=(held(0, 0, attempt=2),))
    lease = bench.source.table.lease(FIRST)
    assert lease is not None
    assert (lease.attempt, lease.engine) == (2, "engine/1")


def test_what_left_its_engine_after_the_answer_stays_left() -> None:
    """The engine answered that it runs; before the last answer came, it said that it is done."""
    bench = SourceBench().started()
    bench.grant(1)
    bench.loses("scorer")
    bench.answer("engine/0", held(0, 0), held(0, 1))
    bench.answer("engine/1")
    bench.closed("engine/0", FIRST)
    bench.returns("scorer", epoch=1)
    for name in KEEPERS:
        bench.answer(name)
    lease = bench.source.table.lease(FIRST)
    assert lease is not None
    assert (lease.engine, bench.source.table.router.engines["engine/0"].load) == ("", 1)


def test_a_sample_that_left_its_engine_and_that_nobody_holds_is_issued_again() -> None:
    bench = SourceBench().started()
    bench.grant(1)
    bench.progressed("engine/0", FIRST, 0, drive.part((0, 4)))
    bench.closed("engine/0", FIRST)
    bench.loses("engine/0")
    commands = bench.answers()
    assert keys(commands) == [(0, 0), (0, 1)]
    assert drive.sent(commands, SampleIssued)[0].prefix is None, "it had come to its end, and nothing follows on that"


def test_a_sample_that_a_census_finds_at_an_engine_while_it_waits_here_is_not_issued_as_well() -> None:
    """A predecessor issued it, and that was on its way when the engine answered the first census."""
    bench = SourceBench(num_samples=3, max_load=1.0).started(num_engines=1, num_slots=2)
    assert keys(bench.grant(1)) == [(0, 0), (0, 1)]
    bench.loses("scorer")
    bench.returns("scorer", epoch=1)
    bench.answers(engine_0=(held(0, 0), held(0, 1), held(0, 2)))
    assert keys([*bench.closed("engine/0", FIRST), *bench.closed("engine/0", SampleKey(0, 1))]) == []


def test_a_sample_that_an_engine_has_finished_while_it_waits_here_is_not_issued() -> None:
    bench = SourceBench(max_load=1.0).started(num_engines=1, num_slots=1)
    assert keys(bench.grant(1)) == [(0, 0)]
    bench.closed("engine/0", SampleKey(0, 1))
    assert keys(bench.closed("engine/0", FIRST)) == []


@pytest.mark.parametrize(
    ("holder", "stage"),
    [("scorer", LeaseStage.RUNNING), ("filter", LeaseStage.PASSED_ON), ("engine_0", LeaseStage.PASSED_ON)],
)
def test_an_engine_has_room_again_when_a_census_finds_that_a_sample_has_left_it(holder: str, stage: LeaseStage) -> None:
    """Its word that it is done was lost with the line."""
    bench = SourceBench(max_load=1.0).started(num_engines=1, num_slots=1)
    assert keys(bench.grant(1)) == [(0, 0)]
    bench.loses("filter")
    bench.returns("filter", epoch=1)
    assert keys(bench.answers(**{holder: (held(0, 0, stage),)})) == [(0, 1)]
    lease = bench.source.table.lease(FIRST)
    assert lease is not None
    assert lease.engine == ""


def test_a_sample_that_somebody_has_just_said_he_holds_is_not_looked_for() -> None:
    bench = SourceBench(num_samples=1).started()
    bench.grant(1)
    bench.closed("engine/0", FIRST)
    begun: list[bool] = []
    for _ in range(3):
        begun.append(bool(asked(bench.hear(TimerFired(key=SWEEP_TIMER)))))
        if begun[-1]:
            bench.answers(scorer=(held(0, 0),))
    assert begun == [False, True, False]


def test_a_sample_that_only_waits_for_an_engine_is_not_looked_for() -> None:
    bench = SourceBench(max_load=1.0).started(num_engines=1, num_slots=1)
    bench.grant(1)
    for num_tokens in range(6):
        bench.progressed("engine/0", FIRST, num_tokens, drive.part((0, 1)))
        assert asked(bench.hear(TimerFired(key=SWEEP_TIMER))) == []


def test_what_is_settled_counts_no_more_among_what_waits() -> None:
    """Engines queue only while enough waits behind it."""
    bench = SourceBench().started(num_engines=0)
    bench.grant(3)
    assert bench.source.issuing.num_waiting == 6
    bench.hear(SamplesSettled(settled=SettledState(2, 1, (2,))))
    assert bench.source.issuing.num_waiting == 2


def test_a_replacement_that_a_new_prompt_source_is_asked_for_is_looked_for_first() -> None:
    bench = SourceBench(epoch=1).started(num_engines=1)
    bench.grant(1)
    bench.hear(RefillAsked(missing=(SampleKey(0, 2),)))
    assert keys(bench.answers(engine_0=(held(0, 2),))) == [(0, 0), (0, 1)]


@pytest.mark.parametrize(("name", "is_asked"), [("engine/0", True), ("scorer", True), ("engine/7", False)])
def test_a_line_that_carries_again_may_have_lost_samples(name: str, is_asked: bool) -> None:
    bench = SourceBench().started()
    bench.returns("learner")
    assert bool(asked(bench.hear(LineRestored(name=name)))) == is_asked
    bench.driver.ignores(LineRestored(name="learner"))


def test_a_replacement_that_is_missed_before_its_prompt_is_read_is_opened_with_the_others() -> None:
    bench = SourceBench().started()
    span = GrantSpan(0, 1, 0, 0, 2)
    commands = bench.driver.hear(
        DemandGranted(total=1, spans=(span,), settled=SettledState(0, 0, ())), RefillAsked(missing=(SampleKey(0, 2),))
    )
    assert keys(commands) == []
    read = FetchedPrompt(0, drive.prompt())
    assert keys(bench.driver.hear(PromptsFetched(prompts=(read,)))) == [(0, 0), (0, 1), (0, 2)]


# --- budgets ------------------------------------------------------------------------------------------------------


def test_the_death_of_an_engine_costs_no_retry() -> None:
    bench = lost_engine(num_retries=1, max_engine_losses=3)
    bench.answers()
    bench.joins("engine/0", epoch=1)
    bench.loses("engine/1")
    bench.answers()
    assert keys(bench.failed("engine/0", FIRST, attempt=2)) == [(0, 0)]
    assert drive.one_sent(bench.failed("engine/0", FIRST, attempt=3), SampleFailed).key == FIRST


def test_a_sample_on_which_too_many_engines_died_fails() -> None:
    bench = SourceBench(num_samples=1, max_engine_losses=2).started(num_engines=1)
    bench.grant(1)
    for epoch in (1, 2):
        bench.loses("engine/0")
        bench.joins("engine/0", epoch=epoch)
        assert keys(bench.answers()) == [(0, 0)]
    bench.loses("engine/0")
    bench.joins("engine/0", epoch=3)
    failed = drive.one_sent(bench.answers(), SampleFailed, to="scorer")
    assert failed.reason == "3 engines died with it"


def test_an_overdue_lease_starts_a_census_and_is_not_issued_again_by_itself() -> None:
    bench = SourceBench().started()
    bench.grant(1)
    assert bench.hear(TimerFired(key=SWEEP_TIMER)) == [StartTimer(SWEEP_TIMER, 300.0)]
    commands = bench.hear(TimerFired(key=SWEEP_TIMER))
    assert keys(commands) == []
    assert len(asked(commands)) == 5
    assert keys(bench.answers(engine_0=(held(0, 0),))) == [(0, 1)]


def test_progress_keeps_a_lease_from_being_overdue() -> None:
    bench = SourceBench(num_samples=1).started()
    bench.grant(1)
    for token in range(5):
        bench.progressed("engine/0", FIRST, token, drive.part((0, 1)))
        assert asked(bench.hear(TimerFired(key=SWEEP_TIMER))) == []


# --- a replacement ------------------------------------------------------------------------------------------------


def test_a_replacement_issues_nothing_before_its_census_is_judged() -> None:
    bench = SourceBench(epoch=1).started()
    assert bench.source.census.is_open
    assert keys(bench.grant(2)) == []
    assert keys(bench.hear(RefillAsked(missing=(SampleKey(0, 2),)))) == []
    assert sorted(keys(bench.answers())) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_a_replacement_asks_those_who_were_there_before_it() -> None:
    bench = SourceBench(epoch=1)
    for name in KEEPERS:
        bench.returns(name)
    bench.joins("engine/0")
    commands = bench.hear(Started(epoch=1))
    assert sorted(asked(commands)) == ["buffer", "engine/0", "filter", "scorer"]


def test_a_replacement_adopts_what_is_held_and_issues_the_rest() -> None:
    bench = SourceBench(epoch=1, num_samples=3).started()
    bench.grant(1)
    commands = bench.answers(engine_0=(held(0, 0, attempt=1),), filter=(held(0, 2, LeaseStage.PASSED_ON),))
    assert keys(commands) == [(0, 1)]
    assert bench.source.issuing.num_issued == 1
    lease = bench.source.table.lease(FIRST)
    assert lease is not None
    assert (lease.engine, lease.attempt) == ("engine/0", 1)


def test_a_replacement_adopts_replacements_of_failed_samples_too() -> None:
    bench = SourceBench(epoch=1).started()
    bench.grant(1)
    bench.answers(engine_0=(held(0, 3),), filter=(held(0, 0, LeaseStage.PASSED_ON), held(0, 1, LeaseStage.PASSED_ON)))
    assert bench.hear(RefillAsked(missing=(SampleKey(0, 3),))) == []
    assert keys(bench.failed("engine/0", SampleKey(0, 3))) == [(0, 3)]


def test_a_replacement_knows_nothing_of_the_failures_before_it_and_gives_the_whole_budget() -> None:
    """Attempts count engine losses too, so a high attempt says nothing about failures."""
    bench = SourceBench(epoch=1, num_retries=1).started()
    bench.grant(1)
    bench.answers(engine_0=(held(0, 0, attempt=4), held(0, 1)))
    again = drive.one_sent(bench.failed("engine/0", FIRST, attempt=4), SampleIssued)
    assert again.attempt == 5
    assert drive.one_sent(bench.failed("engine/0", FIRST, attempt=5), SampleFailed).key == FIRST


def test_the_record_of_a_failure_is_outweighed_by_whoever_holds_the_sample() -> None:
    """The predecessor gave the sample up: the Filter knows that it failed, and the engine still has the record."""
    bench = SourceBench(epoch=1).started()
    bench.grant(1)
    passed_on = (held(0, 0, LeaseStage.PASSED_ON), held(0, 1, LeaseStage.PASSED_ON))
    assert keys(bench.answers(engine_0=(held(0, 0, LeaseStage.FAILED, attempt=2),), filter=passed_on)) == []


def test_what_was_found_waits_for_groups_that_are_not_known_yet() -> None:
    bench = SourceBench(epoch=1).started()
    assert keys(bench.answers(engine_0=(held(0, 0),))) == []
    assert keys(bench.grant(1)) == [(0, 1)]


def test_what_was_found_on_an_engine_that_has_died_since_is_judged_again() -> None:
    """Before the group is known here, a second census finds that nobody holds its sample any more."""
    bench = SourceBench(epoch=1).started()
    bench.answers(engine_0=(held(0, 0), held(0, 1)))
    bench.loses("engine/0")
    bench.answers(scorer=(held(0, 1, LeaseStage.RUNNING),))
    assert keys(bench.grant(1), "engine/1") == [(0, 0)]


def test_what_was_found_on_an_engine_that_dies_when_the_group_is_known_is_judged_by_that_census() -> None:
    bench = SourceBench(epoch=1).started()
    bench.answers(engine_0=(held(0, 0), held(0, 1)))
    bench.loses("engine/0")
    assert keys(bench.grant(1)) == []
    assert keys(bench.answers()) == [(0, 0), (0, 1)]


def test_what_was_found_of_settled_groups_is_forgotten() -> None:
    bench = SourceBench(epoch=1).started()
    bench.answers(engine_0=(held(0, 0), held(1, 0)))
    bench.hear(SamplesSettled(settled=SettledState(1, 1, ())))
    assert keys(bench.grant(2, sequence=1, floor=1)) == [(1, 1)]
