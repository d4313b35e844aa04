"""The Filter: samples that a function drops, before or after statistics of their group; what a hook is shown."""

from __future__ import annotations

from typing import Literal

import actor_driver as drive
import msgspec

from penstock.actors.filter.machine import SWEEP_TIMER, Filter
from penstock.actors.filter.options import FilterOptions
from penstock.actors.filter.settings import FilterSettings
from penstock.messages.base import Metric
from penstock.messages.commands import AnyCommand, JudgeGroup, JudgeSamples, ShowGroup
from penstock.messages.flow import GroupAdmitted, GroupRejected, SampleFailed, SampleScored
from penstock.messages.local import DroppedSample, GroupJudged, SamplesJudged, TimerFired
from penstock.messages.samples import Completed, CountedSample, Loss, Reward, SampleKey, TerminalState

SIZE = 4
REWARDS = (0.0, 1.0, 1.0, 0.0)


def filter_of(
    *,
    drops: Literal["before_statistics", "after_statistics"] = "before_statistics",
    has_sample_function: bool = True,
    has_function: bool = False,
    has_hook: bool = False,
    offers_rejected: bool = False,
    on_failed_sample: Literal["refill", "shrink", "reject"] = "shrink",
    min_group_size: int = 2,
    drop_zero_spread: bool = True,
) -> drive.Driver[Filter]:
    settings = FilterSettings(
        options=FilterOptions(
            drop_zero_spread=drop_zero_spread,
            min_response_tokens=0,
            max_response_tokens=None,
            function="mine.py:judge" if has_function else None,
            on_failed_sample=on_failed_sample,
            max_refills=0,
            min_group_size=min_group_size,
            sample_function="mine.py:judge" if has_sample_function else None,
            drop_samples=drops,
            all_samples_hook="mine.py:judge" if has_hook else None,
            keep_when_insufficient=1 if offers_rejected else None,
        )
    )
    return drive.Driver(Filter(settings))


def scored(group_id: int, index: int, reward: float) -> SampleScored:
    made = drive.sample(group_id, index, (0, 4), reward=reward)
    earned = Reward(value=reward, components=(Metric("format", reward / 2),))
    made = msgspec.structs.replace(made, outcome=Completed(reward=earned))
    return SampleScored(sample=made, group_size=SIZE, prompt=drive.prompt(group_id))


def complete(driver: drive.Driver[Filter], group_id: int = 0) -> list[AnyCommand]:
    return driver.hear(*(scored(group_id, index, reward) for index, reward in enumerate(REWARDS)))


def drop(*indices: int, group_id: int = 0, cause: str = "repeats") -> SamplesJudged:
    return SamplesJudged(group_id=group_id, dropped=tuple(DroppedSample(index, cause) for index in indices))


def admitted(commands: list[AnyCommand]) -> GroupAdmitted:
    return drive.one_sent(commands, GroupAdmitted, to="buffer")


def rejected(commands: list[AnyCommand]) -> GroupRejected:
    return drive.one_sent(commands, GroupRejected, to="buffer")


def test_samples_are_judged_once_their_group_is_complete_and_once_only() -> None:
    driver = filter_of()
    asked = drive.one(complete(driver), JudgeSamples)
    assert [sample.key.index for sample in asked.group.samples] == [0, 1, 2, 3]
    driver.ignores(scored(0, 1, 1.0))
    assert admitted(driver.hear(drop())).group.counted == ()
    driver.ignores(drop(1))


def test_a_second_verdict_on_samples_changes_nothing_while_their_group_is_judged() -> None:
    driver = filter_of(has_function=True)
    complete(driver)
    drive.one(driver.hear(drop(1)), JudgeGroup)
    driver.ignores(drop(0))


def test_a_sample_dropped_before_the_statistics_leaves_its_group() -> None:
    driver = filter_of()
    complete(driver)
    group = admitted(driver.hear(drop(1))).group
    assert [sample.key.index for sample in group.samples] == [0, 2, 3]
    (end,) = group.ended
    assert (end.key, end.state, end.cause, end.num_tokens) == (SampleKey(0, 1), TerminalState.FILTERED, "repeats", 4)
    assert group.counted == ()


def test_a_sample_dropped_after_the_statistics_counts_in_them_and_is_terminal_all_the_same() -> None:
    driver = filter_of(drops="after_statistics")
    complete(driver)
    group = admitted(driver.hear(drop(1, 3))).group
    assert [sample.key.index for sample in group.samples] == [0, 2]
    assert group.counted == (
        CountedSample(1, 1.0, (Metric("format", 0.5),)),
        CountedSample(3, 0.0, (Metric("format", 0.0),)),
    )
    assert [(end.key.index, end.state) for end in group.ended] == [
        (1, TerminalState.FILTERED),
        (3, TerminalState.FILTERED),
    ]


def test_spread_is_that_of_what_counts() -> None:
    before, after = filter_of(), filter_of(drops="after_statistics")
    complete(before)
    complete(after)
    assert rejected(before.hear(drop(1, 2))).cause == "zero_spread"
    assert [sample.key.index for sample in admitted(after.hear(drop(1, 2))).group.samples] == [0, 3]


def test_a_dropped_sample_is_not_drawn_again_and_may_leave_too_few() -> None:
    driver = filter_of(min_group_size=2)
    complete(driver)
    commands = driver.hear(drop(0, 1, 2))
    event = rejected(commands)
    assert event.cause == "too_few_samples"
    causes = {end.key.index: end.cause for end in event.ended}
    assert causes == {0: "repeats", 1: "repeats", 2: "repeats", 3: "too_few_samples"}
    assert len(drive.sent(commands, GroupRejected)) == 1
    assert all(not isinstance(command, JudgeSamples) for command in commands)


