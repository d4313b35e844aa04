"""The Scorer where a function scores whole groups, and its alarms."""

from __future__ import annotations

import random
from typing import Literal

import actor_driver as drive
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.filter.machine import Filter
from penstock.actors.filter.options import FilterOptions
from penstock.actors.filter.settings import FilterSettings
from penstock.actors.scorer.machine import SWEEP_TIMER, Scorer
from penstock.actors.scorer.settings import ScorerSettings
from penstock.messages.commands import Score, ScoreGroup, Send
from penstock.messages.flow import (
    FailuresTold,
    GroupAdmitted,
    GroupRejected,
    PlacesGivenUp,
    RefillAsked,
    SampleFailed,
    SampleGenerated,
    SampleScored,
    SamplesSettled,
    ScoringFailed,
    SettledState,
)
from penstock.messages.local import GroupScored, SampleJudged, TimerFired
from penstock.messages.membership import ActorReturned
from penstock.messages.samples import Completed, Purpose, Reward, SampleKey
from penstock.messages.training import NoticeGiven

SIZE = 3


def scorer(
    num_retries: int = 1, whole_groups: tuple[Purpose, ...] = (Purpose.TRAIN,), **alarms: float
) -> drive.Driver[Scorer]:
    plain = ScorerSettings(timeout_s=10.0, num_retries=num_retries, whole_groups=whole_groups)
    return drive.Driver(Scorer(msgspec.structs.replace(plain, **alarms)))


def generated(index: int, group_id: int = 3, *, size: int = SIZE, reward: float | None = None) -> SampleGenerated:
    sample = drive.sample(group_id, index, reward=reward) if reward is not None else drive.sample(group_id, index)
    return SampleGenerated(sample=sample, group_size=size, prompt=drive.prompt(group_id))


def failed(index: int, group_id: int = 3) -> SampleFailed:
    return SampleFailed(
        key=SampleKey(group_id, index), attempt=0, group_size=SIZE, prompt=drive.prompt(group_id), reason="lost"
    )


def scored(command: ScoreGroup, *values: float | None) -> GroupScored:
    judged = tuple(
        SampleJudged(
            key=sample.key,
            attempt=sample.attempt,
            reward=None if value is None else Reward(value=value),
            reason="it raised" if value is None else "",
        )
        for sample, value in zip(command.samples, values, strict=True)
    )
    return GroupScored(group_id=command.samples[0].key.group_id, samples=judged)


def indices(command: ScoreGroup) -> list[int]:
    return [sample.key.index for sample in command.samples]


def test_a_group_is_scored_once_when_all_its_samples_have_come() -> None:
    driver = scorer()
    assert drive.every(driver.hear(generated(2), generated(0)), ScoreGroup) == []
    command = drive.one(driver.hear(generated(1)), ScoreGroup)
    assert indices(command) == [0, 1, 2]
    sent = drive.sent(driver.hear(scored(command, 0.0, 0.5, 1.0)), SampleScored)
    assert [each.sample.reward for each in sent] == [0.0, 0.5, 1.0]
    assert driver.machine.pending == {}


def test_samples_that_wait_for_others_say_whom_they_wait_for() -> None:
    driver = scorer()
    driver.hear(generated(0))
    assert {(wait.what, wait.subject, wait.on) for wait in driver.machine.waits()} == {
        ("sample", "3/1", "prompt_source"),
        ("sample", "3/2", "prompt_source"),
    }
    driver.hear(generated(1), generated(2))
    assert {wait.what for wait in driver.machine.waits()} == {"reward of"}
    assert len(driver.machine.leases()) == 3


def test_a_failed_sample_is_waited_for_until_the_filter_gives_it_up() -> None:
    driver = scorer()
    commands = driver.hear(generated(0), failed(1), generated(2))
    assert drive.every(commands, ScoreGroup) == []
    assert drive.sent(commands, SampleFailed) != []
    command = drive.one(driver.hear(PlacesGivenUp(places=(SampleKey(3, 1),))), ScoreGroup)
    assert indices(command) == [0, 2]


def test_word_that_a_place_is_given_up_may_come_before_its_group() -> None:
    driver = scorer()
    driver.hear(PlacesGivenUp(places=(SampleKey(3, 1),)), generated(0))
    assert indices(drive.one(driver.hear(generated(2)), ScoreGroup)) == [0, 2]


def test_a_sample_that_comes_after_word_of_its_failure_completes_the_group() -> None:
    driver = scorer()
    driver.hear(generated(0), failed(1), generated(2))
    assert indices(drive.one(driver.hear(generated(1)), ScoreGroup)) == [0, 1, 2]


