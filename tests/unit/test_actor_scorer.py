"""The Scorer: retries, deadlines, and no reward that a reward function did not give."""

from __future__ import annotations

import actor_driver as drive
import msgspec
import pytest

from penstock.actors.first_failures import MAX_KINDS
from penstock.actors.scorer.machine import SWEEP_TIMER, Scorer
from penstock.actors.scorer.settings import ScorerSettings
from penstock.messages.base import Metric
from penstock.messages.commands import Score, Send, StartTimer
from penstock.messages.flow import (
    SampleFailed,
    SampleGenerated,
    SampleScored,
    SamplesSettled,
    ScoringFailed,
    SettledState,
)
from penstock.messages.local import SampleJudged, Started, TimerFired
from penstock.messages.membership import HeldLease, LeaseStage
from penstock.messages.samples import PolicyError, Purpose, Reward, SampleKey
from penstock.messages.training import NoticeGiven


def scorer(num_retries: int = 1) -> drive.Driver[Scorer]:
    return drive.Driver(Scorer(ScorerSettings(timeout_s=10.0, num_retries=num_retries, grace_s=60.0)))


def generated(group_id: int, index: int, attempt: int = 0) -> SampleGenerated:
    return SampleGenerated(
        sample=drive.sample(group_id, index, attempt=attempt), group_size=8, prompt=drive.prompt(group_id)
    )


def judged(group_id: int, index: int, value: float | None, attempt: int = 0, reason: str = "") -> SampleJudged:
    reward = None if value is None else Reward(value=value, components=(Metric("format", 1.0),))
    return SampleJudged(key=SampleKey(group_id, index), attempt=attempt, reward=reward, reason=reason)


def sweep(driver: drive.Driver[Scorer]) -> list[object]:
    """What a sweep asks for besides the next one."""
    return [command for command in driver.hear(TimerFired(key=SWEEP_TIMER)) if not isinstance(command, StartTimer)]


def test_a_sample_is_scored_with_its_prompt_and_a_deadline() -> None:
    event = generated(3, 1)
    assert scorer().hear(event) == [Score(sample=event.sample, prompt=event.prompt, timeout_s=10.0)]


def test_a_scored_sample_goes_on_with_its_reward_in_the_outcome() -> None:
    driver = scorer()
    event = generated(3, 1)
    driver.hear(event)
    scored = drive.one_sent(driver.hear(judged(3, 1, 0.5)), SampleScored, to="filter")
    assert scored.sample.outcome.reward == Reward(value=0.5, components=(Metric("format", 1.0),))
    assert (scored.sample.key, scored.sample.parts) == (event.sample.key, event.sample.parts)
    assert (scored.group_size, scored.purpose, scored.prompt) == (8, Purpose.TRAIN, event.prompt)
    assert driver.machine.pending == {}


def test_a_sample_that_brings_its_reward_is_passed_on_as_it_is() -> None:
    driver = scorer()
    event = generated(3, 1)
    own = Reward(value=0.25, components=(Metric("steps", 4.0),))
    sample = msgspec.structs.replace(event.sample, outcome=PolicyError(detail="gave up", reward=own))
    commands = driver.hear(msgspec.structs.replace(event, sample=sample))
    scored = drive.one_sent(commands, SampleScored, to="filter")
    assert (scored.sample, scored.group_size, scored.prompt) == (sample, 8, event.prompt)
    assert drive.every(commands, Score) == []
    assert driver.machine.leases() == ()


def test_a_sample_that_comes_again_while_it_is_scored_is_not_scored_twice() -> None:
    driver = scorer()
    driver.hear(generated(3, 1))
    driver.ignores(generated(3, 1))
    driver.ignores(generated(3, 1, attempt=1))


@pytest.mark.parametrize("num_retries", [0, 1, 3])
def test_a_reward_that_fails_is_tried_again_and_then_the_sample_fails(num_retries: int) -> None:
    driver = scorer(num_retries)
    driver.hear(generated(3, 1))
    for attempt in range(num_retries):
        commands = driver.hear(judged(3, 1, None, reason="it raised"))
        assert drive.one(commands, Score).sample.key == SampleKey(3, 1)
        assert [send.to for send in drive.every(commands, Send)] == ([] if attempt else ["supervisor"])
    failed = drive.one_sent(driver.hear(judged(3, 1, None, reason="it raised")), ScoringFailed, to="filter")
    assert (failed.key, failed.reason, failed.num_tokens, failed.group_size) == (SampleKey(3, 1), "it raised", 4, 8)
    assert failed.sample == generated(3, 1).sample
    assert driver.machine.pending == {}