def test_a_group_of_which_nothing_is_left_to_train_is_turned_away_though_all_of_it_counts() -> None:
    driver = filter_of(drops="after_statistics", min_group_size=1)
    complete(driver)
    assert rejected(driver.hear(drop(0, 1, 2, 3))).cause == "too_few_samples"


def test_what_is_imitated_counts_in_no_statistics() -> None:
    driver = filter_of(drops="after_statistics", drop_zero_spread=False)
    imitated = drive.sample(0, 0, (0, 4), reward=0.5)
    imitated = type(imitated)(key=imitated.key, parts=imitated.parts, outcome=imitated.outcome, loss=Loss.SUPERVISED)
    driver.hear(SampleScored(sample=imitated, group_size=SIZE, prompt=drive.prompt(0)))
    driver.hear(*(scored(0, index, 1.0) for index in (1, 2, 3)))
    assert admitted(driver.hear(drop(0, 1))).group.counted == (CountedSample(1, 1.0, (Metric("format", 0.5),)),)


def test_the_function_for_groups_sees_what_the_one_for_samples_has_left() -> None:
    driver = filter_of(has_function=True)
    complete(driver)
    judged = drive.one(driver.hear(drop(3)), JudgeGroup)
    assert [sample.key.index for sample in judged.group.samples] == [0, 1, 2]
    assert [sample.key.index for sample in admitted(driver.hear(GroupJudged(group_id=0, keep=True))).group.samples] == [
        0,
        1,
        2,
    ]


def test_failed_samples_stay_failed_beside_dropped_ones() -> None:
    driver = filter_of()
    lost = SampleFailed(
        key=SampleKey(0, 0), attempt=2, group_size=SIZE, prompt=drive.prompt(0), reason="died", num_tokens=3
    )
    driver.hear(lost, *(scored(0, index, float(index % 2)) for index in (1, 2, 3)))
    group = admitted(driver.hear(drop(1))).group
    assert {(end.key.index, end.state) for end in group.ended} == {
        (0, TerminalState.FAILED),
        (1, TerminalState.FILTERED),
    }


def test_no_verdict_on_samples_for_two_sweeps_turns_the_group_away() -> None:
    driver = filter_of(offers_rejected=True)
    complete(driver)
    assert drive.sent(driver.hear(TimerFired(key=SWEEP_TIMER)), GroupRejected) == []
    event = rejected(driver.hear(TimerFired(key=SWEEP_TIMER)))
    assert (event.cause, event.group) == ("filter_did_not_answer", None)
    driver.ignores(drop(1))


# --- what may be kept ---------------------------------------------------------------------------------------------


def test_a_verdict_on_contents_travels_with_the_group_where_it_may_be_kept() -> None:
    driver = filter_of(has_sample_function=False, offers_rejected=True)
    event = rejected(driver.hear(*(scored(0, index, 1.0) for index in range(SIZE))))
    assert event.cause == "zero_spread"
    assert event.group is not None
    assert len(event.group.samples) == SIZE
    plain = filter_of(has_sample_function=False)
    assert rejected(plain.hear(*(scored(0, index, 1.0) for index in range(SIZE)))).group is None


def test_what_cannot_be_trained_or_was_not_judged_never_travels() -> None:
    few = filter_of(offers_rejected=True)
    complete(few)
    assert rejected(few.hear(drop(0, 1, 2))).group is None
    failing = filter_of(has_sample_function=False, has_function=True, offers_rejected=True)
    complete(failing)
    verdict = GroupJudged(group_id=0, keep=False, cause="filter_error", is_failure=True)
    assert rejected(failing.hear(verdict)).group is None
    judged = filter_of(has_sample_function=False, has_function=True, offers_rejected=True)
    complete(judged)
    assert rejected(judged.hear(GroupJudged(group_id=0, keep=False, cause="dull"))).group is not None


# --- the hook -----------------------------------------------------------------------------------------------------


def test_the_hook_is_shown_every_group_once_with_all_its_samples_and_the_cause() -> None:
    driver = filter_of(has_hook=True, drops="after_statistics")
    complete(driver)
    shown = drive.one(driver.hear(drop(1)), ShowGroup)
    assert shown.cause == ""
    assert [sample.key.index for sample in shown.group.samples] == [0, 1, 2, 3]
    assert [end.key.index for end in shown.group.ended] == [1]
    complete(driver, group_id=1)
    turned_away = drive.one(driver.hear(drop(0, 1, 2, 3, group_id=1)), ShowGroup)
    assert turned_away.cause == "too_few_samples"
    assert len(turned_away.group.samples) == SIZE


def test_a_group_that_a_failed_sample_closes_is_shown_with_what_has_come() -> None:
    driver = filter_of(has_hook=True, on_failed_sample="reject")
    lost = SampleFailed(key=SampleKey(0, 0), attempt=2, group_size=SIZE, prompt=drive.prompt(0), reason="died")
    commands = driver.hear(scored(0, 1, 1.0), lost)
    shown = drive.one(commands, ShowGroup)
    assert (shown.cause, [sample.key.index for sample in shown.group.samples]) == ("generation_failed", [1])
    assert rejected(commands).group is None