def test_word_of_the_failure_of_a_sample_that_is_here_only_passes_through() -> None:
    driver = scorer()
    driver.hear(generated(0), generated(1))
    assert driver.hear(failed(1)) == [Send("filter", failed(1))]
    assert indices(drive.one(driver.hear(generated(2)), ScoreGroup)) == [0, 1, 2]


def test_a_replacement_completes_the_group() -> None:
    driver = scorer()
    driver.hear(generated(0), failed(1), generated(2))
    assert indices(drive.one(driver.hear(generated(1 + SIZE)), ScoreGroup)) == [0, 2, 4]


def test_a_sample_whose_replacement_is_there_is_written_off() -> None:
    """After the loss of a Scorer that had failed to score sample 1: it comes again, and so does its replacement."""
    driver = scorer()
    driver.hear(generated(0), generated(1))
    gone = drive.one_sent(driver.hear(generated(1 + SIZE)), ScoringFailed)
    assert gone.key == SampleKey(3, 1)
    assert indices(drive.one(driver.hear(generated(2)), ScoreGroup)) == [0, 2, 4]


def test_a_call_that_fails_is_made_again_as_a_whole_and_then_fails_those_without_a_reward() -> None:
    driver = scorer(num_retries=1)
    command = drive.one(driver.hear(generated(0), generated(1), generated(2)), ScoreGroup)
    again = drive.one(driver.hear(scored(command, 1.0, None, 0.0)), ScoreGroup)
    assert indices(again) == [0, 1, 2]
    commands = driver.hear(scored(again, 1.0, None, 0.0))
    assert [each.sample.key.index for each in drive.sent(commands, SampleScored)] == [0, 2]
    assert drive.one_sent(commands, ScoringFailed).reason == "it raised"
    late = drive.one(driver.hear(generated(1 + SIZE)), ScoreGroup)
    assert indices(late) == [4]


def test_a_sample_that_brings_its_reward_is_not_waited_for_twice() -> None:
    driver = scorer()
    commands = driver.hear(generated(0, reward=0.25), generated(1))
    assert drive.one_sent(commands, SampleScored).sample.outcome == Completed(reward=Reward(value=0.25))
    assert indices(drive.one(driver.hear(generated(2)), ScoreGroup)) == [1, 2]


def test_an_answer_to_another_call_changes_nothing() -> None:
    driver = scorer()
    command = drive.one(driver.hear(generated(0), generated(1), generated(2)), ScoreGroup)
    other = GroupScored(group_id=3, samples=scored(command, 1.0, 1.0, 1.0).samples[:2])
    assert driver.hear(other) == []
    assert len(drive.sent(driver.hear(scored(command, 1.0, 1.0, 1.0)), SampleScored)) == 3
    assert driver.hear(scored(command, 0.0, 0.0, 0.0)) == []


def test_evaluations_wait_for_nobody_who_has_failed() -> None:
    driver = scorer(whole_groups=(Purpose.TRAIN, Purpose.EVALUATE))
    events = [generated(0), failed(1), generated(2)]
    commands = driver.hear(*(msgspec.structs.replace(event, purpose=Purpose.EVALUATE) for event in events))
    assert indices(drive.one(commands, ScoreGroup)) == [0, 2]


def test_purposes_that_score_samples_one_by_one_do_so() -> None:
    driver = scorer(whole_groups=(Purpose.EVALUATE,))
    assert drive.one(driver.hear(generated(0)), Score).sample.key == SampleKey(3, 0)
    driver.hear(failed(1))
    assert driver.machine.held.groups == {}


def test_settled_groups_are_forgotten() -> None:
    driver = scorer()
    driver.hear(generated(0), failed(1), PlacesGivenUp(places=(SampleKey(3, 1),)))
    driver.hear(SamplesSettled(settled=SettledState(1, 4, ())))
    assert driver.machine.held.groups == {}
    assert driver.machine.pending == {}