def test_the_first_failure_of_each_kind_is_told_at_once_with_its_line() -> None:
    driver = scorer(num_retries=0)
    told: list[str] = []
    reasons = ["ValueError: 1 (r.py:3)", "ValueError: 2 (r.py:3)", "KeyError: 'a' (r.py:9)"]
    reasons += [f"E{n}Error: x (r.py:{n})" for n in range(9)]
    for index, reason in enumerate(reasons):
        commands = driver.hear(generated(3, index), judged(3, index, None, reason=reason))
        told += [notice.text for notice in drive.sent(commands, NoticeGiven, to="supervisor")]
    assert told[:2] == [
        "the reward of sample 3/0 failed: ValueError: 1 (r.py:3)",
        "the reward of sample 3/2 failed: KeyError: 'a' (r.py:9)",
    ]
    assert len(told) == MAX_KINDS


@pytest.mark.parametrize("gives_one", [False, True])
def test_while_every_call_fails_only_the_first_ones_are_tried_again(gives_one: bool) -> None:
    driver = drive.Driver(Scorer(ScorerSettings(timeout_s=10.0, num_retries=1, fruitless_calls=4)))
    if gives_one:
        driver.hear(generated(2, 0), judged(2, 0, 1.0))
    num_again = 0
    for index in range(8):
        driver.hear(generated(3, index))
        num_again += len(drive.every(driver.hear(judged(3, index, None, reason="it took too long")), Score))
    assert num_again == (8 if gives_one else 4)


def test_an_error_never_becomes_a_reward() -> None:
    driver = scorer(num_retries=0)
    driver.hear(generated(3, 1))
    assert drive.sent(driver.hear(judged(3, 1, None, reason="timeout")), SampleScored) == []


def test_a_reward_of_zero_is_a_reward() -> None:
    driver = scorer(num_retries=0)
    driver.hear(generated(3, 1))
    assert drive.one_sent(driver.hear(judged(3, 1, 0.0)), SampleScored).sample.reward == 0.0


def test_a_verdict_on_a_sample_that_is_not_here_changes_nothing() -> None:
    driver = scorer()
    assert driver.hear(judged(3, 1, 1.0)) == []
    driver.hear(generated(3, 1))
    assert driver.hear(judged(3, 1, 1.0, attempt=4)) == []
    assert list(driver.machine.pending) == [SampleKey(3, 1)]


def test_a_sample_that_was_given_up_passes_through() -> None:
    driver = scorer()
    failed = SampleFailed(
        key=SampleKey(3, 1), attempt=2, group_size=8, prompt=drive.prompt(), reason="three engines died"
    )
    assert driver.hear(failed) == [Send("filter", failed)]


def test_settled_samples_are_forgotten() -> None:
    driver = scorer()
    driver.hear(generated(0, 0), generated(1, 0), generated(2, 0))
    driver.hear(SamplesSettled(settled=SettledState(1, 1, (2,))))
    assert list(driver.machine.pending) == [SampleKey(1, 0)]
    assert driver.hear(judged(0, 0, 1.0)) == []


def test_the_census_hears_of_what_is_being_scored() -> None:
    driver = scorer()
    driver.hear(generated(3, 1, attempt=2))
    assert driver.machine.leases() == (HeldLease(SampleKey(3, 1), 2, LeaseStage.RUNNING, 4),)


def test_a_backend_that_answers_nothing_for_a_whole_period_has_lost_what_it_was_asked() -> None:
    driver = scorer(num_retries=1)
    assert driver.hear(Started(epoch=0)) == [StartTimer(SWEEP_TIMER, 70.0)]
    driver.hear(generated(3, 1))
    assert sweep(driver) == []
    assert [type(command) for command in sweep(driver)] == [Send, Score]
    assert sweep(driver) == []
    failed = drive.one_sent(driver.hear(TimerFired(key=SWEEP_TIMER)), ScoringFailed)
    assert failed.reason == "the reward backend did not answer"


def test_a_backend_that_is_only_behind_is_waited_for() -> None:
    """A thousand samples before this one, each allowed to take its ten seconds: nothing is lost as long as any of them
    is answered."""
    driver = scorer()
    driver.hear(generated(3, 1))
    for group_id in range(10, 20):
        driver.hear(generated(group_id, 0), judged(group_id, 0, 1.0))
        assert sweep(driver) == []
    assert drive.sent(driver.hear(judged(3, 1, 1.0)), SampleScored) != []
