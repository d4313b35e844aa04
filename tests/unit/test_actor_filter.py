"""The Filter: when a group is complete, whether it is worth training on, and what becomes of failed samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import actor_driver as drive
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.filter.machine import SWEEP_TIMER, Filter
from penstock.actors.filter.options import FilterOptions
from penstock.actors.filter.settings import FilterSettings
from penstock.messages.commands import JudgeGroup, Send, StartTimer
from penstock.messages.flow import (
    GroupAdmitted,
    GroupRejected,
    RefillAsked,
    SampleFailed,
    SampleScored,
    SamplesSettled,
    ScoringFailed,
    SettledState,
)
from penstock.messages.local import GroupJudged, Started, TimerFired
from penstock.messages.membership import LeaseStage
from penstock.messages.samples import SampleKey, TerminalState

if TYPE_CHECKING:
    from random import Random

    from penstock.messages.base import Event
    from penstock.messages.commands import AnyCommand

SIZE = 3


def filter_of(
    *,
    drop_zero_spread: bool = True,
    min_response_tokens: int = 0,
    max_response_tokens: int | None = None,
    has_function: bool = False,
    on_failed_sample: Literal["refill", "shrink", "reject"] = "refill",
    max_refills: int = 2,
    min_group_size: int = 2,
) -> drive.Driver[Filter]:
    return drive.Driver(
        Filter(
            FilterSettings(
                options=FilterOptions(
                    drop_zero_spread=drop_zero_spread,
                    min_response_tokens=min_response_tokens,
                    max_response_tokens=max_response_tokens,
                    function="mine.py:judge" if has_function else None,
                    on_failed_sample=on_failed_sample,
                    max_refills=max_refills,
                    min_group_size=min_group_size,
                ),
                judge_timeout_s=60.0,
            )
        )
    )


def scored(group_id: int, index: int, reward: float | None = None, num_tokens: int = 4) -> SampleScored:
    value = float(index % 2) if reward is None else reward
    return SampleScored(
        sample=drive.sample(group_id, index, (0, num_tokens), reward=value),
        group_size=SIZE,
        prompt=drive.prompt(group_id),
    )


def failed(group_id: int, index: int, num_tokens: int = 2) -> SampleFailed:
    return SampleFailed(
        key=SampleKey(group_id, index),
        attempt=2,
        group_size=SIZE,
        prompt=drive.prompt(group_id),
        reason="the engine died",
        num_tokens=num_tokens,
    )


def scoring_failed(group_id: int, index: int) -> ScoringFailed:
    return ScoringFailed(
        key=SampleKey(group_id, index),
        attempt=0,
        group_size=SIZE,
        prompt=drive.prompt(group_id),
        reason="it raised",
        num_tokens=7,
    )


def settled(sequence: int, floor: int, *above: int) -> SamplesSettled:
    return SamplesSettled(settled=SettledState(sequence, floor, above))


def indices(commands: list[AnyCommand]) -> list[int]:
    """Indices of the samples of the one admitted group."""
    return [sample.key.index for sample in drive.one_sent(commands, GroupAdmitted, to="buffer").group.samples]


def rejection(commands: list[AnyCommand]) -> GroupRejected:
    return drive.one_sent(commands, GroupRejected, to="buffer")


def missing(commands: list[AnyCommand]) -> tuple[SampleKey, ...]:
    return drive.one_sent(commands, RefillAsked, to="prompt_source").missing


# --- completion ---------------------------------------------------------------------------------------------------


def test_a_group_is_admitted_when_its_last_sample_is_scored() -> None:
    driver = filter_of()
    assert driver.hear(scored(0, 2), scored(0, 0)) == []
    commands = driver.hear(scored(0, 1))
    assert indices(commands) == [0, 1, 2]
    assert driver.machine.assemblies == {}


def test_a_sample_that_comes_twice_counts_once() -> None:
    driver = filter_of()
    driver.hear(scored(0, 0, reward=0.0))
    driver.ignores(scored(0, 0, reward=1.0))
    driver.hear(scored(0, 1))
    group = drive.one_sent(driver.hear(scored(0, 2, reward=0.0)), GroupAdmitted).group
    assert [sample.reward for sample in group.samples] == [0.0, 1.0, 0.0]


def test_the_first_word_on_a_sample_is_the_last() -> None:
    """A sample that was given up and comes after all, from an engine that had been stopped for a while."""
    driver = filter_of()
    driver.hear(failed(0, 0))
    driver.ignores(scored(0, 0))
    driver.hear(scored(0, 1))
    driver.ignores(failed(0, 1))
    driver.ignores(scoring_failed(0, 1))


@given(order=st.permutations([(group_id, index) for group_id in range(4) for index in range(SIZE)]))
@settings(max_examples=60)
def test_groups_are_told_apart_by_their_id_whatever_the_order(order: list[tuple[int, int]]) -> None:
    driver = filter_of()
    commands = driver.hear(*(scored(group_id, index) for group_id, index in order))
    groups = [event.group for event in drive.sent(commands, GroupAdmitted)]
    assert sorted(group.group_id for group in groups) == [0, 1, 2, 3]
    for group in groups:
        assert [sample.key for sample in group.samples] == [SampleKey(group.group_id, i) for i in range(SIZE)]
        assert group.prompt == drive.prompt(group.group_id)


def test_settled_groups_are_forgotten() -> None:
    driver = filter_of()
    driver.hear(*(scored(group_id, 0) for group_id in range(4)))
    driver.hear(settled(1, 1, 2))
    assert list(driver.machine.assemblies) == [1, 3]
    driver.hear(settled(2, 4))
    assert drive.snapshot(driver.machine) == drive.snapshot(filter_of().machine)


def test_the_census_hears_of_every_sample_that_is_here() -> None:
    driver = filter_of(on_failed_sample="shrink")
    driver.hear(scored(0, 0), scored(0, 1), failed(7, 2))
    assert {(lease.key, lease.stage) for lease in driver.machine.leases()} == {
        (SampleKey(0, 0), LeaseStage.PASSED_ON),
        (SampleKey(0, 1), LeaseStage.PASSED_ON),
        (SampleKey(7, 2), LeaseStage.PASSED_ON),
    }


# --- failed samples -----------------------------------------------------------------------------------------------


def test_refill_asks_for_a_replacement_in_the_same_place() -> None:
    driver = filter_of(on_failed_sample="refill")
    driver.hear(scored(0, 0), scored(0, 1))
    assert missing(driver.hear(failed(0, 2))) == (SampleKey(0, 5),)
    commands = driver.hear(scored(0, 5))
    assert indices(commands) == [0, 1, 5]
    group = drive.one_sent(commands, GroupAdmitted).group
    assert [(end.key.index, end.state, end.cause, end.num_tokens) for end in group.ended] == [
        (2, TerminalState.FAILED, "generation_failed", 2)
    ]
    assert missing(commands) == ()


def test_a_replacement_that_fails_is_replaced_again() -> None:
    driver = filter_of(on_failed_sample="refill")
    driver.hear(scored(0, 0), scored(0, 1), failed(0, 2))
    assert missing(driver.hear(scoring_failed(0, 5))) == (SampleKey(0, 8),)
    group = drive.one_sent(driver.hear(scored(0, 8, reward=0.5)), GroupAdmitted).group
    assert [sample.key.index for sample in group.samples] == [0, 1, 8]
    assert [(end.key.index, end.cause) for end in group.ended] == [(2, "generation_failed"), (5, "scoring_failed")]


def test_a_failed_sample_of_another_place_is_asked_for_beside_the_first() -> None:
    driver = filter_of(on_failed_sample="refill")
    driver.hear(failed(0, 2))
    assert missing(driver.hear(failed(4, 1))) == (SampleKey(0, 5), SampleKey(4, 4))
    assert missing(driver.hear(scored(0, 5))) == (SampleKey(4, 4),)


def test_past_its_refills_a_group_shrinks() -> None:
    driver = filter_of(on_failed_sample="refill", max_refills=1)
    driver.hear(scored(0, 0), scored(0, 1), failed(0, 2))
    commands = driver.hear(failed(0, 5))
    assert indices(commands) == [0, 1]
    assert missing(commands) == ()


def test_replacements_of_a_group_that_was_settled_are_not_asked_for_any_more() -> None:
    driver = filter_of(on_failed_sample="refill")
    driver.hear(failed(0, 2), failed(1, 0))
    assert missing(driver.hear(settled(1, 1))) == (SampleKey(1, 3),)


def test_nothing_is_asked_for_again_while_nothing_has_changed() -> None:
    driver = filter_of(on_failed_sample="refill")
    driver.hear(failed(0, 2))
    assert driver.hear(scored(0, 0), scored(1, 0), scored(1, 1)) == []


def test_shrink_goes_on_with_those_that_are_left() -> None:
    driver = filter_of(on_failed_sample="shrink")
    commands = driver.hear(scored(0, 0), failed(0, 1), scored(0, 2, reward=1.0))
    assert indices(commands) == [0, 2]
    assert drive.sent(commands, RefillAsked) == []


def test_a_group_that_shrank_too_far_is_turned_away_with_every_sample() -> None:
    driver = filter_of(on_failed_sample="shrink", min_group_size=2)
    event = rejection(driver.hear(scored(0, 0), failed(0, 1), scoring_failed(0, 2)))
    assert event.cause == "too_few_samples"
    assert {(end.key.index, end.state, end.num_tokens) for end in event.ended} == {
        (0, TerminalState.FILTERED, 4),
        (1, TerminalState.FAILED, 2),
        (2, TerminalState.FAILED, 7),
    }


def test_a_group_without_any_sample_is_turned_away() -> None:
    driver = filter_of(on_failed_sample="shrink", min_group_size=1)
    event = rejection(driver.hear(failed(0, 0), failed(0, 1), failed(0, 2)))
    assert (event.cause, event.mean_reward) == ("too_few_samples", None)


def test_reject_turns_the_group_away_at_its_first_failure() -> None:
    driver = filter_of(on_failed_sample="reject")
    event = rejection(driver.hear(scored(0, 0, reward=1.0), failed(0, 1)))
    assert (event.cause, event.mean_reward) == ("generation_failed", 1.0)
    assert {(end.key.index, end.state) for end in event.ended} == {
        (0, TerminalState.FILTERED),
        (1, TerminalState.FAILED),
        (2, TerminalState.CANCELLED),
    }


def test_a_group_that_has_gone_out_does_not_come_in_again() -> None:
    """Its other samples arrive before the Buffer has said that it is settled; they open no second group."""
    driver = filter_of(on_failed_sample="reject")
    driver.hear(scored(0, 0), failed(0, 1))
    driver.ignores(scored(0, 2))
    driver.ignores(failed(0, 4))
    driver.hear(settled(1, 1))
    assert drive.snapshot(driver.machine) == drive.snapshot(filter_of(on_failed_sample="reject").machine)


# --- worth training on --------------------------------------------------------------------------------------------


def complete(driver: drive.Driver[Filter], *rewards: float, lengths: tuple[int, ...] = (4, 4, 4)) -> list[AnyCommand]:
    samples = enumerate(zip(rewards, lengths, strict=True))
    events: list[Event] = [scored(0, index, reward, length) for index, (reward, length) in samples]
    return driver.hear(*events)


@pytest.mark.parametrize("reward", [0.0, 1.0, -2.5])
def test_equal_rewards_are_no_signal(reward: float) -> None:
    event = rejection(complete(filter_of(), reward, reward, reward))
    assert (event.cause, event.mean_reward) == ("zero_spread", reward)
    assert {(end.state, end.cause) for end in event.ended} == {(TerminalState.FILTERED, "zero_spread")}


def test_rewards_that_differ_by_rounding_alone_are_equal() -> None:
    assert rejection(complete(filter_of(), 0.3, 0.1 + 0.2, 0.3)).cause == "zero_spread"
    assert indices(complete(filter_of(), 0.3, 0.3 + 1e-6, 0.3)) == [0, 1, 2]


def test_equal_rewards_are_kept_where_the_scenario_says_so() -> None:
    assert indices(complete(filter_of(drop_zero_spread=False), 1.0, 1.0, 1.0)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "cause"),
    [((3, 4, 4), "too_short"), ((3, 4, 5), ""), ((5, 9, 5), ""), ((5, 10, 5), "too_long")],
)
def test_groups_are_turned_away_by_length(lengths: tuple[int, ...], cause: str) -> None:
    """Too short when every response is shorter than 5, too long when any is longer than 9."""
    commands = complete(filter_of(min_response_tokens=5, max_response_tokens=9), 0.0, 1.0, 0.0, lengths=lengths)
    if cause:
        assert rejection(commands).cause == cause
    else:
        assert indices(commands) == [0, 1, 2]


# --- the user's filter --------------------------------------------------------------------------------------------


def test_the_users_filter_judges_what_the_others_let_through() -> None:
    driver = filter_of(has_function=True)
    commands = complete(driver, 0.0, 1.0, 0.0)
    assert [s.key.index for s in drive.one(commands, JudgeGroup).group.samples] == [0, 1, 2]
    assert drive.every(commands, Send) == []
    assert indices(driver.hear(GroupJudged(group_id=0, keep=True))) == [0, 1, 2]


def test_the_users_filter_is_not_asked_about_what_another_turns_away() -> None:
    commands = complete(filter_of(has_function=True), 1.0, 1.0, 1.0)
    assert drive.every(commands, JudgeGroup) == []
    assert rejection(commands).cause == "zero_spread"


@pytest.mark.parametrize(("cause", "told"), [("", "user_filter"), ("too easy", "too easy")])
def test_the_users_filter_turns_away_with_its_own_cause(cause: str, told: str) -> None:
    driver = filter_of(has_function=True)
    complete(driver, 0.0, 1.0, 0.0)
    assert rejection(driver.hear(GroupJudged(group_id=0, keep=False, cause=cause))).cause == told


def test_a_verdict_on_a_group_that_is_not_being_judged_changes_nothing() -> None:
    driver = filter_of(has_function=True)
    driver.ignores(GroupJudged(group_id=0, keep=True))
    complete(driver, 0.0, 1.0, 0.0)
    driver.hear(GroupJudged(group_id=0, keep=True))
    driver.ignores(GroupJudged(group_id=0, keep=False))


def test_a_group_that_is_settled_while_it_is_judged_is_forgotten() -> None:
    driver = filter_of(has_function=True)
    complete(driver, 0.0, 1.0, 0.0)
    driver.hear(settled(1, 1))
    driver.ignores(GroupJudged(group_id=0, keep=True))


def test_a_filter_that_answers_nothing_for_a_whole_period_has_lost_what_it_was_asked() -> None:
    driver = filter_of(has_function=True)
    assert drive.one(driver.hear(Started(epoch=0)), StartTimer) == StartTimer(SWEEP_TIMER, 60.0)
    complete(driver, 0.0, 1.0, 0.0)
    assert driver.hear(TimerFired(key=SWEEP_TIMER)) == [StartTimer(SWEEP_TIMER, 60.0)]
    assert rejection(driver.hear(TimerFired(key=SWEEP_TIMER))).cause == "filter_did_not_answer"


def test_a_filter_that_is_only_behind_is_waited_for() -> None:
    driver = filter_of(has_function=True)
    complete(driver, 0.0, 1.0, 0.0)
    for group_id in range(1, 6):
        driver.hear(*(scored(group_id, index) for index in range(SIZE)))
        driver.hear(GroupJudged(group_id=group_id, keep=True))
        assert driver.hear(TimerFired(key=SWEEP_TIMER)) == [StartTimer(SWEEP_TIMER, 60.0)]
    assert list(driver.machine.judging) == [0]


def test_a_sample_that_failed_is_not_taken_when_it_comes_after_all() -> None:
    driver = filter_of()
    driver.hear(failed(0, 1))
    driver.ignores(scored(0, 1))


def test_two_samples_of_one_place_do_not_make_up_for_a_place_that_is_empty() -> None:
    driver = filter_of()
    assert driver.hear(scored(0, 0), scored(0, 1), scored(0, 1 + SIZE, reward=1.0)) == []
    assert indices(driver.hear(scored(0, 2))) == [0, 2, 1 + SIZE]


@pytest.mark.parametrize("late", [scored(0, 1 + SIZE), failed(0, 1 + SIZE)])
def test_nothing_joins_a_group_that_is_judged(late: Event) -> None:
    driver = filter_of(has_function=True)
    judged = driver.hear(scored(0, 0), scored(0, 1), scored(0, 2))
    assert len(drive.every(judged, JudgeGroup)) == 1
    driver.ignores(late)
    assert indices(driver.hear(GroupJudged(group_id=0, keep=True))) == [0, 1, 2]


# --- one Filter after another -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 4), (4, 1)])
def test_what_a_lost_filter_had_replaced_does_not_count_beside_its_replacement(order: tuple[int, int]) -> None:
    """Sample 1 failed to be scored, and 4 was made in its place. Then Scorer and Filter were lost; the engines sent
    both to the new Scorer, whose function had a reward for each."""
    lost = filter_of(drop_zero_spread=False)
    assert missing(lost.hear(scored(0, 0), scoring_failed(0, 1))) == (SampleKey(0, 4),)
    lost.hear(scored(0, 4))

    driver = filter_of(drop_zero_spread=False)
    assert driver.hear(*(scored(0, index) for index in (0, *order))) == []
    commands = driver.hear(scored(0, 2))
    assert indices(commands) == [0, 2, 4]
    (end,) = drive.one_sent(commands, GroupAdmitted).group.ended
    assert (end.key.index, end.state, end.cause, end.num_tokens) == (1, TerminalState.FAILED, "scoring_failed", 4)
    assert "its replacement is there" in end.reason


def test_what_was_replaced_has_failed_also_where_its_replacement_fails() -> None:
    driver = filter_of(drop_zero_spread=False)
    driver.hear(scored(0, 0), scored(0, 1))
    assert missing(driver.hear(failed(0, 4))) == (SampleKey(0, 7),)
    driver.ignores(scored(0, 1))
    assert indices(driver.hear(scored(0, 2), scored(0, 7))) == [0, 2, 7]


@given(
    chains=st.lists(st.lists(st.booleans(), max_size=2), min_size=SIZE, max_size=SIZE),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=150)
def test_a_place_counts_once_in_whatever_order_what_was_replaced_comes(chains: list[list[bool]], order: Random) -> None:
    """Of each place any number were replaced, and have a reward now or have failed again; the last one has a reward."""
    driver = filter_of(drop_zero_spread=False, min_group_size=1, max_refills=9)
    words: list[Event] = []
    for place, chain in enumerate(chains):
        for step, has_reward in enumerate([*chain, True]):
            words.append((scored if has_reward else failed)(0, place + step * SIZE))
    order.shuffle(words)
    group = drive.one_sent(driver.hear(*words), GroupAdmitted).group
    counted = [sample.key.index for sample in group.samples]
    assert sorted(index % SIZE for index in counted) == list(range(SIZE))
    ended = {end.key.index: end.state for end in group.ended}
    assert not ended.keys() & set(counted)
    for index in (*counted, *ended):
        assert index < SIZE or ended[index - SIZE] is TerminalState.FAILED


def test_a_failure_that_is_told_again_is_no_second_failure() -> None:
    driver = filter_of()
    driver.hear(failed(0, 1))
    driver.ignores(failed(0, 1))