def test_a_backend_that_lost_a_group_is_asked_again() -> None:
    driver = scorer(num_retries=1)
    driver.hear(generated(0), generated(1), generated(2))
    sweep = TimerFired(key=SWEEP_TIMER)
    assert drive.every(driver.hear(sweep), ScoreGroup) == []
    again = drive.one(driver.hear(sweep), ScoreGroup)
    assert indices(again) == [0, 1, 2]
    driver.hear(sweep)
    assert len(drive.sent(driver.hear(sweep), ScoringFailed)) == 3


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**9),
    policy=st.sampled_from(("refill", "shrink", "reject")),
    failure_rate=st.sampled_from((0.0, 0.3, 0.8)),
)
def test_with_a_filter_behind_it_every_group_goes_out(
    seed: int, policy: Literal["refill", "shrink", "reject"], failure_rate: float
) -> None:
    """Samples fail to be generated and to be scored, in any order, and are replaced as the Filter says."""
    rng = random.Random(seed)
    scoring = scorer(num_retries=rng.randint(0, 1))
    filtering = drive.Driver(
        Filter(
            FilterSettings(
                options=FilterOptions(
                    drop_zero_spread=False,
                    min_response_tokens=0,
                    max_response_tokens=None,
                    on_failed_sample=policy,
                    max_refills=rng.randint(0, 4),
                    min_group_size=1,
                ),
                tells_scorer=True,
            )
        )
    )
    to_come = [(group_id, index) for group_id in range(4) for index in range(SIZE)]
    asked: list[ScoreGroup] = []
    known: set[SampleKey] = set()
    gone: set[int] = set()
    while to_come or asked:
        if to_come and (not asked or rng.random() < 0.7):
            group_id, index = to_come.pop(rng.randrange(len(to_come)))
            event = failed(index, group_id) if rng.random() < failure_rate / 2 else generated(index, group_id)
            out = scoring.hear(event)
        else:
            call = asked.pop(rng.randrange(len(asked)))
            values = [None if rng.random() < failure_rate / 2 else rng.random() for _ in call.samples]
            out = scoring.hear(scored(call, *values))
        while out:
            command, *out = out
            if isinstance(command, ScoreGroup):
                asked.append(command)
            if not isinstance(command, Send) or command.to != "filter":
                continue
            for answer in filtering.hear(command.event):
                assert isinstance(answer, Send)
                match answer.event:
                    case RefillAsked(missing=missing):
                        for key in set(missing) - known:
                            known.add(key)
                            to_come.append((key.group_id, key.index))
                    case PlacesGivenUp():
                        out += scoring.hear(answer.event)
                    case GroupAdmitted(group=group):
                        gone.add(group.group_id)
                    case GroupRejected(group_id=group_id):
                        gone.add(group_id)
                    case FailuresTold(ends=(end,)):
                        assert end.reason
                    case other:
                        raise AssertionError(other)
    assert gone == set(range(4))


# --- alarms ---------------------------------------------------------------------------------------------------


def play(driver: drive.Driver[Scorer], group_id: int, *values: float | None) -> list[str]:
    """Score a group one by one; what is said about it."""
    texts: list[str] = []
    for index, value in enumerate(values):
        driver.hear(generated(index, group_id, size=len(values)))
        judged = SampleJudged(
            key=SampleKey(group_id, index),
            attempt=0,
            reward=None if value is None else Reward(value=value),
            reason="it raised" if value is None else "",
        )
        notices = drive.sent(driver.hear(judged), NoticeGiven)
        first_failure = f"the reward of sample {group_id}/{index} failed: it raised"
        assert all(notice.is_warning for notice in notices if notice.text != first_failure)
        texts += [notice.text for notice in notices if notice.text != first_failure]
    return texts


def figures(driver: drive.Driver[Scorer]) -> dict[str, float]:
    return {metric.name: metric.value for metric in driver.machine.metrics}


def alarmed(**alarms: float) -> drive.Driver[Scorer]:
    return scorer(0, (), **alarms)


def test_a_reward_that_never_varies_raises_one_alarm_and_another_after_it_has() -> None:
    driver = alarmed(constant_groups=5)
    assert [play(driver, group_id, 0.0, 0.0) for group_id in range(4)] == [[]] * 4
    (text,) = play(driver, 4, 1.0, 1.0)
    assert "equal within each of the last 5 groups" in text
    assert figures(driver)["reward/alarm"] == 1.0
    assert play(driver, 5, 1.0, 1.0) == []
    assert play(driver, 6, 1.0, 0.0) == []
    assert (figures(driver)["reward/alarm"], figures(driver)["reward/constant_groups"]) == (0.0, 0.0)
    assert sum(len(play(driver, group_id, 0.0, 0.0)) for group_id in range(7, 20)) == 1


def test_groups_of_one_are_compared_with_each_other() -> None:
    driver = alarmed(constant_groups=4)
    assert [len(play(driver, group_id, 0.5)) for group_id in range(6)] == [0, 0, 0, 1, 0, 0]
    assert play(driver, 6, 0.7) == []
    assert figures(driver)["reward/constant_groups"] == 0.0


def test_a_function_that_often_fails_raises_an_alarm() -> None:
    driver = alarmed(failed_window=20, failed_share=0.25)
    for group_id in range(19):
        play(driver, group_id, None if group_id % 4 == 0 else 1.0)
    (text,) = play(driver, 19, 1.0)
    assert "5 of the last 20 samples got no reward" in text
    assert figures(driver)["reward/failed_share"] == pytest.approx(0.25)
    assert [play(driver, group_id, 1.0) for group_id in range(20, 60)] == [[]] * 40
    assert figures(driver)["reward/alarm"] == 0.0


def test_alarms_can_be_switched_off() -> None:
    driver = alarmed(constant_groups=0, failed_window=0)
    assert [play(driver, group_id, None, 0.0) for group_id in range(300)] == [[]] * 300


# --- one Scorer after another ---------------------------------------------------------------------------------


def test_a_scorer_that_took_anothers_place_is_shown_what_that_one_had_passed_on() -> None:
    """Who had the rest of the group may be gone as well: then nobody else can say what the group consists of."""
    filtering = drive.Driver(
        Filter(
            FilterSettings(
                options=FilterOptions(
                    drop_zero_spread=False,
                    min_response_tokens=0,
                    max_response_tokens=None,
                    on_failed_sample="refill",
                    max_refills=4,
                    min_group_size=1,
                ),
                tells_scorer=True,
            )
        )
    )
    for index in (1, 2):
        filtering.hear(SampleScored(sample=drive.sample(3, index, reward=0.5), group_size=SIZE, prompt=drive.prompt(3)))
    shown = filtering.hear(ActorReturned(name="scorer", epoch=1))
    assert [command.to for command in shown if isinstance(command, Send)] == ["scorer"] * 2
    assert filtering.hear(ActorReturned(name="buffer", epoch=1)) == []

    scoring = scorer()
    assert not any(isinstance(command, ScoreGroup) for command in scoring.hear(generated(0)))
    asked = [command for told in shown if isinstance(told, Send) for command in scoring.hear(told.event)]
    (call,) = (command for command in asked if isinstance(command, ScoreGroup))
    assert [sample.key.index for sample in call.samples] == [0, 1, 2]
    assert all(sample.reward is None for sample in call.samples)
    out = [
        command
        for told in scoring.hear(scored(call, 1.0, 0.2, 0.3))
        if isinstance(told, Send)
        for command in filtering.hear(told.event)
    ]
    (admitted,) = (c.event for c in out if isinstance(c, Send) and isinstance(c.event, GroupAdmitted))
    assert [sample.reward for sample in admitted.group.samples] == [1.0, 0.5, 0.5], "the first result wins"


def test_rewards_of_a_group_that_is_settled_meanwhile_are_ignored() -> None:
    driver = scorer()
    command = drive.one(driver.hear(generated(0), generated(1), generated(2)), ScoreGroup)
    driver.hear(SamplesSettled(settled=SettledState(1, 4, ())))
    assert driver.hear(scored(command, 0.0, 0.5, 1.0)) == []


def test_a_reward_for_another_attempt_counts_for_none() -> None:
    driver = scorer()
    command = drive.one(driver.hear(generated(0), generated(1), generated(2)), ScoreGroup)
    first, *others = scored(command, 0.0, 0.5, 1.0).samples
    out = driver.hear(GroupScored(group_id=3, samples=(msgspec.structs.replace(first, attempt=1), *others)))
    assert [each.sample.key.index for each in drive.sent(out, SampleScored)] == [1, 2]
    assert indices(drive.one(out, ScoreGroup)) == [0]


@pytest.mark.parametrize("gives_one", [False, True])
def test_while_every_call_fails_only_the_first_groups_are_tried_again(*, gives_one: bool) -> None:
    driver = scorer(num_retries=1, fruitless_calls=4)
    num_again = 0
    for group_id in range(4):
        command = drive.one(driver.hear(*(generated(index, group_id) for index in range(SIZE))), ScoreGroup)
        while True:
            reward = 1.0 if gives_one and not group_id else None
            again = drive.every(driver.hear(scored(command, None, None, reward)), ScoreGroup)
            if not again:
                break
            (command,) = again
            num_again += 1
    assert num_again == (4 if gives_one else 1)


def test_rewards_of_a_call_leave_out_what_was_written_off_while_it_ran() -> None:
    driver = scorer()
    command = drive.one(driver.hear(generated(0), generated(1), generated(2)), ScoreGroup)
    assert drive.one_sent(driver.hear(generated(1 + SIZE)), ScoringFailed, to="filter").key == SampleKey(3, 1)
    out = driver.hear(scored(command, 0.0, 0.5, 1.0))
    assert [each.sample.key.index for each in drive.sent(out, SampleScored)] == [0, 2]
    assert indices(drive.one(out, ScoreGroup)) == [1 + SIZE]
